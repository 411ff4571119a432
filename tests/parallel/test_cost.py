import pytest
import torch

from benchmarks.processes import pretended
from parallel import LayerSize, TransformerLayer
from parallel.cost import Shape, layer_terms, misfits, padded, plan_shape, shapes
from parallel.cube import CubeLayer
from parallel.mesh import CUBE, CubeMesh
from parallel.rows import RowLayout
from parallel.traffic import Traffic

TOKENS = 131072
SMALL = ("vectors", "moments of norms")


def _wide(width):
    return LayerSize(width=width, heads=64, feed_forward=4 * width)


# Processes, width: the best shape; 10^6 bytes of a layer and step for that shape, for three equal
# sides, all on x, all on y; one sequence, matrices and rows alone, two bytes a number.
KNOWN = [
    (8, 128, (4, 2, 1), (126, 277, 177, 352)),
    (8, 1024, (4, 2, 1), (1035, 2224, 1475, 2819)),
    (8, 4096, (4, 2, 1), (4480, 9009, 6694, 11274)),
    (8, 8192, (4, 2, 1), (9865, 18321, 15502, 22549)),
    (64, 128, (8, 8, 1), (66, 123, 199, 396)),
    (64, 1024, (8, 8, 1), (537, 985, 1660, 3171)),
    (64, 4096, (8, 8, 1), (2246, 3982, 7531, 12684)),
    (64, 8192, (8, 8, 1), (4756, 8078, 17440, 25367)),
]


@pytest.mark.parametrize(("world", "width", "best", "known"), KNOWN)
def test_known_sums(world, width, best, known):
    side = round(world ** (1 / 3))
    columns = best, (side, side, side), (world, 1, 1), (1, world, 1)
    for shape, megabytes in zip(columns, known, strict=True):
        terms = layer_terms(Shape(*shape), _wide(width), batch=1, tokens=TOKENS)
        numbers = sum(term.forward + term.backward for term in terms if term.what not in SMALL)
        assert abs(2 * numbers / 1e6 - megabytes) <= 0.51
    plan = plan_shape(world, _wide(width), layers=1, batch=1, tokens=TOKENS)
    assert plan[0].shape == best


def test_sums_written_out():
    """The formula for a cube that cuts everything, with a feed-forward of 3 widths."""
    size = LayerSize(width=24, heads=4, feed_forward=72)
    x, y, z, T, D, F = 2, 3, 2, 3 * 48, 24, 72
    P = x * y * z
    terms = layer_terms(Shape(x, y, z), size, batch=3, tokens=48)
    along = dict.fromkeys("xyz", 0.0) | {CUBE: 0.0}
    for term in terms:
        if term.what != "moments of norms":
            along[term.axis] += (term.forward + term.backward) / (2 + (term.what != "vectors"))
    assert along == pytest.approx(
        {
            "y": 4 * (y - 1) * T * D / P,
            "z": (z - 1) * (4 * T * D + 2 * T * F + 2 * T * D) / P,
            "x": (x - 1) * (4 * D * D + 2 * D * F) / P + 2 * (x - 1) * z * T * D / P,
            CUBE: (P - 1) * (9 * D + F) / P,
        },
        rel=1e-12,
    )
    moments = terms[-1]
    rows = T / (x * y)
    assert (moments.axis, moments.forward) == ("z", 2 * 2 * (z - 1) * rows)
    assert moments.backward == 1.5 * moments.forward + 2 * 2 * 2 * rows * (z - 1) / z
    assert moments.bytes(2) == 4 * (moments.forward + moments.backward)
    assert terms[0].bytes(2) == 2 * (terms[0].forward + terms[0].backward)


def test_nothing_is_received_alone_and_whole_sequences_need_no_keys():
    size = _wide(64)
    assert sum(term.bytes(4) for term in layer_terms(Shape(1, 1, 1), size, batch=1, tokens=7)) == 0
    of_others = "keys, values of other slabs"
    for batch, sent in ((2, False), (4, False), (3, True)):
        terms = layer_terms(Shape(2, 1, 1), size, batch=batch, tokens=8)
        assert next(t.forward for t in terms if t.what == of_others) == sent * 2 * 8 * batch * 32


