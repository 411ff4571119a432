"""Readers of files of anyone: whatever a file holds, they read it or raise ValueError, and soon."""

import io
import json
import random
import resource
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from conftest import make_episode
from mutations import by_bytes, by_json, by_member, by_yaml
from places import SPEC, Place
from reports import leave_run
from training import make_config, make_model, save_checkpoint

from agentic import checkpoint, schema
from agentic.collect_config import small_rnd
from agentic.collector import read_record as read_round
from agentic.episodes import parse_episode, write_episode
from agentic.evaluator import Context, _Batch
from agentic.explore.memory import Memory
from agentic.explore.rnd import Learner, problem
from agentic.flat import FlatStore, read_index
from agentic.foreign_config import SettingsFolder, check_override
from agentic.journal import Journal, continues
from agentic.launch import read_record
from agentic.ledger import Ledger
from agentic.report_numbers import numbers
from agentic.report_runs import find_runs
from agentic.report_tables import sheets
from agentic.runs import config_text, read_config
from agentic.seal import sealed
from agentic.sources import find_source
from agentic.wording import one_line

QUICK = 60  # variants of each kind in every test run
MINUTES = 10.0  # of the slow proof, all kinds together
SLOW_READ = 5.0  # seconds that no variant may take
MEMORY = 2**30  # bytes that readers may take beside what the process has


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file: sound ones, how they are varied, and what reads them."""

    seeds: list[bytes]
    vary: Callable[[bytes, random.Random, bytes], bytes]
    read: Callable[[bytes], object]


def _npz(folder: Path) -> Kind:
    path = folder / "e_0_1000.npz"
    write_episode(path, make_episode(SPEC, 0))
    stored = io.BytesIO()
    np.savez(stored, **vars(make_episode(SPEC, 1)))
    seeds = [path.read_bytes(), stored.getvalue()]
    return Kind(
        seeds=seeds, vary=by_member, read=lambda c: parse_episode(io.BytesIO(c), "file", SPEC)
    )


def _zip(folder: Path) -> Kind:
    write_episode(folder / "e_0_1000.npz", make_episode(SPEC, 0))
    episode = (folder / "e_0_1000.npz").read_bytes()
    place = folder / "cartpole" / "td3.zip"
    place.parent.mkdir()
    with zipfile.ZipFile(place, "w") as archive:
        for index in range(3):
            archive.writestr(f"buffer/episode_{index:06d}_1000.npz", episode)

    def read(content: bytes) -> None:
        place.write_bytes(content)
        source = find_source(folder, "cartpole", "td3")
        assert source is not None
        with source.opened() as open_file:
            for file in source.files[:2]:
                with open_file(file) as one:
                    parse_episode(one, file.name, SPEC)

    return Kind(seeds=[place.read_bytes()], vary=by_member, read=read)


def _store(folder: Path) -> tuple[Place, FlatStore]:
    place = Place(folder)
    place.directory.mkdir(parents=True)
    for index in range(2):
        write_episode(place.file(index), make_episode(SPEC, index))
    return place, place.ingest()


def _index(folder: Path) -> Kind:
    place, _ = _store(folder)
    file = place.path / "index.json"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        index = read_index(place.path, SPEC)
        assert index is not None
        Ledger(index, ())
        flat = FlatStore(place.path, index, SPEC)
        for row in flat.rows.values():
            flat.row_checksum(row)

    return Kind(seeds=[file.read_bytes()], vary=by_json, read=read)


def _array(folder: Path) -> Kind:
    place, flat = _store(folder)
    file = place.path / "observation.npy"
    content = file.read_bytes()
    flat.arrays.clear()

    def read(changed: bytes) -> None:
        file.unlink()
        file.write_bytes(changed)
        index = read_index(place.path, SPEC)
        assert index is not None
        FlatStore(place.path, index, SPEC)

    head = lambda c, rng, other: by_bytes(c[:128], rng, other) + c[128:]  # noqa: E731
    return Kind(seeds=[content], vary=head, read=read)


def _config(folder: Path) -> Kind:
    text = config_text(make_config(make_model()))

    def read(content: bytes) -> None:
        (folder / "config.yaml").write_bytes(content)
        config_text(read_config(folder))

    return Kind(seeds=[text.encode()], vary=by_yaml, read=read)


def _settings(folder: Path) -> Kind:
    text = (
        b"# @package _global_\ndefaults:\n- override /model: small\nsteps: 3\nchain: {top: 0.5}\n"
    )
    source = SettingsFolder("test", str(folder))
    (folder / "mine").mkdir()

    def read(content: bytes) -> None:
        (folder / "mine" / "x.yaml").write_bytes(content)
        source._check(PurePosixPath("mine/x"), folder / "mine" / "x.yaml")

    return Kind(seeds=[text], vary=by_yaml, read=read)


def _override(folder: Path) -> Kind:
    texts = (b"steps=3", b"chain.top=${x}", b"+a={b: [1,'c']}", b"seed=range(0,9,2)", b"~task")
    return Kind(
        seeds=list(texts),
        vary=by_bytes,
        read=lambda content: check_override(content.decode(errors="surrogateescape")),
    )


def _results(folder: Path) -> Kind:
    for seed in (0, 1):
        kept, reset = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 3.0]]
        line = {"step": 1, "train/loss": 1.0, "train/tokens": 5}
        run_dir = leave_run(folder, "AT-4", kept, reset, seed=seed, metrics=[line])
    names = ("results.json", "config.yaml", "metrics.jsonl")
    files = [*(run_dir / name for name in names), run_dir.with_name("seed1.json")]
    sound = {file: file.read_bytes() for file in files}

    def read(content: bytes) -> None:
        # The first byte says which of a run's files it is.
        file = files[content[0] % len(files)] if content else files[0]
        file.write_bytes(content[1:])
        try:
            runs, _ = find_runs(folder / "runs")
            for section, found in numbers(runs, ("walker_walk",)).items():
                sheets(section, found)
        finally:
            file.write_bytes(sound[file])

    def vary(content: bytes, rng: random.Random, other: bytes) -> bytes:
        way = by_yaml if content[:1] == b"\1" else by_json
        return content[:1] + way(content[1:], rng, other)

    return Kind(
        seeds=[bytes([k]) + sound[file] for k, file in enumerate(files)], vary=vary, read=read
    )


def _records(folder: Path) -> Kind:
    seeds = [
        {"finished": True, "sessions": 1, "seconds": 3.5, "first": 0},
        {"sessions": [{"seconds": 1.0, "cpu_seconds": 1.0, "peak_bytes": None, "code": 0}]},
    ]

    def read(content: bytes) -> None:
        (folder / "x.json").write_bytes(content)
        for reader in (read_round, read_record):
            try:
                reader(folder / "x.json")
            except ValueError:
                continue

    return Kind(seeds=[json.dumps(s).encode() for s in seeds], vary=by_json, read=read)


def _trial(folder: Path) -> Kind:
    context = Context(spec=SPEC, target=1.0, seeds=(1, 2))
    journal = Journal(folder, {"a": 1})
    part = journal.part("00_keep")
    made = {"returns": np.ones(1), "failed": np.zeros(1, bool)}
    made["actions"] = np.zeros((1, SPEC.episode_steps, SPEC.action_size), np.float32)
    memory = {"memory": {"caches": [(torch.zeros(1, 2, 3, 4),) * 2], "previous": {}}}
    part.keep(0, {name: torch.from_numpy(a) for name, a in made.items()} | memory)
    file = folder / "unfinished" / "00_keep" / "trial_000.pt"
    note = folder / "unfinished" / "settings.json"

    def read(content: bytes) -> None:
        note.write_bytes(content[:200])
        continues(folder, {"a": 1})
        file.write_bytes(content)
        for k, trial in enumerate(part.kept()):
            _Batch([context], False).arrays(k, trial)

    return Kind(seeds=[file.read_bytes()], vary=by_member, read=read)


def _checkpoint(folder: Path) -> Kind:
    (folder / "checkpoints").mkdir()
    path = save_checkpoint(folder / "checkpoints" / "best.pt", task="cartpole_swingup")

    def vary(content: bytes, rng: random.Random, other: bytes) -> bytes:
        changed = by_member(content, rng, other)
        bare = changed[-2:] == b"\0\0" and rng.random() < 0.9
        return sealed(io.BytesIO(changed)) if bare else changed

    def read(content: bytes) -> None:
        state = checkpoint.read(content, "file")
        schema.check_fit(state, schema.empty_model(state))

    return Kind(seeds=[path.read_bytes()], vary=vary, read=read)


def _learner(folder: Path) -> Kind:
    config = replace(small_rnd(), hidden=4, novelty_hidden=4, novelty_size=4, replay_capacity=1000)
    memory = Memory(folder=folder)
    made = Learner(SPEC, config, np.random.default_rng(0))
    memory.save(made.state())

    def read(content: bytes) -> None:
        memory.path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
        problem(memory, config)
        Learner(SPEC, config, np.random.default_rng(0)).recall(memory)

    return Kind(seeds=[memory.path.read_bytes()[:-4]], vary=by_member, read=read)


KINDS = {
    made.__name__[1:]: made
    for made in (_npz, _zip, _index, _array, _config, _settings, _override, _results, _records)
    + (_trial, _checkpoint, _learner)
}


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """At most so many bytes beyond what the process has mapped already."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(kind: Kind, rng: random.Random, goes_on: Callable[[int], bool]) -> tuple[int, int]:
    """Reads variants while `goes_on`; how many, and how many of them were taken as sound."""
    for seed in kind.seeds:
        kind.read(seed)
    tried = sound = 0
    pool = list(kind.seeds)
    with bounded_memory(MEMORY):
        while goes_on(tried):
            content = kind.vary(rng.choice(pool), rng, rng.choice(kind.seeds))
            began = time.monotonic()
            try:
                kind.read(content)
                sound += 1
                if len(pool) < 200:  # what is still sound may be changed further
                    pool.append(content)
            except ValueError as error:
                said = one_line(error)
                if len(said) > 1000 or "allow_pickle" in said or "weights_only" in said:
                    raise AssertionError(f"{said!r} of {content!r}") from error
            except BaseException as error:
                raise AssertionError(f"{error!r} of {content!r}") from error
            assert time.monotonic() - began < SLOW_READ, content
            tried += 1
    return tried, sound


@pytest.mark.parametrize("name", KINDS)
def test_some_variants(name, tmp_path):
    tried, _ = fuzz(KINDS[name](tmp_path), random.Random(name), lambda tried: tried < QUICK)
    assert tried == QUICK


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 300)
@pytest.mark.parametrize("name", KINDS)
def test_many_variants(name, tmp_path, capsys):
    end = time.monotonic() + 60 * MINUTES / len(KINDS)
    seed = time.time_ns()
    kind, rng = KINDS[name](tmp_path), random.Random(seed)
    tried, sound = fuzz(kind, rng, lambda tried: time.monotonic() < end)
    with capsys.disabled():
        print(f"\n{name}: {tried:,} variants, {sound:,} of them sound, seed {seed}")
