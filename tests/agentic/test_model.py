import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import make_model

from agentic.config import build
from agentic.model import AgenticTransformer, ModelSpec

KINDS = list(itertools.product(["step", "interleaved"], ["vanilla", "memory_efficient"]))


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


def test_rubbish_in_padding_leaves_gradients_finite(random_steps):
    model = make_model()
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


def test_recomputation_changes_no_gradient(random_steps):
    steps = random_steps(2, 3, 5)
    grads = []
    for recompute in (False, True):
        model = make_model(recompute=recompute)
        model(steps).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