def test_parameters_are_those_of_the_layer():
    size = LayerSize(width=16, heads=4, feed_forward=40)
    layer = TransformerLayer(size, kind="vanilla", recompute=False)
    count = sum(p.numel() for p in layer.parameters())
    assert size.matrices + size.vectors == count
    plan = plan_shape(4, size, layers=3, batch=1, tokens=8)
    assert {candidate.parameters for candidate in plan} == {3 * count // 4}


@pytest.mark.parametrize(
    ("shape", "batch", "unit", "length"),
    [
        ((2, 1, 1), 2, 1, 10),
        ((2, 1, 1), 1, 1, 12),  # four stripes
        ((2, 1, 1), 1, 3, 12),
        ((3, 2, 1), 1, 1, 12),
        ((1, 2, 3), 1, 1, 12),
        ((2, 2, 3), 1, 1, 24),
    ],
)
def test_padding(shape, batch, unit, length):
    assert padded(Shape(*shape), batch, 10, unit) == length


def test_all_shapes_that_fit_the_cheapest_first():
    assert len(list(shapes(12))) == 18
    size = LayerSize(width=96, heads=2, feed_forward=384)
    plan = plan_shape(8, size, layers=2, batch=1, tokens=64)
    assert {c.shape for c in plan} == {s for s in shapes(8) if s.y <= 2}
    totals = [candidate.total for candidate in plan]
    assert totals == sorted(totals)
    for candidate in plan:
        terms = layer_terms(candidate.shape, size, batch=1, tokens=64)
        assert candidate.total == pytest.approx(sum(term.bytes(4) for term in terms), rel=1e-12)
    row = plan[0].row()
    assert list(row) == ["x y z", "x MB", "y MB", "z MB", "cube MB", "MB per layer", "parameters"]
    assert row["MB per layer"] == f"{totals[0] / 1e6:,.1f}"
    assert row["parameters"] == f"{2 * (96 * 96 * 12 + 13 * 96) // 8:,}"


def test_what_does_not_fit_is_named_with_sizes_that_do():
    size = LayerSize(width=100, heads=3, feed_forward=400)
    assert misfits(Shape(2, 2, 2), size) == [
        "width: got 100, expected a multiple of x*y*z=8 (96 or 104)",
        "heads: got 3, expected a multiple of y=2 (2 or 4)",
    ]
    assert misfits(Shape(1, 4, 1), size) == ["heads: got 3, expected a multiple of y=4 (4)"]
    assert misfits(Shape(2, 1, 2), size) == []
    with pytest.raises(ValueError, match=r"width: got 100, .*96 or 104.*processes: 1, 2, 4, 5$"):
        plan_shape(8, size, layers=1, batch=1, tokens=8)
    with pytest.raises(ValueError, match=r"feed_forward: got 9, .*\(8 or 16\).*processes: 1$"):
        plan_shape(8, LayerSize(width=16, heads=1, feed_forward=9), layers=1, batch=1, tokens=8)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("batch", "half"), [(1, False), (1, True), (4, False)])
@pytest.mark.parametrize(
    "sides",
    [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2), (3, 2, 1), (1, 4, 2), (4, 4, 4)],
)
def test_a_layer_receives_what_the_terms_say(sides, batch, half, ring):
    shape, tokens = Shape(*sides), 384
    P = shape.processes
    size = LayerSize(width=4 * P, heads=2 * shape.y, feed_forward=6 * P)
    layer = TransformerLayer(size, kind="vanilla", recompute=False)
    with pretended(P):
        mesh = CubeMesh(*sides, timeout=None)
        cube = CubeLayer(layer, mesh, ring=ring)
        layout = RowLayout.of(mesh, batch=batch, length=tokens, block=96)
        assert layout.padded == padded(shape, batch, tokens) == tokens
        rows = len(layout.positions("y")), layout.sequences.stop - layout.sequences.start
        x_RBC = torch.ones(*rows, size.width // shape.z, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            with Traffic(mesh) as forward:
                y_RBC = cube(x_RBC, layout)
            with Traffic(mesh) as backward:
                y_RBC.sum().backward()
    terms = layer_terms(shape, size, batch=batch, tokens=tokens, ring=ring)
    for traffic, name in ((forward, "forward"), (backward, "backward")):
        for axis in ("x", "y", "z", CUBE):
            formula = sum(
                getattr(term, name) * (2 if half and not term.full else 4)
                for term in terms
                if term.axis == axis
            )
            assert traffic.bytes(axis) == pytest.approx(formula, rel=1e-12), (name, axis)
    both = forward.bytes() + backward.bytes()
    assert both == pytest.approx(sum(t.bytes(2 if half else 4) for t in terms), rel=1e-12)
