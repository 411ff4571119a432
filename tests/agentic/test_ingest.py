import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_episode
from places import SPEC, Place, holds

from agentic import ingest as ingesting
from agentic.episodes import write_episode
from agentic.flat import FlatStore, read_index, row_bytes, write_index
from agentic.locks import locked


@pytest.fixture
def place(cartpole_data):
    return Place(cartpole_data)


def test_rows_are_the_files_to_the_last_bit(place):
    flat = place.ingest()
    assert all(holds(flat, i) for i in range(12))
    assert "reading 12 files" in place.told[0]
    assert "about" in place.told[0]
    assert [flat.row_checksum(row) for row in range(12)] == list(flat.index.checksums)
    seen = make_episode(SPEC, 7).observation[:-1].astype(np.float64)
    mean, squares = flat.arrays["moments"][flat.rows["episode_000007_1000.npz"]]
    assert mean == pytest.approx(seen.mean(axis=0), abs=1e-12)
    assert squares == pytest.approx(seen.var(axis=0) * 1000, rel=1e-10)


def test_several_processes_write_what_one_does(place, tmp_path):
    for i in range(12, 80):
        write_episode(place.file(i), make_episode(SPEC, i))
    flat = place.ingest(workers=2)
    assert "with 2 processes" in place.told[0]
    assert all(holds(flat, i) for i in range(80))


def test_a_second_time_nothing_is_read(place, monkeypatch):
    place.ingest()
    monkeypatch.setattr(ingesting, "parse_episode", None)
    flat = place.ingest()
    assert place.told == []
    assert holds(flat, 11)


def test_anyones_numpy_reads_the_arrays(place):
    place.ingest()
    array = np.load(place.path / "observation.npy", mmap_mode="r", allow_pickle=False)
    assert array.shape == (12, 1001, 5)
    assert array.dtype == np.float32
    size = sum(
        (place.path / f"{name}.npy").stat().st_size
        for name in ("observation", "action", "physics", "moments")
    )
    assert size == 12 * row_bytes(SPEC) + 4 * 128


def test_added_and_changed_files_are_noticed(place):
    before = place.ingest().digest
    write_episode(place.file(3), make_episode(SPEC, 300))
    write_episode(place.file(12), make_episode(SPEC, 12))
    flat = place.ingest()
    assert "reading 2 files" in place.told[0]
    assert holds(flat, 3, seed=300)
    assert all(holds(flat, i) for i in range(13) if i != 3)
    assert flat.digest != before
    # A running training may have the old row mapped: it stays as it is, out of use.
    assert flat.index.names[3] == ""
    assert np.array_equal(flat.arrays["action"][3], make_episode(SPEC, 3).action)


def test_a_file_touched_alone_is_read_again(place):
    place.ingest()
    os.utime(place.file(5), ns=(1, 1))
    flat = place.ingest()
    assert "reading 1 files" in place.told[0]
    assert holds(flat, 5)


def test_a_zip_as_published_is_read_like_the_folder(place):
    unzipped = place.ingest()
    checksums = dict(zip(unzipped.index.names, unzipped.index.checksums, strict=True))
    archive = place.data_dir / "cartpole" / "proto.zip"
    with zipfile.ZipFile(archive, "w") as writing:
        for path in place.directory.iterdir():
            writing.write(path, f"buffer/{path.name}")
        writing.writestr("video/0.mp4", b"")
        writing.writestr("buffer/readme.txt", b"")
    flat = Place(place.data_dir, "proto").ingest()
    assert dict(zip(flat.index.names, flat.index.checksums, strict=True)) == checksums


