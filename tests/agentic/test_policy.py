import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import make_model

from agentic.policy import Policy
from agentic.tokens import Steps


def _act_through(model, steps, policy=None):
    """The actions that a policy takes when the world answers as recorded in `steps`."""
    policy = policy or Policy(model, steps.task.numpy(), trials=int(steps.trajectory.max()) + 1)
    actions = []
    for t in range(steps.timestep.shape[1]):
        if steps.timestep[0, t] == 0:
            policy.begin_trial()
        actions.append(
            policy.act(steps.observation[:, t].numpy(), steps.return_to_go[:, t].numpy())
        )
        policy.record(
            steps.action[:, t].numpy(), steps.reward[:, t].numpy(), steps.completion[:, t].numpy()
        )
    return np.stack(actions, axis=1)


def _steps_of(steps, first, end):
    """A part of the steps, copied."""
    return Steps(
        **{
            f.name: steps.task if f.name == "task" else getattr(steps, f.name)[:, first:end].clone()
            for f in dataclasses.fields(steps)
        }
    )


@pytest.mark.parametrize(
    ("layout", "past", "trajectory_embedding"),
    list(itertools.product(["step", "interleaved"], ["keep", "none"], [False, True])),
)
def test_cached_equals_encoding_the_whole_context_again(
    layout, past, trajectory_embedding, random_steps
):
    model = make_model(
        layout=layout,
        past_action=past,
        past_reward=past,
        trajectory_embedding=trajectory_embedding,
        timestep_embedding=trajectory_embedding or past == "keep",
        tasks=("a", "b"),
    )
    model.set_units(
        observation_mean=np.full(3, 0.3),
        observation_std=np.full(3, 2.0),
        return_scale=np.array([3.0, 4.0]),
    )
    steps = random_steps(3, 3, 5, tasks=2)
    cached = _act_through(model, steps)
    with torch.no_grad():
        for t in range(15):  # what the context holds when a_t is chosen, and nothing more
            known = _steps_of(steps, 0, t + 1)
            for name in ("action", "reward", "completion"):
                getattr(known, name)[:, t] = 0
            assert cached[:, t] == pytest.approx(model(known)[:, t].numpy(), abs=1e-5)


def test_cached_equals_full_at_real_size(random_steps):
    model = make_model(width=128, heads=1, layers=3, feed_forward=4, episode_steps=300)
    steps = random_steps(2, 3, 300)
    with torch.no_grad():
        full = model(steps).numpy()
    assert _act_through(model, steps) == pytest.approx(full, abs=1e-5)


def _decode_through(model, steps, dtype):
    """Every action of `steps`, step by step, with caches of that dtype."""
    B, L = steps.timestep.shape
    caches = model.caches(B, L, dtype)
    assert all(cache.key_PNCK.dtype == dtype for cache in caches)
    actions, previous = [], None
    for t in range(L):
        current = Steps(
            **{
                f.name: steps.task if f.name == "task" else getattr(steps, f.name)[:, t : t + 1]
                for f in dataclasses.fields(steps)
            }
        )
        actions.append(model.decode(previous, current, caches))
        previous = current
    return torch.stack(actions, dim=1)


@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_decoding_in_double_precision_and_with_a_bf16_cache(layout, random_steps):
    model = make_model(layout=layout, episode_steps=300).double()
    steps = random_steps(2, 2, 300)
    steps = Steps(
        **{
            f.name: value.double()
            if (value := getattr(steps, f.name)).is_floating_point()
            else value
            for f in dataclasses.fields(steps)
        }
    )
    with torch.no_grad():
        full = model(steps)
    exact = _decode_through(model, steps, torch.float64)
    torch.testing.assert_close(exact, full, rtol=0, atol=1e-12)
    half = _decode_through(model, steps, torch.bfloat16)
    assert half.dtype == torch.float64
    torch.testing.assert_close(half, full, rtol=0, atol=0.01)
    assert not torch.allclose(half, full, rtol=0, atol=1e-6)


def test_contexts_do_not_see_each_other(random_steps):
    model = make_model()
    together = _act_through(model, random_steps(2, 2, 5))
    steps = random_steps(2, 2, 5)
    alone = Steps(**{f.name: getattr(steps, f.name)[1:] for f in dataclasses.fields(steps)})
    assert _act_through(model, alone)[0] == pytest.approx(together[1], abs=1e-6)


