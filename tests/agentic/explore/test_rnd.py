import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentic.collect_config import small_rnd
from agentic.episodes import write_episode
from agentic.explore import stream
from agentic.explore.memory import Memory
from agentic.explore.recording import Recording
from agentic.explore.rnd import Learner, Novelty, RunningVariance, problem, rnd
from envs import TASKS, EnvPool

CARTPOLE = TASKS["cartpole_swingup"]
TINY = replace(
    small_rnd(),
    environments=2,
    seed_steps=400,
    hidden=8,
    novelty_hidden=8,
    novelty_size=4,
    batch=8,
    updates_per_step=0.03125,
    replay_capacity=5000,
)
PAPER = replace(small_rnd(), hidden=1024, novelty_hidden=1024, novelty_size=512)


@pytest.fixture(autouse=True)
def _quick_physics(monkeypatch):
    """Leaky integrators of the action: a simulator would take most of these tests' time."""

    def step(pool, action):
        pool._observation = 0.98 * pool._observation + 0.1 * action
        pool._steps_left -= 1
        reward = pool._observation[:, 0].astype(float)
        return pool._observation.copy(), reward, pool._physics.copy(), pool._steps_left == 0

    monkeypatch.setattr(EnvPool, "step", step)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rng(seed=0):
    return np.random.default_rng(seed)


def round_of(memory, seed, config=TINY):
    """One round of two episodes; they are written where the memory will find them."""
    episodes = list(itertools.islice(rnd(CARTPOLE, rng(seed), config, memory), 2))
    buffer = memory.folder / "buffer"
    buffer.mkdir(exist_ok=True)
    for episode in episodes:
        write_episode(buffer / f"episode_{len(list(buffer.iterdir())):06d}_1000.npz", episode)
    return episodes


