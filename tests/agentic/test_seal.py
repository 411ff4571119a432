"""The checksum inside a file."""

import hashlib
import io
import zipfile

import numpy as np
import pytest
import torch
from conftest import make_model
from training import plain_state

from agentic import checkpoint, seal


def _archive():
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(5)}, buffer)
    return buffer.getvalue()


def test_a_sealed_archive_is_read_by_whatever_reads_archives(tmp_path):
    content = seal.sealed(io.BytesIO(_archive()))
    assert seal.is_sealed(content)
    assert not seal.is_sealed(_archive())
    assert not seal.is_sealed(b"")
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    for mmap in (False, True):
        assert torch.equal(torch.load(path, mmap=mmap)["a"], torch.arange(5))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment == content[-seal.LENGTH :]
    assert len(content) == len(_archive()) + seal.LENGTH
    assert seal.digest_of(path) == hashlib.sha256(content).hexdigest()


def test_the_checksum_is_of_all_before_it_and_its_length():
    content = seal.sealed(io.BytesIO(_archive()))
    for place in (0, 100, len(content) - seal.LENGTH - 1, len(content) - 1):
        with pytest.raises(seal.Damaged):
            seal.is_sealed(_flipped(content, 8 * place))
    assert not seal.is_sealed(content[:-1])
    assert not seal.is_sealed(content + b"0")


def _flipped(content, bit):
    content = bytearray(content)
    content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


def test_every_flipped_bit_and_every_lost_end_of_a_checkpoint_is_damage():
    content = checkpoint.packed(plain_state(make_model()) | _HEAD)
    assert checkpoint.read(content, "a.pt")["step"] == 0
    random = np.random.default_rng(0)
    size, tail = len(content), seal.LENGTH
    bits = [*random.integers(8 * size, size=200), *(8 * random.integers(size - tail, size, 50) + 5)]
    bad = [_flipped(content, bit) for bit in bits]
    bad += [content[:length] for length in random.integers(size, size=50)]
    bad += [content[:-1], content[:-tail], content[:-2] + content[-1:], content + b"\0"]
    for harmed in bad:
        with pytest.raises(seal.Damaged, match="checkpoint: a.pt is damaged"):
            checkpoint.read(harmed, "a.pt")


_HEAD = {"format": checkpoint.FORMAT, "version": 2}