def test_more_trials_than_trajectory_embeddings():
    model = make_model(trajectory_embedding=True)
    with pytest.raises(ValueError, match="trials: got 4, expected at most 3"):
        Policy(model, np.zeros(1, int), trials=4)


def test_a_full_cache_says_so(random_steps):
    model = make_model()
    policy = Policy(model, np.zeros(1, int), trials=1)
    policy.begin_trial()
    for _ in range(5):
        policy.act(np.zeros((1, 3)), np.ones(1))
        policy.record(np.zeros((1, 2)), np.zeros(1), np.zeros(1))
    policy.begin_trial()
    with pytest.raises(ValueError, match="cache: got 6 tokens, expected at most its capacity 5"):
        policy.act(np.zeros((1, 3)), np.ones(1))


@pytest.mark.parametrize("layout", ["step", "interleaved"])
@pytest.mark.parametrize("remember", [1, 2, 3])
def test_a_context_of_limited_size_holds_the_last_trials(layout, remember, random_steps):
    # With one layer, keys and values depend on their own tokens only: what is left is what a model
    # would see that has been shown the last trials and nothing else.
    model = make_model(layout=layout, past_action="keep", past_reward="keep", layers=1)
    steps = random_steps(2, 4, 5)
    steps.completion.zero_()  # else the first token of a trial tells of the one before
    policy = Policy(model, steps.task.numpy(), trials=4, remember=remember)
    acted = _act_through(model, steps, policy)
    with torch.no_grad():
        for trial in range(4):
            first = max(0, trial + 1 - remember)
            shown = _steps_of(steps, 5 * first, 5 * trial + 5)
            expected = model(shown)[:, -5:].numpy()
            assert acted[:, 5 * trial : 5 * trial + 5] == pytest.approx(expected, abs=1e-5)
    assert policy.caches[0].length <= remember * 5 * model.spec.tokens_per_step


def test_a_bf16_cache_is_half_as_large_and_acts_almost_alike(random_steps):
    model, steps = make_model(), random_steps(2, 3, 5)
    wide, half = (Policy(model, steps.task.numpy(), 3, cache=c) for c in ("fp32", "bf16"))
    assert 2 * half.caches[0].nbytes == wide.caches[0].nbytes
    exact, rounded = _act_through(model, steps, wide), _act_through(model, steps, half)
    assert rounded == pytest.approx(exact, abs=2e-2)
    assert not np.array_equal(rounded, exact)
    for trials, cache in ((3, "fp32"), (2, "bf16")):
        policy = Policy(model, steps.task.numpy(), trials, cache=cache)
        size = model.spec.cache_bytes(2 * trials, cache)
        assert sum(cache.nbytes for cache in policy.caches) == size


def _changed(memory, name, change):
    if name == "caches":
        (key, value), *others = memory["caches"]
        return memory | {"caches": [(change(key), value), *others]}
    return memory | {"previous": memory["previous"] | {name: change(memory["previous"][name])}}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("caches", lambda key: key[:1], "keys and values: got .* expected"),
        ("caches", lambda key: key.double(), "keys and values: got torch.float64"),
        ("caches", lambda key: key * float("nan"), "keys and values: got numbers that are not"),
        ("caches", lambda key: None, "keys and values: got no tensor"),
        ("task", lambda task: task + 7, "task: got .7"),
        ("trajectory", lambda place: place + 5, "trajectory: got .*expected 0"),
        ("timestep", lambda step: step * 0, "timestep: got .*expected 4"),
        ("observation", lambda seen: seen[..., :1], "observation: got .*expected"),
    ],
)
def test_a_memory_of_another_form_is_refused(random_steps, name, change, words):
    model, steps = make_model(), random_steps(2, 1, 5)
    policy = Policy(model, steps.task.numpy(), trials=2)
    _act_through(model, steps, policy)
    memory = policy.memory()
    fresh = Policy(model, steps.task.numpy(), trials=2)
    with pytest.raises(ValueError, match=f"^memory: {words}"):
        fresh.recall(_changed(memory, name, change))
    fresh.recall(memory)
    assert fresh.caches[0].length == policy.caches[0].length


@pytest.mark.parametrize("memory", [None, {}, {"caches": []}, {"caches": [1], "previous": {}}])
def test_what_is_no_memory_at_all_is_refused(memory):
    policy = Policy(make_model(), np.zeros(1, int), trials=1)
    with pytest.raises(ValueError, match="^memory: expected"):
        policy.recall(memory)
