"""Rows without processes: a mesh is only its sizes and a place."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from parallel.rows import RowLayout

SHAPES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (3, 2, 1), (4, 1, 3)]


def _layouts(shape, **settings):
    """Those of all processes of a cube, by place."""
    sizes = dict(zip("xyz", shape, strict=True))
    for place in itertools.product(*map(range, shape)):
        mesh = SimpleNamespace(sizes=sizes, place=dict(zip("xyz", place, strict=True)))
        yield place, RowLayout.of(mesh, **settings)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("length", "unit", "block"), [(1, 1, 8), (29, 1, 6), (96, 4, 16), (7, 4, 99)]
)
def test_every_position_is_held_once_in_whole_units(shape, batch, length, unit, block):
    held = {"y": set(), "z": set(), "yz": set()}
    count = dict.fromkeys(held, 0)
    for _, layout in _layouts(shape, batch=batch, length=length, unit=unit, block=block):
        assert length <= layout.padded
        sequences = range(batch)[layout.sequences]
        for axes, seen in held.items():
            positions = layout.positions(*axes).tolist()
            assert positions[::unit] == [p - p % unit for p in positions[::unit]]
            count[axes] += len(positions) * len(sequences)
            seen.update(itertools.product(sequences, positions))
    x, y, z = shape
    every = batch * layout.padded
    assert {axes: len(seen) for axes, seen in held.items()} == dict.fromkeys(held, every)
    # Rows that are cut along y alone are the same for all peers on z.
    assert count == {"y": every * z, "z": every * y, "yz": every}


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_is_less_than_a_block_of_the_finest_parts(shape):
    x, y, z = shape
    for batch, length in itertools.product((1, 2), range(1, 200, 7)):
        for _, layout in _layouts(shape, batch=batch, length=length, block=16):
            finest = layout.stripes * y * z * -(-length // (layout.stripes * 16))
            assert layout.padded - length < finest


@pytest.mark.parametrize("x", [2, 3, 4, 8])
def test_causal_work_is_the_same_for_all_on_x(x):
    work = set()
    for _, layout in _layouts((x, 1, 1), batch=1, length=16 * x, block=4):
        assert not layout.kept_on_x
        work.add(int((layout.positions("z") + 1).sum()))
    assert len(work) == 1


def test_causal_work_along_z_differs_by_less_than_a_block():
    work = [
        int((layout.positions("z") + 1).sum())
        for _, layout in _layouts((2, 1, 2), batch=1, length=64, block=8)
    ]
    rows = 64 // 4
    assert max(work) - min(work) <= rows * 8


@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 1, 2), (2, 1, 1), (1, 1, 3)])
def test_gathered_along_z_and_x_rows_stand_in_order(shape):
    x, _, z = shape
    parts = {}
    for place, layout in _layouts(shape, batch=1, length=77, block=5):
        parts[place] = layout.positions("z")
    slabs = torch.stack(
        [layout.join_z(torch.stack([parts[i, 0, k] for k in range(z)])) for i in range(x)]
    )
    for i in range(x):
        ranges = layout.slab_of(i)
        assert slabs[i].tolist() == [p for stripe in ranges for p in stripe]
        assert torch.equal(layout.cut_z(slabs[i]), torch.stack([parts[i, 0, k] for k in range(z)]))
    if x > 1:
        whole = layout.join_x(slabs)
        assert whole.tolist() == list(range(layout.padded))
        assert torch.equal(layout.cut_x(whole), slabs)