def assert_same(one, other):
    """Nested dicts of tensors and plain types, equal to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_running_variance_by_hand():
    scale = RunningVariance()
    scale.add(torch.tensor([[1.0], [3.0]]))  # mean 2, variance 2, after 1e-4 numbers of variance 1
    total = 2 + 1e-4
    mean = 2 * 2 / total
    variance = (1e-4 * 1 + 2 * 2 + 2**2 * 1e-4 * 2 / total) / total
    assert scale.mean.item() == pytest.approx(mean, rel=1e-12)
    assert scale.variance.item() == pytest.approx(variance, rel=1e-12)
    scale.add(torch.tensor([[6.0], [7.0], [8.0]]))  # mean 7, variance 1
    delta = 7 - mean
    expected = (total * variance + 3 * 1 + delta**2 * total * 3 / (total + 3)) / (total + 3)
    assert scale.variance.item() == pytest.approx(expected, rel=1e-12)
    assert scale.mean.item() == pytest.approx(mean + delta * 3 / (total + 3), rel=1e-12)
    assert scale.count.item() == pytest.approx(5 + 1e-4, rel=1e-12)


def test_novelty_has_the_papers_layers_and_a_target_that_never_learns():
    novelty = Novelty(24, PAPER, generator())
    H = 1024
    each = (24 * H + H) + (H * H + H) + (H * 512 + 512)
    for network in (novelty.predictor, novelty.random):
        assert sum(p.numel() for p in network.parameters()) == each
        names = [type(layer).__name__ for layer in network]
        assert names == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    novelty = Novelty(24, TINY, generator())
    predictor, random = copy.deepcopy((novelty.predictor, novelty.random))
    novelty.learn(torch.randn(32, 24, generator=generator(1)))
    assert_same(novelty.random.state_dict(), random.state_dict())
    assert not torch.equal(novelty.predictor[0].weight, predictor[0].weight)


def test_what_is_known_pays_little_and_what_is_new_pays_more():
    config = replace(TINY, novelty_hidden=64, novelty_size=16, learning_rate=1e-3)
    novelty = Novelty(6, config, generator())
    draws = generator(1)
    first = novelty(torch.randn(256, 6, generator=draws)).mean().item()
    for _ in range(300):
        novelty.learn(torch.randn(256, 6, generator=draws))
    batch = torch.randn(256, 6, generator=draws)
    batch[:4] += 4.0
    error = novelty(batch).detach()
    assert error[4:].mean() < 0.3 * first
    assert error[:4].mean() > 5 * error[4:].mean()


def test_rewards_are_errors_after_the_step_in_units_of_their_deviation():
    novelty = Novelty(3, TINY, generator())
    observation = torch.randn(32, 3, generator=generator(1)) * 7 + 100
    reward = novelty.learn(observation)
    x = (observation - observation.mean(0)) / (observation.var(0, unbiased=False) + 1e-5).sqrt()
    error = (novelty.predictor(x) - novelty.random(x)).square().mean(1, keepdim=True).detach()
    scale = RunningVariance()
    scale.add(error)
    expected = error / (scale.variance.sqrt() + 1e-8)
    torch.testing.assert_close(reward, expected, rtol=1e-3, atol=1e-5)
    assert reward.dtype == torch.float32


def test_standardised_observations_are_clamped():
    novelty, seen = Novelty(3, TINY, generator()), []
    novelty.predictor.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    observation = torch.randn(256, 3, generator=generator(1))
    observation[0] = 1e6  # nearly 16 deviations
    novelty(observation)
    assert seen[0].max() == 5


def test_the_reward_is_the_novelty_of_where_the_action_was_taken():
    learner = Learner(CARTPOLE, replace(TINY, seed_steps=0), rng())
    learner.add(torch.randn(50, sum(learner.widths), generator=generator()))
    novelty, passed = copy.deepcopy(learner.novelty), []
    learner.ddpg.update = lambda *batch: passed.append(batch)
    learner.learn(steps=64)
    assert len(passed) == learner.updates == 2
    for observation, action, reward, later in passed:
        assert torch.equal(reward, novelty.learn(observation))
        for row in torch.cat((observation, action, later), 1):
            assert (learner.rows[:50] == row).all(1).any()
    assert learner.ddpg.settings.bootstrap == 0.99**3


def played(seed=0):
    recording = Recording(EnvPool([CARTPOLE.name] * 2), rng(seed))
    draws = rng(seed)
    return recording.play(lambda t, *_: draws.uniform(-1, 1, (2, 1)))


def test_replay_rows_span_n_steps_alive_and_from_files(tmp_path):
    learner, again = (Learner(CARTPOLE, TINY, rng()) for _ in range(2))
    pool, draws = EnvPool([CARTPOLE.name] * 2), rng()
    recording = Recording(pool, draws)
    while not recording.done:
        recording.advance(draws.uniform(-1, 1, (2, 1)))
        learner.remember(recording)
    assert learner.stored == 2 * 998
    x, action, later = learner.rows[2 * 10 + 1].split(learner.widths)  # second one's, from t = 10
    np.testing.assert_array_equal(x, recording.observation[1, 10])
    np.testing.assert_array_equal(action, recording.action[1, 11])
    np.testing.assert_array_equal(later, recording.observation[1, 13])
    files = [tmp_path / f"episode_{e}_1000.npz" for e in range(2)]
    for path, episode in zip(files, recording.episodes(), strict=True):
        write_episode(path, episode)
    again.refill(files)
    assert again.stored == 2 * 998
    by_environment = learner.rows[: 2 * 998].reshape(998, 2, -1).transpose(0, 1)
    assert torch.equal(again.rows[: 2 * 998].reshape(2, 998, -1), by_environment)


def test_the_replay_is_refilled_with_the_last_transitions_only(tmp_path):
    files = [tmp_path / f"episode_{e}_1000.npz" for e in range(3)]
    files[0].write_text("too old to be read")
    for path, episode in zip(files[1:], played().episodes(), strict=True):
        write_episode(path, episode)
    learner = Learner(CARTPOLE, replace(TINY, replay_capacity=1100), rng())
    learner.refill(files)
    assert learner.stored == 2 * 998
    last = learner.rows[998 * 2 % 1100 - 1]
    np.testing.assert_array_equal(last[-5:], played().observation[1, -1])


def test_uniform_actions_first_then_updates_by_environment_steps():
    learner = Learner(CARTPOLE, TINY, rng())
    learner.add(torch.randn(50, sum(learner.widths), generator=generator()))
    learner.learn(steps=400)
    assert learner.updates == 0
    for _ in range(32):
        learner.learn(steps=2)
    assert learner.updates == 2
    assert learner.steps == 464
    # Of two environments' first 400 steps each one has 200; then the actor's own actions come.
    still = replace(TINY, noise=0.0, updates_per_step=0.0)
    episode = next(rnd(CARTPOLE, rng(), still))
    counts, _ = np.histogram(episode.action[1:201], bins=4, range=(-1, 1))
    assert 25 < counts.min() <= counts.max() < 75
    assert np.abs(np.diff(episode.action[201:], axis=0)).max() < 0.5


def test_the_task_reward_never_reaches_the_learner(tmp_path, monkeypatch):
    states, rewards = [], []
    step = EnvPool.step
    for place, factor in (("a", 1.0), ("b", -50.0)):

        def paid(pool, action, factor=factor):
            observation, reward, physics, done = step(pool, action)
            return observation, factor * reward + factor, physics, done

        monkeypatch.setattr(EnvPool, "step", paid)
        memory = Memory(folder=tmp_path / place)
        memory.folder.mkdir()
        rewards.append([e.reward.sum() for e in round_of(memory, seed=0)])
        states.append(memory.load())
        round_of(memory, seed=1)  # and not from the files either
        states.append(memory.load())
    assert rewards[0][0] * rewards[1][0] < 0
    assert states[0]["counts"]["updates"] > 0
    assert_same(states[0], states[2])
    assert_same(states[1], states[3])


def test_an_interrupted_learner_goes_on(tmp_path):
    memory = Memory(folder=tmp_path)
    round_of(memory, seed=0)
    saved = memory.load()
    assert saved["counts"] == {"steps": 2000, "updates": 50, "owed": 0.0}
    learner = Learner(CARTPOLE, TINY, rng(5))
    learner.recall(memory)
    state = learner.state()
    assert_same(state, {name: saved[name] for name in state})
    assert learner.stored == 2 * 998
    # The actor goes on from the first step: nothing is uniform any more.
    frozen = replace(TINY, noise=0.0, updates_per_step=0.0)
    episode = next(rnd(CARTPOLE, rng(6), frozen, memory))
    first = torch.from_numpy(episode.observation[:1])
    torch.testing.assert_close(episode.action[1], learner.ddpg.actor(first)[0].detach().numpy())
    assert memory.load()["counts"]["steps"] == 4000


def test_a_resumed_learner_equals_one_that_was_never_stopped():
    straight = Learner(CARTPOLE, TINY, rng())
    straight.add(torch.randn(50, sum(straight.widths), generator=generator()))
    straight.learn(464)
    resumed = Learner(CARTPOLE, TINY, rng(1))
    resumed.load_state(copy.deepcopy(straight.state()))
    resumed.rows[:50], resumed.stored = straight.rows[:50], 50
    resumed.generator.set_state(straight.generator.get_state())
    for learner in (straight, resumed):
        learner.learn(320)
    assert straight.updates == 24
    assert_same(straight.state(), resumed.state())


def test_new_rates_take_effect_on_resume():
    learner = Learner(CARTPOLE, TINY, rng())
    other = Learner(CARTPOLE, replace(TINY, learning_rate=0.5), rng())
    other.load_state(learner.state())
    assert other.novelty.optimiser.param_groups[0]["lr"] == 0.5
    assert other.ddpg.actor_optimiser.param_groups[0]["lr"] == 0.5


def test_a_lost_learner_is_named_and_one_of_other_sizes_kept(tmp_path, capsys):
    memory = Memory(folder=tmp_path)
    assert problem(memory, TINY) is None
    round_of(memory, seed=0)
    assert problem(memory, TINY) is None
    with pytest.raises(ValueError, match=r"rnd.hidden: got 16, expected 8 as in .*learner_0.pt"):
        stream("rnd", CARTPOLE, 0, 1, replace(TINY, hidden=16), tmp_path)
    assert capsys.readouterr().err == ""
    whole = memory.path.read_bytes()
    for content, word in (
        (whole[: len(whole) // 2], "damaged"),
        (b"", "damaged"),
        (None, "missing"),
    ):
        memory.path.unlink()
        if content is not None:
            memory.path.write_bytes(content)
        stream("rnd", CARTPOLE, 0, 0, TINY, tmp_path).close()
        (line,) = capsys.readouterr().err.splitlines()
        assert f"learner_0.pt is {word}" in line
        assert "a new learner begins, with 2 episodes in its replay" in line
        if content is None:
            memory.path.write_bytes(whole)
    memory.path.write_bytes(b"")
    learner = Learner(CARTPOLE, TINY, rng())
    learner.recall(memory)
    assert (learner.steps, learner.stored) == (0, 2 * 998)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_episode_of_the_replay_is_named_by_one_line(tmp_path, workers):
    round_of(Memory(folder=tmp_path), seed=0)
    damaged = sorted((tmp_path / "buffer").glob("*.npz"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:1000])
    episodes = stream("rnd", CARTPOLE, 0, workers, TINY, tmp_path)
    with pytest.raises(ValueError, match=f"^{damaged}: not a readable npz episode"):
        next(episodes)


def _with(state, *path, value):
    """The state with another value at a path."""
    first, *rest = path
    return state | {first: _with(state[first], *rest, value=value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["config"], 3, "is not a learner .config: got '3'"),
        (["config", "hidden"], "8", "is not a learner .config.hidden"),
        (["counts"], [], "counts: got '..', expected a mapping"),
        (["counts", "steps"], -1, "steps: got -1"),
        (["counts", "owed"], 1e9, "owed: got 1000000000.0, expected a value in .0, 1."),
        (["actor"], {}, "actor: expected"),
        (["novelty", "scale.mean"], torch.zeros(2), "novelty.scale.mean: got torch.float32 .2,"),
        (["novelty", "scale.mean"], 3.0, "novelty.scale.mean: got no tensor"),
        (["critic_optimiser"], [], "critic_optimiser: expected moments of"),
        (["critic_optimiser", "state", 0, "exp_avg"], torch.zeros(1), "critic_optimiser.0.exp_avg"),
    ],
)
def test_a_learner_of_another_form_is_refused(tmp_path, path, value, words):
    memory = Memory(folder=tmp_path)
    round_of(memory, seed=0)
    state = memory.load()
    memory.save({k: v for k, v in _with(state, *path, value=value).items() if k != "format"})
    with pytest.raises(ValueError, match=f"{memory.path} .*{words}"):
        next(stream("rnd", CARTPOLE, 0, 0, TINY, tmp_path))


def test_workers_have_learners_and_shares_of_their_own(tmp_path):
    (tmp_path / "buffer").mkdir()
    names = [f"episode_{i:06d}_1000.npz" for i in range(5)]
    for name in names:
        (tmp_path / "buffer" / name).touch()
    first, second = (Memory(folder=tmp_path, worker=w, workers=2) for w in range(2))
    assert [p.name for p in first.episodes()] == names[::2]
    assert [p.name for p in second.episodes()] == names[1::2]
    assert first.path != second.path


def test_what_a_killed_save_left_is_swept(tmp_path):
    memory = Memory(folder=tmp_path)
    memory.save({"counts": 1})
    others = f".learner_1.pt.{32 * 'a'}.tmp"
    (tmp_path / f".learner_0.pt.{32 * 'a'}.tmp").touch()
    (tmp_path / others).touch()
    memory.sweep()
    assert {p.name for p in tmp_path.iterdir()} == {"learner_0.pt", others}
