"""Steps that are not finite: left out, counted, told, and traced to where they began."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from ranks import run_ranks
from spread import spread_trainer
from training import make_trainer, run_trainer, scalars

from agentic import checkpoint
from agentic.config import OptimizerConfig
from agentic.nonfinite import Survey, chains_of


def _spoil_data(trainer, indices, chains=1):
    """Has the reader hand out NaN in the first chains of these micro-batches."""
    batch = trainer.stream.sampler.batch

    def spoilt(index):
        steps, weight_BL = batch(index)
        if index in indices:
            steps.observation[:chains, :, 1] = np.nan
        return steps, weight_BL

    trainer.stream.sampler.batch = spoilt


def _spoil_gradient(trainer, indices):
    hook = trainer.model.layers[0].get_parameter(_weight(trainer)).register_hook
    hook(lambda g: g * float("inf") if trainer.stream.position - 1 in indices else g)


def _weight(trainer):
    """A matrix of the first layer."""
    return next(n for n, p in trainer.model.layers[0].named_parameters() if p.ndim == 2)


def _spoil_activation(trainer, indices):
    def spoil(module, given, output):
        return output * float("nan") if trainer.stream.position - 1 in indices else output

    trainer.model.layers[1].register_forward_hook(spoil)


SPOILED = {
    "batch.observation": _spoil_data,
    "gradient.layers.0.": _spoil_gradient,
    "activation.layers.1": _spoil_activation,
}


def _states(trainer):
    state = trainer.state()
    moments = trainer.optimizer.state_dict()["state"]
    return [
        *(value for name in ("model", "averaged") for value in state[name].values()),
        *(value for each in moments.values() for value in each.values()),
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("first", SPOILED)
def test_a_step_that_is_not_finite_changes_nothing_but_the_count(
    tmp_path, first, precision, capsys
):
    trainer = make_trainer(tmp_path, precision=precision)
    SPOILED[first](trainer, {4})
    for _ in range(2):
        trainer.update()
    before = [value.clone() for value in _states(trainer)]
    measured = trainer.update()
    assert not np.isfinite(measured["train/gradient_norm"])
    after = _states(trainer)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))
    assert (trainer.step, trainer.stream.position) == (3, 6)
    assert (trainer.skips.total, trainer.skips.in_row) == (1, 1)
    trainer.update()
    assert (trainer.skips.total, trainer.skips.in_row) == (1, 0)
    assert not torch.equal(_states(trainer)[3], before[3])


def test_a_step_left_out_is_told_and_logged_with_its_chains(tmp_path, capsys):
    trainer = make_trainer(tmp_path)
    _spoil_data(trainer, {5, 12})
    run_trainer(trainer)
    told = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert [line.split(":")[0] for line in told] == ["step 3", "step 7"]
    sampler = trainer.stream.sampler
    for line, count, indices in zip(told, (1, 2), ((4, 5), (12, 13)), strict=True):
        assert f"loss nan, gradient norm nan: left out (1 in a row, {count} so far)" in line
        assert f"micro-batches {indices[0]} to {indices[1]}" in line
        for episode in chains_of(sampler, indices[0])[0]["episodes"]:
            assert episode.startswith("memory/")
            assert episode in line
    logged = scalars(tmp_path)
    counts = [line["train/skipped_steps"] for line in logged if "train/skipped_steps" in line]
    assert counts == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    (first, _) = [line for line in logged if "train/skipped_chains" in line]
    assert first["train/skipped_chains"] == chains_of(sampler, 4) + chains_of(sampler, 5)
    assert checkpoint.load(checkpoint.newest(tmp_path))["skipped"] == [2, 0]


def test_chains_are_those_of_the_micro_batch(tmp_path):
    sampler = make_trainer(tmp_path).stream.sampler
    kinds = set()
    for index in range(12):
        steps, _ = sampler.batch(index)
        chains = chains_of(sampler, index)
        assert len(chains) == len(steps.task)
        kinds.add("from" in chains[0])
        for b, chain in enumerate(chains):
            episodes = [int(name.removeprefix("memory/")) for name in chain["episodes"]]
            start = chain.get("from", [0] * len(episodes))
            length = chain.get("steps", sampler.store.steps)
            place_NT = np.add.outer(start, np.arange(length))
            expected = sampler.store.observation(np.array(episodes)[:, None], place_NT)
            valid = steps.observation[b][steps.valid[b]].numpy()
            assert np.array_equal(valid, expected.reshape(valid.shape))
    assert kinds == {False, True}


@pytest.mark.parametrize("spoilt", [{0, 8, 9}, {1, 2, 4, 10}])  # with the first step, in a row
def test_resumed_equals_straight_with_steps_left_out(tmp_path, spoilt):
    def train(run_dir, steps, resume=False):
        trainer = make_trainer(run_dir, clocks=clocks)
        _spoil_data(trainer, spoilt)
        if resume:
            trainer.resume()
        update = trainer.update

        def ended():
            if trainer.step == steps:
                raise KeyboardInterrupt
            return update()

        trainer.update = ended
        if steps < 12:
            with pytest.raises(KeyboardInterrupt):
                run_trainer(trainer)
        else:
            run_trainer(trainer)
        return trainer

    clocks = dataclasses.replace(make_trainer(tmp_path / "none").config.clocks, checkpoint_steps=1)
    straight = train(tmp_path / "straight", 12)
    for steps in (1, 2, 5, 8, 12):
        resumed = train(tmp_path / "parts", steps, resume=steps > 1)
    for ours, theirs in zip(_states(resumed), _states(straight), strict=True):
        assert torch.equal(ours, theirs)
    assert str(scalars(tmp_path / "parts")) == str(scalars(tmp_path / "straight"))  # NaN among it
    assert resumed.state()["skipped"] == straight.state()["skipped"]


@pytest.mark.parametrize("first", SPOILED)
def test_too_many_in_a_row_end_the_run_with_sound_weights_and_a_report(tmp_path, first):
    optimizer = dataclasses.replace(make_trainer(tmp_path / "none").config.optimizer, skip_limit=3)
    trainer = make_trainer(tmp_path, optimizer=optimizer)
    SPOILED[first](trainer, {2, 7, 9, 11})
    with pytest.raises(ValueError, match="step 6: 3 steps in a row were not finite") as stopped:
        run_trainer(trainer)
    told = str(stopped.value)
    assert f"first bad tensor: {first}" in told
    assert f"resume={tmp_path} goes on" in told
    assert "\n" not in told
    report = json.loads((tmp_path / "nonfinite_000000006.json").read_text())
    assert report["step"] == 6
    assert report["tensors"][0]["name"].startswith(first)
    (index,) = {chain["micro_batch"] for chain in report["chains"]}
    # Hooks know the position alone, which is that behind the step in both micro-batches.
    assert index == (11 if first == "batch.observation" else 10)
    flagged = [chain for chain in report["chains"] if "not_finite" in chain]
    if first == "batch.observation":
        length = trainer.stream.sampler.batch(11)[0].observation.shape[1]
        assert report["tensors"][0] == {"name": first, "nan": length, "inf": 0}
        assert [chain["not_finite"] for chain in flagged] == [["observation"]]
        assert all(name in told for name in flagged[0]["episodes"])
    else:
        assert not flagged
    resumed = make_trainer(tmp_path, optimizer=optimizer)
    resumed.resume()
    assert resumed.step == 6
    assert resumed.state()["skipped"] == [4, 0]
    assert all(value.isfinite().all() for value in _states(resumed))
    run_trainer(resumed)
    assert resumed.step == 12


def test_a_norm_beyond_the_numbers_is_traced_to_no_tensor(tmp_path):
    optimizer = dataclasses.replace(make_trainer(tmp_path / "none").config.optimizer, skip_limit=1)
    trainer = make_trainer(tmp_path, optimizer=optimizer)
    trainer.model.head.weight.register_hook(lambda g: torch.full_like(g, 1e30))
    with pytest.raises(ValueError, match="all numbers are finite when they are computed again"):
        run_trainer(trainer)


def test_a_survey_names_what_it_comes_upon_in_the_order_of_the_computation(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.train()
    survey = Survey(trainer.imitation, trainer.mesh)
    batch = trainer.stream.sampler.batch(0)
    assert survey.run(*batch) == {}
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("nan")
    found = list(survey.run(*batch))
    assert found[0] == "parameter.norm.weight"
    kinds = [name.split(".")[0] for name in found]
    assert kinds == sorted(kinds, key=["parameter", "activation", "loss", "gradient"].index)
    assert found.index("activation.norm") < found.index("activation.head") < found.index("loss")
    assert not [name for name in found if name.startswith("activation.layers")]
    gradients = [name for name in found if name.startswith("gradient")]
    assert gradients[0].startswith("gradient.head")
    assert gradients[-1].startswith("gradient.embedding")
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules()]
    assert not any(hooks)


def test_the_limit_is_at_least_one():
    fields = {f.name: 1 for f in dataclasses.fields(OptimizerConfig)} | {"betas": (0.9, 0.9)}
    with pytest.raises(ValueError, match="optimizer.skip_limit: got 0"):
        OptimizerConfig(**fields | {"skip_limit": 0, "average": 0})


@pytest.mark.parametrize("case", ["data", "x"])
@pytest.mark.parametrize("first", ["batch.observation", "gradient.layers.0."])
def test_all_processes_leave_out_the_same_steps_and_stop_together(tmp_path, case, first):
    ours, theirs = run_ranks(2, _spoilt, case, first, tmp_path)
    assert ours[0] == theirs[0] == [0, 1, 1, 2, 3]  # steps left out after each
    assert f"first bad tensor: {first}" in ours[1]
    assert theirs[1] == "MainFailed"
    assert ours[2] == theirs[2] == 5
    state = checkpoint.load(checkpoint.newest(tmp_path))
    assert (state["step"], state["skipped"]) == (5, [3, 0])
    assert all(value.isfinite().all() for value in state["model"].values())


def _spoilt(rank, case, first, run_dir):
    """The last process alone has bad numbers, in the second, fourth and fifth step."""
    trainer = spread_trainer(case, run_dir, 10, torch.float32)
    trainer.skips.limit = 2
    if rank == 1:
        all_chains = (None,) if first == "batch.observation" else ()  # it may have no others
        SPOILED[first](trainer, {2, 3, 6, 7, 8, 9}, *all_chains)
    counts = []
    update = trainer.update

    def counted():
        measured = update()
        counts.append(trainer.skips.total)
        return measured

    trainer.update = counted
    try:
        trainer.train(None, progress=False)
    except (ValueError, RuntimeError) as error:
        told = str(error) or type(error).__name__
    return counts, told, trainer.step
