import dataclasses
import os
import signal

import pytest
import torch
from conftest import make_model, make_store
from training import make_config, make_trainer, run_trainer, scalars

from agentic import checkpoint
from agentic.config import RolloutConfig
from agentic.imitation import learning_rate
from agentic.model import action_loss


def test_a_checkpoint_older_than_a_setting_is_resumed(tmp_path):
    trainer = make_trainer(tmp_path)
    state = trainer.state()
    for name in ("block_query", "block_key", "block_rows"):
        del state["config"]["layer"][name]
        del state["spec"]["layer"][name]
    del state["config"]["data"], state["stream"]
    state["step"] = 3
    trainer.load_state(state)
    assert trainer.stream.position == 3 * trainer.config.optimizer.accumulate


def test_other_data_are_refused_on_resume(tmp_path):
    trainer = make_trainer(tmp_path)
    state = trainer.state()
    trainer.store = make_store([1.0, 2.0, 9.0], steps=5)
    with pytest.raises(ValueError, match="data_dir: got 3 episodes, expected the same data"):
        trainer.load_state(state)


def test_other_settings_are_refused_on_resume(tmp_path):
    state = make_trainer(tmp_path).state()
    changed = dataclasses.replace(make_config(make_model()).optimizer, weight_decay=0.5)
    with pytest.raises(ValueError, match="optimizer: got .*0.5.*as in the checkpoint"):
        make_trainer(tmp_path, optimizer=changed).load_state(state)


def test_trials_beyond_the_trajectory_embedding_are_refused_before_training():
    model = make_model(trajectory_embedding=True)
    rolling = RolloutConfig(contexts=1, trials=3, target=1.0)
    with pytest.raises(ValueError, match="evaluation.trials: got 3, expected at most"):
        make_config(model, evaluation=rolling)


def test_loss_falls_and_old_checkpoints_go(tmp_path):
    trainer = make_trainer(tmp_path, steps=60)
    before = trainer.validate()
    assert run_trainer(trainer) is None
    assert trainer.validate() < 0.5 * before
    assert [p.name for p in checkpoint.step_files(tmp_path)] == [
        "step_000000055.pt",
        "step_000000060.pt",
    ]
    steps = [line["step"] for line in scalars(tmp_path)]
    assert steps == sorted(steps)
    assert any("validation/loss" in line for line in scalars(tmp_path))
    assert any(p.name.startswith("events.out") for p in tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_between_two_micro_batches(tmp_path, number):
    trainer = make_trainer(tmp_path, steps=1000)
    update = trainer.update

    def interrupted():
        if trainer.step == 3:
            os.kill(os.getpid(), number)
        return update()

    trainer.update = interrupted
    before = signal.getsignal(number)
    assert run_trainer(trainer) == number
    state = checkpoint.load(checkpoint.newest(tmp_path))
    assert (state["step"], state["stream"]) == (3, {"position": 6})  # the step begun is undone
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert signal.getsignal(number) is before


def test_accumulation_is_the_mean_of_its_micro_batches(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.eval()
    trainer.model.train = lambda: trainer.model  # no dropout: the two ways draw differently
    losses = [trainer.imitation(*trainer.stream.sampler.batch(i)) for i in range(2)]
    expected = torch.autograd.grad(
        sum(losses) / 2, list(trainer.model.parameters()), allow_unused=True
    )
    seen = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (
        seen.extend(p.grad for p in trainer.model.parameters()),
        step(),
    )
    trainer.config = dataclasses.replace(
        trainer.config, optimizer=dataclasses.replace(trainer.config.optimizer, clip_norm=1e9)
    )
    trainer.update()
    for ours, theirs in zip(seen, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, atol=1e-7)


def test_learning_rate_by_hand():
    model = make_model()
    config = make_config(model, steps=13)
    rates = [learning_rate(step, config) for step in range(13)]
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert rates[8] == pytest.approx(1e-2 * (0.1 + 0.9 * 0.5))  # half way of the decay
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_action_loss_by_hand():
    action = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [9.0, 9.0]]])
    predicted = torch.zeros(1, 3, 2)
    weight = torch.tensor([[1.0, 3.0, 0.0]])
    loss = action_loss(predicted, action, weight, weight.sum())
    assert loss.item() == pytest.approx((0.5 + 3 * 0.25) / 4)
