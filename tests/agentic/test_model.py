import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import make_model

from agentic.model import AgenticTransformer, ModelSpec
from agentic.strict import build
from parallel import LAYERS, BlockSettings

KINDS = list(itertools.product(["step", "interleaved"], LAYERS))


@torch.no_grad()
@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_future_never_changes_earlier_actions(layout, kind, random_steps):
    model = make_model(layout=layout, kind=kind)
    steps, other = random_steps(2, 3, 5, seed=0), random_steps(2, 3, 5, seed=1)
    before = model(steps)
    for t in (0, 4, 5, 13):
        mixed = {}
        for name in ("return_to_go", "observation", "action", "reward", "completion"):
            value = getattr(steps, name).clone()
            # What is not known yet when a_t is chosen: everything later, and its own outcome.
            start = t if name in ("action", "reward", "completion") else t + 1
            value[:, start:] = getattr(other, name)[:, start:]
            mixed[name] = value
        after = model(dataclasses.replace(steps, **mixed))
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert not torch.equal(after[:, t + 1 :], before[:, t + 1 :])


@torch.no_grad()
@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_a_later_trajectory_sees_an_earlier_one(layout, kind, random_steps):
    model = make_model(layout=layout, kind=kind)
    steps = random_steps(1, 2, 5)
    changed = steps.observation.clone()
    changed[:, 0] += 1
    after = model(dataclasses.replace(steps, observation=changed))
    assert not torch.equal(after[:, 5:], model(steps)[:, 5:])


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(
    "method",
    [
        {"method": "at", "layout": "step"},
        {"method": "at", "layout": "interleaved"},
        {"method": "bc", "context_steps": 2, "trajectories": 1},
    ],
)
@torch.no_grad()
def test_a_hidden_task_is_seen_through_returns_alone(method, told, random_steps):
    model = make_model(**method, tasks=("a", "b"), task_embedding=told)
    model.return_scale.copy_(torch.tensor([1.0, 4.0]))
    steps = random_steps(2, 1, 5, tasks=2)
    # The other task, and the same returns-to-go in its units.
    unit_B1 = torch.tensor([[4.0], [0.25]])
    other = dataclasses.replace(
        steps, task=steps.task.flip(0), return_to_go=steps.return_to_go * unit_B1
    )
    assert torch.equal(model(steps), model(other)) is not told


@torch.no_grad()
@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_padding_never_changes_anything(layout, kind, random_steps):
    model = make_model(layout=layout, kind=kind)
    steps = random_steps(2, 3, 5)
    valid = steps.valid.clone()
    valid[0, 10:] = False
    clean = model(dataclasses.replace(steps, valid=valid))
    for rubbish in (0.0, 1e30, float("nan"), float("inf")):
        filled = {}
        for name in ("return_to_go", "observation", "action", "reward"):
            value = getattr(steps, name).clone()
            value[0, 10:] = rubbish
            filled[name] = value
        dirty = model(dataclasses.replace(steps, valid=valid, **filled))
        assert torch.equal(dirty[0, :10], clean[0, :10])
        assert torch.equal(dirty[1], clean[1])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_sequence_of_nothing_but_padding_is_finite_with_finite_gradients(kind, random_steps):
    model, steps = make_model(kind=kind), random_steps(2, 2, 5)
    valid = steps.valid.clone()
    valid[0] = False
    actions = model(dataclasses.replace(steps, valid=valid))
    assert actions.isfinite().all()
    torch.testing.assert_close(actions[1], model(steps)[1], rtol=0, atol=1e-6)
    actions.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_padding_before_a_trajectory_is_a_bug(random_steps):
    steps = random_steps(1, 2, 5)
    valid = steps.valid.clone()
    valid[0, :5] = False
    with pytest.raises(AssertionError, match="padding is on the right"):
        make_model()(dataclasses.replace(steps, valid=valid))


@torch.no_grad()
@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_the_order_of_trajectories_is_seen_by_causality_and_embedding_alone(layout, random_steps):
    """No position beside the timestep's: exchanged, two trajectories are the same past."""
    steps = random_steps(1, 3, 5)
    steps.completion.zero_()  # of the last step is told with the next trajectory's first
    order = torch.tensor([*range(5, 10), *range(5), *range(10, 15)])
    exchanged = {
        name: value[:, order] if name not in ("task", "trajectory") else value
        for name, value in vars(steps).items()
    }
    for layers, embedding, same in ((1, False, True), (2, False, False), (1, True, False)):
        model = make_model(layout=layout, layers=layers, trajectory_embedding=embedding)
        before, after = (model(s)[:, 10:] for s in (steps, dataclasses.replace(steps, **exchanged)))
        assert torch.allclose(before, after, rtol=0, atol=1e-6) == same
    later = dataclasses.replace(steps, timestep=(steps.timestep + 1) % 5)
    model = make_model(layout=layout)
    assert not torch.allclose(model(later), model(steps), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", LAYERS)
def test_rubbish_in_padding_leaves_gradients_finite(kind, random_steps):
    model = make_model(kind=kind)
    steps = random_steps(1, 2, 5)
    valid, observation = steps.valid.clone(), steps.observation.clone()
    valid[:, 5:] = False
    observation[:, 5:] = 1e20
    steps = dataclasses.replace(steps, valid=valid, observation=observation)
    model(steps)[:, :5].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def test_actions_are_in_range_and_units_are_applied(random_steps):
    model = make_model()
    steps = random_steps(2, 3, 5)
    raw = model(steps)
    assert raw.shape == (2, 15, 2)
    assert raw.abs().max() < 1
    mean, std = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.5, 4.0])
    model.set_units(observation_mean=mean, observation_std=std, return_scale=np.array([10.0]))
    scaled = dataclasses.replace(
        steps,
        observation=steps.observation * torch.tensor(std).float() + torch.tensor(mean).float(),
        return_to_go=steps.return_to_go * 10,
    )
    assert model(scaled) == pytest.approx(raw, abs=1e-5)


