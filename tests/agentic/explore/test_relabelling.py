"""Whatever collected an episode, relabelling it gives the rewards that the simulator pays."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from simulator_reward import simulator

from agentic.collect_config import small_rnd
from agentic.explore import RECIPES
from agentic.explore.td3 import Td3Settings
from envs import TASKS, domain_tasks, reward

# Sizes of one round, and its episodes: td3 warms up for one and learns for the other.
SMALL = {
    "td3": ({"settings": Td3Settings(environments=1, warmup_steps=1, hidden=8, batch=8)}, 2),
    "rnd": ({"config": replace(small_rnd(), environments=2, seed_steps=100, hidden=8)}, 2),
    "babble": ({"environments": 4}, 4),
    "random": ({"environments": 2}, 2),
}
COLLECTED = ["walker_run", "cheetah_run", "cartpole_balance", "jaco_reach_top_left"]
ASKED = 40  # states of an episode that the simulator is asked about


@functools.cache
def explore(recipe, name):
    sizes, episodes = SMALL.get(recipe, ({}, 2))
    # With this seed the babbling hand comes near all four of jaco's targets.
    found = RECIPES[recipe](TASKS[name], np.random.default_rng(3), **sizes)
    return list(itertools.islice(found, episodes))


def relabel(task, episode, rows, *, action):
    """With the actions, or with None as ExoRL does."""
    return reward(
        task,
        observation=episode.observation[rows],
        action=episode.action[rows] if action else None,
        physics=episode.physics[rows],
    )


def aims(recipe, name):
    """Jaco's hand comes near a target only where a recipe drives it there."""
    return recipe == "babble" or not name.startswith("jaco")


@pytest.mark.parametrize("name", COLLECTED)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rewards_of_the_collected_task_are_the_live_ones(recipe, name):
    paid = []
    for episode in explore(recipe, name):
        got = relabel(name, episode, slice(1, None), action=True)
        assert len(got) == TASKS[name].episode_steps
        np.testing.assert_allclose(got, episode.reward[1:, 0], rtol=0, atol=1e-6)
        paid.append(episode.reward[1:])
    if aims(recipe, name):
        assert np.ptp(paid) > 0.03


@pytest.mark.parametrize("name", COLLECTED)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rewards_of_every_task_of_the_domain_are_the_simulators(recipe, name):
    episodes = explore(recipe, name)
    for spec in domain_tasks(TASKS[name].domain):
        paid = []
        for i, episode in enumerate(episodes):
            rows = 1 + np.random.default_rng(i).choice(spec.episode_steps, ASKED, replace=False)
            # The first state that pays most is among them: most states pay little.
            rows[0] = 1 + relabel(spec.name, episode, slice(1, None), action=False).argmax()
            ask = functools.partial(simulator(spec.name).rewards, episode.physics[rows])
            native = None if spec.domain == "jaco" else episode.action[rows]  # jaco's are scaled
            for action, expected in ((True, ask(native)), (False, ask())):
                got = relabel(spec.name, episode, rows, action=action)
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
                paid.append(expected)
        if aims(recipe, name):
            assert np.ptp(paid) > 0.03
