import errno
import io
import json
import mmap

import numpy as np
import pytest
from conftest import make_episode
from places import SPEC, Place

from agentic.episodes import write_episode


@pytest.fixture
def place(cartpole_data):
    return Place(cartpole_data)


def _npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_an_array_that_is_gone_is_not_made_of_zeros(place):
    place.ingest()
    write_episode(place.file(12), make_episode(SPEC, 12))
    (place.path / "observation.npy").unlink()
    with pytest.raises(OSError, match="observation.npy"):
        place.ingest()
    (place.path / "observation.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="observation.npy: damaged"):
        place.ingest()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"domain": "walker"}, "of walker, expected 1 of cartpole"),
        ({"format": 99}, "format 99 of cartpole"),
        ({"names": ["only one"]}, "its lists differ in length"),
        ({"names": 3}, "names: got 3"),
        ({"other": 3}, "other: unknown setting"),
    ],
)
def test_a_damaged_index_is_named(place, change, said):
    place.ingest()
    file = place.path / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=f"index.json: damaged .*{said}.*delete .*store to"):
        place.ingest()


def test_an_index_that_is_no_json_is_named(place):
    place.ingest()
    (place.path / "index.json").write_text('{"domain": ')
    with pytest.raises(ValueError, match="index.json: damaged"):
        place.ingest()


def test_an_array_that_cannot_be_mapped_is_named(place, monkeypatch):
    """As where `ulimit -v` leaves less than the files take."""
    place.ingest()

    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match=r"Cannot allocate memory: '.*/store/\w+.npy'"):
        place.ingest()


def test_a_damaged_array_is_named(place):
    place.ingest()
    array = place.path / "physics.npy"
    content = array.read_bytes()
    for wrong, said in (
        (content[:-1], "shorter than it says"),
        (b"nonsense", "its header is not numpy"),
        (b"", "its header is not numpy"),
        (_npy(np.zeros((5, 1001, 4))), "expected float64 .12, 1001, 4"),
        (_npy(np.zeros((4, 1001, 12)).T), "not in rows"),
        (content.replace(b"'shape'", b"'shape(", 1), "damaged"),
        ((place.path / "action.npy").read_bytes(), "expected float64"),
    ):
        array.write_bytes(wrong)
        with pytest.raises(ValueError, match=f"physics.npy.*{said}"):
            place.ingest()