def _damage(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_a_bad_file_ends_it_by_name_and_what_was_read_is_kept(place):
    _damage(place.file(5))
    for todo in (12, 6):  # the second time behind what the first one kept and noted
        with pytest.raises(ValueError, match=r"episode_000005_1000.npz.*on_bad_file=skip"):
            place.ingest()
        assert f"reading {todo} files" in place.told[0]
    write_episode(place.file(5), make_episode(SPEC, 5))
    flat = place.ingest()
    assert flat.index.finished
    assert all(holds(flat, i) for i in range(12))


def test_bad_files_are_skipped_and_counted_where_asked_for(place):
    _damage(place.file(5))
    flipped = bytearray(place.file(6).read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF  # the archive's CRC no longer fits
    place.file(6).write_bytes(flipped)
    flat = place.ingest("skip")
    assert sorted(r.name for r in flat.index.rejected) == [place.file(i).name for i in (5, 6)]
    assert all(holds(flat, i) for i in range(12) if i not in (5, 6))
    assert place.ingest("skip").index == flat.index
    assert place.told == []
    with pytest.raises(ValueError, match="episode_00000[56]_1000.npz"):
        place.ingest("error")


def test_a_damaged_member_of_a_zip_is_named(place):
    archive = place.data_dir / "cartpole" / "td4.zip"
    with zipfile.ZipFile(archive, "w") as writing:
        for path in sorted(place.directory.iterdir()):
            writing.write(path, f"buffer/{path.name}")
    content = bytearray(archive.read_bytes())
    content[content.index(b"episode_000004_1000.npz") + 1000] ^= 0xFF
    archive.write_bytes(content)
    with pytest.raises(ValueError, match=r"td4.zip/episode_000004_1000.npz"):
        Place(place.data_dir, "td4").ingest()


def test_a_disk_that_is_too_small_is_refused_before(place, monkeypatch):
    monkeypatch.setattr(ingesting, "CLEAR_OF", 10**18)
    with pytest.raises(ValueError, match=r"data.store_dir: .*needs .* GB for 12 episodes"):
        place.ingest()
    with pytest.raises(ValueError, match="found none"):
        FlatStore.open(place.path, SPEC)


def test_a_second_ingest_waits_for_the_first(place):
    place.path.mkdir(parents=True)
    with locked(place.path, lambda: None):
        second = threading.Thread(target=place.ingest)
        second.start()
        deadline = time.monotonic() + 20
        while not place.told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting for another process" in place.told[0]
        assert read_index(place.path, SPEC) is None
    second.join(timeout=20)
    assert FlatStore.open(place.path, SPEC).index.finished


KILLED = """
import sys
from agentic import ingest as ingesting
from agentic.sources import find_source
from agentic.flat import store_path
from envs import TASKS
from pathlib import Path
ingesting.SAVE_SECONDS = 0.0
ingesting.SMALL = 0
ingesting.JOB_FILES = 2
if __name__ == "__main__":
    spec, data = TASKS["cartpole_swingup"], Path(sys.argv[1])
    source = find_source(data, "cartpole", "td3")
    files = source.files * 1
    ingesting.ingest(source, files, store_path(data, "cartpole", "td3"), spec,
                     on_bad_file="error", workers=2, tell=lambda text: print(text, flush=True))
"""


def test_a_killed_ingest_leaves_nothing_that_looks_finished(place, tmp_path, monkeypatch):
    for i in range(12, 200):
        os.link(place.file(i % 12), place.file(i))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    process = subprocess.Popen(
        [sys.executable, script, place.data_dir], start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        index = read_index(place.path, SPEC)
        if index is not None and len(index.names) > 20:
            process.kill()
            break
        time.sleep(0.005)
    assert process.wait() == -signal.SIGKILL
    index = read_index(place.path, SPEC)
    assert not index.finished
    with pytest.raises(ValueError, match="interrupted"):
        FlatStore.open(place.path, SPEC)
    # Its reading processes end too; then the next ingest goes on behind what is named.
    while _members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _members(process.pid)
    kept = sum(bool(name) for name in index.names)
    flat = place.ingest()
    assert f"reading {200 - kept} files" in place.told[0]
    assert all(
        np.array_equal(flat.arrays["action"][row], make_episode(SPEC, _index(name) % 12).action)
        for name, row in flat.rows.items()
    )
    assert len(flat.rows) == 200


def test_an_unfinished_store_is_finished_even_if_nothing_is_missing(place):
    index = place.ingest().index
    write_index(place.path, replace(index, finished=False))
    assert place.ingest().index.finished
    assert read_index(place.path, SPEC).finished


def test_a_file_is_out_of_use_from_when_it_is_read_again(place, monkeypatch):
    place.ingest()
    os.utime(place.file(5), ns=(1, 1))
    monkeypatch.setattr(ingesting, "work", None)
    with pytest.raises(TypeError):
        place.ingest()
    index = read_index(place.path, SPEC)
    assert not index.finished
    assert "episode_000005_1000.npz" not in index.names


def test_what_the_system_cannot_read_now_is_tried_again(place, monkeypatch):
    def fails(file, name, spec):
        raise OSError(5, "Input/output error", name)

    whole = ingesting.parse_episode
    monkeypatch.setattr(ingesting, "parse_episode", fails)
    with pytest.raises(ValueError, match="episode_000000_1000.npz: cannot be read now"):
        place.ingest()
    assert place.ingest("skip").index.names == ()
    monkeypatch.setattr(ingesting, "parse_episode", whole)
    assert len(place.ingest().rows) == 12


def test_a_zip_is_read_again_when_it_changes(place):
    archive = place.data_dir / "cartpole" / "rnd.zip"

    def load(seed):
        with zipfile.ZipFile(archive, "w") as writing:
            for i in (0, 1):
                path = place.data_dir / "one.npz"
                write_episode(path, make_episode(SPEC, seed + i))
                writing.write(path, f"buffer/episode_{i:06d}_1000.npz")
        os.utime(archive, ns=(seed, seed))
        return Place(place.data_dir, "rnd").ingest()

    assert holds(load(40), 1, seed=41)
    flat = load(60)
    assert holds(flat, 0, seed=60)
    assert holds(flat, 1, seed=61)


def test_what_is_no_file_is_left_alone(place):
    (place.directory / "episode_000050_1000.npz").mkdir()
    os.mkfifo(place.directory / "episode_000051_1000.npz")
    (place.directory / "._episode_000052_1000.npz").write_bytes(b"")
    assert len(place.ingest().rows) == 12
    (place.directory / "episode_000053_1000.npz").symlink_to("nowhere")
    with pytest.raises(ValueError, match="episode_000053_1000.npz: cannot be read now"):
        place.ingest()


def _index(name):
    return int(name.split("_")[1])


def _members(session):
    """Processes of a session that are not yet gone."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = open(f"/proc/{entry}/stat").read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry))
    return found
