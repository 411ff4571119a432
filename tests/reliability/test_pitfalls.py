"""What went wrong elsewhere, tried on real episodes: units and alignment of what a model sees."""

import numpy as np
import pytest
import torch
from conftest import make_model, make_store
from played_data import play
from training import make_config

from agentic import checkpoint
from agentic.config import ChainConfig
from agentic.episodes import buffer_dir, episode_files, read_episode
from agentic.loading import load_store
from agentic.sampler import ChainSampler
from agentic.trainer import Trainer
from envs import expand

EPISODES = 4
TASKS = (
    "walker_stand",
    "walker_walk",
    "walker_run",
    "cheetah_run",
    "cartpole_swingup",
    "jaco_reach",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A data_dir with random episodes of every domain, paid for the first of its tasks."""
    data_dir = tmp_path_factory.mktemp("played")
    for task in ("walker_stand", "cheetah_run", "cartpole_swingup", "jaco_reach_top_left"):
        play(data_dir, task, EPISODES)
    return data_dir


def _sampler(store, **changes):
    config = {
        "trajectories": 3,
        "count": "uniform",
        "window_share": 0.5,
        "window_steps": 50,
        "window_batch": 50,
        "best_from": 1.0,
        "spread": "full",
        "loss_on": "last",
    }
    chain = ChainConfig(**config | changes)
    every = np.arange(store.episodes)
    return ChainSampler(store, every, chain, batch_steps=2 * store.steps, seed=0)


@pytest.mark.parametrize("task", TASKS)
def test_returns_to_go_are_between_0_and_1_as_every_task_sees_them(played, task):
    """Tasks pay up to 250 or up to 1,000, and data earn a small or a large part of it."""
    specs = expand(task)
    store = load_store(played, specs, ("random",))
    model = make_model(
        tasks=tuple(spec.name for spec in specs),
        observation_size=store.observation_size,
        action_size=store.action_size,
        episode_steps=store.steps,
    )
    mean, std = store.observation_units
    model.set_units(observation_mean=mean, observation_std=std, return_scale=store.return_scale())
    sampler = _sampler(store)
    steps = [sampler.batch(i)[0] for i in range(40)]
    told = torch.cat([model.normalise(s).return_to_go[s.valid] for s in steps])
    assert told.min() > -1e-5
    assert told.max() < 1 + 1e-5
    assert store.returns.max() > 0
    assert told.max() > 0.99  # a chain of the best episode is told to reach all of it


def test_a_checkpoint_acts_in_the_units_that_it_was_trained_in(tmp_path, random_steps):
    store, model = make_store([0.0, 5.0, 250.0], steps=5), make_model()
    mean, std = store.observation_units
    model.set_units(observation_mean=mean, observation_std=std, return_scale=store.return_scale())
    (tmp_path / "checkpoints").mkdir()
    every = np.arange(3)
    Trainer(make_config(model), model, store, every, every[:0], tmp_path).save()
    state = checkpoint.load(checkpoint.newest(tmp_path))
    again = checkpoint.restore_model(state, torch.device("cpu"))
    assert again.return_scale.tolist() == [250.0]
    steps = random_steps(1, 2, 5)
    assert torch.equal(again(steps), model.eval()(steps))


@pytest.mark.parametrize(
    "task", ["walker_stand", "cheetah_run", "cartpole_swingup", "jaco_reach_top_left"]
)
def test_a_step_is_what_was_seen_what_was_done_then_and_what_that_earned(played, task):
    """ExoRL's rows are shifted by one: row 0 is a reset without action and reward."""
    (spec,) = expand(task)
    store = load_store(played, (spec,), ("random",))
    files = episode_files(buffer_dir(played, spec.domain, "random"))
    episodes = [read_episode(path, spec) for path in files]
    sampler = _sampler(store, trajectories=1, window_share=0.0)
    for i in range(8):
        drawn = sampler.draw(i)
        steps, _ = sampler.batch(i)
        for b, chain in enumerate(drawn):
            episode = episodes[chain.episodes[0]]
            for name, stored in (
                ("observation", episode.observation[:-1]),
                ("action", episode.action[1:]),
                ("reward", episode.reward[1:, 0]),
                ("timestep", np.arange(spec.episode_steps)),
            ):
                seen = getattr(steps, name)[b].numpy()
                np.testing.assert_allclose(seen, stored, rtol=0, atol=1e-6, err_msg=name)
