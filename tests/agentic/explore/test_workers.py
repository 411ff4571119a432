import multiprocessing
from dataclasses import replace

import pytest

from agentic.explore import stream, workers
from envs import TASKS

CARTPOLE = TASKS["cartpole_swingup"]


def children():
    return multiprocessing.active_children()


def test_two_workers_explore_differently_and_leave_nothing_behind():
    before = set(children())
    episodes = stream("random", CARTPOLE, seed=0, workers=2)
    taken = [next(episodes) for _ in range(9)]
    assert len(set(children()) - before) == 2
    episodes.close()
    assert set(children()) <= before
    assert len({episode.physics.tobytes() for episode in taken}) == len(taken)


def test_one_worker_gives_the_episodes_of_this_process():
    with_worker = stream("random", CARTPOLE, seed=3, workers=1)
    without = stream("random", CARTPOLE, seed=3, workers=0)
    for _ in range(2):
        assert (next(with_worker).physics == next(without).physics).all()
    with_worker.close()


def test_a_failing_worker_raises_with_its_message(monkeypatch):
    # A spawned process imports the recipes anew: only what is sent to it can break it.
    before = set(children())
    broken = replace(CARTPOLE, name="cartpole_nowhere")
    with pytest.raises(ValueError, match="^task: got 'cartpole_nowhere'"):
        next(stream("random", broken, seed=0, workers=2))
    broken = replace(CARTPOLE, episode_steps="ten")
    with pytest.raises(workers.WorkerError, match="TypeError"):
        next(stream("random", broken, seed=0, workers=2))
    assert set(children()) <= before


def test_a_killed_worker_raises_and_does_not_hang():
    before = set(children())
    episodes = stream("random", CARTPOLE, seed=0, workers=1)
    next(episodes)
    (worker,) = set(children()) - before
    worker.kill()
    with pytest.raises(workers.WorkerError, match="exit code -9"):
        list(episodes)
    assert set(children()) <= before


@pytest.mark.parametrize(
    ("recipe", "count", "message"), [("nothing", 0, "recipe: got"), ("random", -1, "workers: got")]
)
def test_wrong_arguments_raise_on_the_call(recipe, count, message):
    with pytest.raises(ValueError, match=message):
        stream(recipe, CARTPOLE, seed=0, workers=count)
