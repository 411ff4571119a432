from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from conftest import make_episode, make_store
from resident import resident_bytes

from agentic.config import ChainConfig
from agentic.flat import FlatWriter, Index, store_path, write_index
from agentic.sampler import ChainSampler, Windows
from agentic.stream import ChainStream
from envs import TASKS

CONFIG = ChainConfig(
    trajectories=3,
    count="uniform",
    window_share=0.3,
    window_steps=12,
    window_batch=12,
    best_from=0.5,
    spread="drawn",
    loss_on="last",
)


class Recorder(ChainSampler):
    """Hands out the ids of a micro-batch's chains in place of its arrays."""

    def batch(self, index):
        drawn = self.draw(index)
        if isinstance(drawn, Windows):
            return [(int(k), *map(int, e)) for k, e in zip(drawn.task, drawn.episodes, strict=True)]
        return [(chain.task, *chain.episodes) for chain in drawn]


def _stream(cls=Recorder, **options):
    store = make_store([float(r) for r in range(40)], tasks=2)
    sampler = cls(store, np.arange(40), CONFIG, batch_steps=12, seed=3)
    return ChainStream(sampler, **options)


def _take(streams, rounds):
    """What ranks in step take, in the order of the micro-batches."""
    return [next(stream) for _ in range(rounds) for stream in streams]


@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_next_thousand_chains_are_the_same_after_save_and_load(threads, ranks):
    straight = _stream()
    expected = [next(straight) for _ in range(12 + 600)]
    assert sum(map(len, expected[12:])) > 1000
    first = [_stream(rank=r, ranks=ranks, threads=threads) for r in range(ranks)]
    assert _take(first, 12 // ranks) == expected[:12]
    (state,) = {tuple(stream.state_dict().items()) for stream in first}
    for stream in first:
        stream.close()
    # Resumed with other numbers of ranks and threads than it was saved with.
    for other_ranks, other_threads in ((ranks, threads), (4, 0), (1, 2)):
        resumed = [
            _stream(rank=r, ranks=other_ranks, threads=other_threads) for r in range(other_ranks)
        ]
        for stream in resumed:
            stream.load_state_dict(dict(state))
        assert _take(resumed, 600 // other_ranks) == expected[12:]
        for stream in resumed:
            stream.close()


def test_a_stream_goes_back_to_a_state_in_the_middle_of_its_work():
    stream = _stream(threads=2)
    state = stream.state_dict()
    first = [next(stream) for _ in range(5)]
    stream.load_state_dict(state)
    assert [next(stream) for _ in range(5)] == first
    stream.close()


def test_threads_hand_out_the_very_arrays():
    for here, ahead in zip(range(30), _stream(ChainSampler, threads=3), strict=False):
        steps, weight_BL = _stream(ChainSampler).sampler.batch(here)
        assert torch.equal(ahead[1], weight_BL)
        for name, value in vars(steps).items():
            assert torch.equal(getattr(ahead[0], name), value), name


def test_an_error_of_a_thread_is_the_streams_own():
    stream = _stream(ChainSampler, threads=1)
    stream.sampler.store = None
    with pytest.raises(AttributeError):
        next(stream)
    stream.close()


def test_no_more_is_made_ahead_than_is_asked_for():
    stream = _stream(threads=2)
    made = []
    plain = stream.sampler.draw
    stream.sampler.draw = lambda index: made.append(index) or plain(index)
    next(stream)
    stream.close()
    assert max(made) <= 4
    next(stream)
    stream.close()
    assert sorted(set(made))[:2] == [0, 1]


def test_memory_stays_flat_over_a_thousand_batches_of_four_threads(tmp_path):
    episodes = 800
    _random_store(tmp_path, TASKS["walker_walk"], episodes)
    # In a process of its own: what other tests leave behind moves too.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        size, resident = pool.submit(resident_bytes, tmp_path, CONFIG).result()
    assert size > 0.15 * resident[0]  # keeping all that is read could not be overlooked
    assert max(resident[2:]) < 1.05 * resident[1]


def _random_store(path, spec, episodes):
    """Makes a flat store of noise."""
    folder = store_path(path, spec.domain, "noise")
    folder.mkdir(parents=True)
    names = tuple(f"episode_{e:06d}_{spec.episode_steps}.npz" for e in range(episodes))
    with FlatWriter(folder, spec) as writer:
        writer.resize(episodes)
        checksums = tuple(writer.write(e, make_episode(spec, e)) for e in range(episodes))
    zeros = (0,) * episodes
    index = Index(
        domain=spec.domain,
        algorithm="noise",
        source="nowhere",
        finished=True,
        names=names,
        sizes=zeros,
        stamps=zeros,
        checksums=checksums,
    )
    write_index(folder, index)
