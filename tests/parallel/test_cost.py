import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from benchmarks.pretended import pretended
from parallel import LayerSize, TransformerLayer
from parallel.collectives import gather, scatter
from parallel.cost import Shape, layer_terms, misfits, padded, plan_shape, shapes
from parallel.mesh import CUBE, CubeMesh
from parallel.traffic import Traffic

TOKENS = 131072
SMALL = ("vectors", "moments of norms")


def _wide(width):
    return LayerSize(width=width, heads=64, feed_forward=4 * width)


# Processes, width: the best shape, and 10^6 bytes of a layer and step in bf16 for that shape, for
# three equal sides, all on x, all on y; one sequence, matrices and rows alone.
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
        found = sum(term.bytes(2) for term in terms if term.what not in SMALL) / 1e6
        assert abs(found - megabytes) <= 0.51
    plan = plan_shape(world, _wide(width), layers=1, batch=1, tokens=TOKENS, element_bytes=2)
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
            along[term.axis] += term.forward
            assert term.backward == (1 if term.what == "vectors" else 2) * term.forward
    assert along["y"] == 4 * (y - 1) * T * D / P
    assert along["z"] == (z - 1) * (4 * T * D + 2 * T * F + 2 * T * D) / P
    assert along["x"] == (x - 1) * (4 * D * D + 2 * D * F) / P + 2 * (x - 1) * z * T * D / P
    assert along[CUBE] == (P - 1) * (9 * D + F) / P
    moments = terms[-1]
    rows = T / (x * y)
    assert (moments.axis, moments.forward) == ("z", 2 * 2 * (z - 1) * rows)
    assert moments.backward == moments.forward + 2 * 2 * 2 * rows * (z - 1) / z
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


def _linear(rows, weights, mesh, taken, given):
    """Rows cut along x > `taken` to rows cut along x > `given`, mapped by each of the weights."""
    rows = gather(rows, mesh, taken, 0)
    return [scatter(rows @ gather(w, mesh, "x", 0).T, mesh, given, 0) for w in weights]


def _layer(rows, qkv, out, up, down, mesh, cuts_sequences):
    """What a layer sends, without norms and softmax."""
    q, k, v = _linear(rows, qkv, mesh, "y", "z")
    for axis in ("z", "x") if cuts_sequences else ("z",):
        k, v = gather(k, mesh, axis, 0), gather(v, mesh, axis, 0)
    rows = q + k.mean(0) + v.mean(0)
    for weight, directions in ((out, "zy"), (up, "yz"), (down, "zy")):
        [rows] = _linear(rows, [weight], mesh, *directions)
    return rows


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "shape",
    [(4, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2), (3, 2, 1), (1, 4, 2), (4, 4, 4), (8, 4, 2)],
)
def test_a_layer_receives_what_the_terms_say(shape, batch):
    """To be the layer itself: this one gathers, scatters and recomputes as that does."""
    shape = Shape(*shape)
    (x, y, z), P = shape, shape.processes
    size = LayerSize(width=4 * P, heads=4 * y, feed_forward=12 * P)
    D, F, T = size.width, size.feed_forward, 384 * batch
    terms = layer_terms(shape, size, batch=batch, tokens=384)
    assert padded(shape, batch, 384) == 384

    def part(*sides):
        return torch.empty(*sides, device="meta", requires_grad=True)

    with pretended(P):
        mesh = CubeMesh(x, y, z, timeout=None)
        with Traffic(mesh) as traffic:
            gather(part(size.vectors // P), mesh, CUBE, 0).sum().backward()
            weights = (
                [part(D // (y * x), D // z) for _ in range(3)],
                part(D // (z * x), D // y),
                part(F // (y * x), D // z),
                part(D // (z * x), F // y),
            )
            rows = part(T // (x * y), D // z)
            with set_checkpoint_early_stop(False):
                out = checkpoint(_layer, rows, *weights, mesh, batch % x != 0, use_reentrant=False)
            out.sum().backward()
    for axis in ("x", "y", "z", CUBE):
        formula = sum(
            term.bytes(4) for term in terms if term.axis == axis and term.what != SMALL[1]
        )
        assert traffic.bytes(axis) == pytest.approx(formula, rel=1e-12)