@torch.no_grad()
def test_tasks_have_their_own_return_scale_and_vector(random_steps):
    model = make_model(tasks=("a", "b"))
    steps = random_steps(2, 1, 5, tasks=2)
    same = dataclasses.replace(
        steps, **{n: getattr(steps, n)[:1].expand(2, *getattr(steps, n).shape[1:]) for n in
                  ("return_to_go", "observation", "action", "reward")}
    )  # fmt: skip
    first, second = model(same)
    assert not torch.equal(first, second)
    model.set_units(
        observation_mean=np.zeros(3), observation_std=np.ones(3), return_scale=np.array([1.0, 5.0])
    )
    again, changed = model(same)
    assert torch.equal(again, first)
    assert not torch.equal(changed, second)


def test_spec_survives_plain_types():
    model = make_model(trajectory_embedding=True)
    again = build(ModelSpec, model.spec.to_dict())
    assert again == model.spec
    AgenticTransformer(again).load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", LAYERS)
def test_recomputation_changes_no_gradient(kind, random_steps):
    steps = random_steps(2, 3, 5)
    grads = []
    for recompute in (False, True):
        model = make_model(recompute=recompute, kind=kind)
        model(steps).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    # Not bit by bit: the head's gradient is summed in blocks or at once.
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_what_is_dropped_is_dropped_again_in_recomputation(layout, kind, random_steps):
    steps, found = random_steps(2, 3, 5), []
    for recompute in (False, True):
        changes = {"past_action": "dropout", "past_reward": "dropout", "layer_dropout": 0.1}
        model = make_model(layout=layout, kind=kind, recompute=recompute, **changes).train()
        torch.manual_seed(1)
        loss = model.loss(steps, torch.ones(2, 15))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_a_loss_in_blocks_is_the_mean_of_all_weighted_steps(layout, random_steps, monkeypatch):
    monkeypatch.setattr("agentic.model.HEAD_ROWS", 4)
    steps = random_steps(2, 1, 7)
    for name in ("return_to_go", "observation", "action", "reward", "completion"):
        object.__setattr__(steps, name, getattr(steps, name).double())
    valid, weight_BL = steps.valid.clone(), torch.ones(2, 7, dtype=torch.float64)
    valid[1, 5:] = False
    weight_BL[~valid] = 0
    weight_BL[0, 5:] = 0  # half of the last block
    steps, found = dataclasses.replace(steps, valid=valid), []
    blocks = {"block_query": 4, "block_key": 4, "block_rows": 4}
    for changes in ({"kind": "vanilla"}, {"kind": "blockwise", **blocks}):
        model = make_model(layout=layout, episode_steps=7, **changes).double()
        loss = model.loss(steps, weight_BL)
        if changes["kind"] == "vanilla":
            error_BL = (model(steps) - steps.action).square().mean(dim=2)
            loss = torch.cat([error_BL[0, :5], error_BL[1, :5]]).mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", ["step", "interleaved"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("first", [0, 7])
def test_all_kinds_of_layer_are_one_model(layout, padded, first, random_steps):
    steps = random_steps(2, 3, 5)
    for name in ("return_to_go", "observation", "action", "reward", "completion"):
        object.__setattr__(steps, name, getattr(steps, name).double())
    if padded:
        valid = steps.valid.clone()
        valid[0, 9:] = False
        steps = dataclasses.replace(steps, valid=valid)
    found = []
    for kind in LAYERS:
        blocks = {"block_query": 4, "block_rows": 3} if kind == "blockwise" else {}
        model = make_model(layout=layout, kind=kind, **blocks).double()
        actions = model(steps, first)
        counted = actions * steps.valid[:, first:, None]
        counted.square().sum().backward()
        found.append([counted.detach(), *(p.grad for p in model.parameters())])
        whole = model(steps)[:, first:] * steps.valid[:, first:, None]
        torch.testing.assert_close(whole, counted, rtol=0, atol=1e-12)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_block_sizes_reach_the_layers():
    model = make_model(kind="blockwise", block_query=4, block_key=5, block_rows=3)
    for layer in model.layers:
        assert layer.blocks == BlockSettings(query=4, key=5, rows=3)
    with pytest.raises(ValueError, match=r"layer.block_key: got 5, expected null: vanilla has no"):
        make_model(kind="vanilla", block_key=5)


@pytest.mark.parametrize("kind", ["memory_efficient", "blockwise"])
def test_head_and_embedding_keep_nothing_where_memory_counts(kind, random_steps, monkeypatch):
    """Only the layers' inputs (and the blockwise ones' attention output) wait for the backward."""
    monkeypatch.setattr("agentic.model.HEAD_ROWS", 8)
    model = make_model(kind=kind, recompute=True, layout="interleaved")
    steps = random_steps(1, 3, 5)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes() >= 4 * 16 * 15:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(steps)
    unit = 4 * 16 * 60  # one value of each width for each token
    assert sum(kept.values()) == 2 * unit + unit // 4  # two layers' inputs, the head's


@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_without_its_embedding_the_time_changes_nothing(layout, random_steps):
    steps = random_steps(1, 1, 4)
    later = dataclasses.replace(steps, timestep=steps.timestep.where(steps.timestep == 0, 4))
    with torch.no_grad():
        for embedded in (True, False):
            model = make_model(layout=layout, timestep_embedding=embedded)
            assert torch.equal(model(steps), model(later)) != embedded
            assert any("timestep" in name for name, _ in model.named_parameters()) == embedded
