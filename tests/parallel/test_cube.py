"""The layer on a cube against the whole layer in one process."""

import itertools

import pytest
import torch
from ranks import run_ranks

from parallel import LayerSize, Scope, TransformerLayer
from parallel.cube import CubeLayer, layer_cuts
from parallel.mesh import CubeMesh
from parallel.rows import RowLayout
from parallel.traffic import Traffic

SHAPES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]
MORE = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (4, 2, 1), (1, 4, 2), (4, 1, 2)]
ALL = [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE)]
WIDTH = 24


def _processes(shape):
    return shape[0] * shape[1] * shape[2]


def _layer(dtype, dropout=0.0):
    torch.manual_seed(0)
    size = LayerSize(width=WIDTH, heads=4, feed_forward=2 * WIDTH, dropout=dropout)
    layer = TransformerLayer(size, kind="vanilla", recompute=False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype)  # drawn in one precision, so that all have the same numbers


class Pair:
    """A whole layer's pass and its share on a cube, of the same numbers."""

    def __init__(
        self,
        mesh,
        *,
        B,
        S,
        block=6,
        causal=True,
        ring=False,
        dropout=0.0,
        start=0,
        stride=1,
        dtype=torch.float64,
        half=False,
    ):
        self.mesh, self.layer = mesh, _layer(dtype, dropout)
        x = torch.randn(B, S, WIDTH).to(dtype).requires_grad_()
        scope = Scope(causal=causal, start=start, stride=stride)
        self.layout = RowLayout.of(mesh, batch=B, length=S, block=block)
        self.cube = CubeLayer(self.layer, mesh, ring=ring)
        read = torch.zeros(S, dtype=torch.bool)
        read[start::stride] = True
        dy = torch.randn(B, S, WIDTH).to(dtype) * read[:, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            torch.manual_seed(5)
            y = self.layer(x, scope)
            y.backward(dy[:, read])
            own_x = self.own(x).requires_grad_()
            torch.manual_seed(5)
            own_y = self.cube(own_x, self.layout, scope)
            own_y.backward(self.own(dy))
        whole_y = torch.zeros(B, S, WIDTH, dtype=y.dtype)
        whole_y[:, read] = y.detach()
        positions = self.layout.positions("y")
        asked = (positions < S) & read[positions.clamp(max=S - 1)]
        self.pairs = {
            "y": (own_y[asked], self.own(whole_y)[asked]),
            "x": (own_x.grad, self.own(x.grad)),  # padding's gradient is zero
        }
        for name, cut in layer_cuts().items():
            whole = self.layer.get_parameter(name).grad
            self.pairs[name] = self.cube.get_parameter(name).grad, cut.part(whole, mesh)

    def own(self, whole):
        """This process's rows and columns of a (B, S, D) tensor."""
        return self.layout.own(whole.detach())

    def errors(self):
        """The largest difference of each pair, for numbers above 1 relative to the largest."""
        found = {}
        for name, (ours, theirs) in self.pairs.items():
            assert ours.shape == theirs.shape
            errors = (ours.double() - theirs.double()).abs().flatten()
            # A process may have padding alone.
            scale = max([1.0, *theirs.abs().flatten().tolist()])
            found[name] = max(errors.tolist(), default=0.0) / scale
        return found


def _cases(rank, shape, cases, settings):
    mesh = CubeMesh(*shape)
    return {str(case): Pair(mesh, **case, **settings).errors() for case in cases}


def _worst(shape, cases, **settings):
    """The largest error of all processes, and where."""
    found = run_ranks(_processes(shape), _cases, shape, cases, settings)
    return max(
        (error, case, name)
        for answer in found
        for case, errors in answer.items()
        for name, error in errors.items()
    )


@pytest.mark.parametrize("shape", ALL)
def test_the_layer_and_all_its_gradients_are_the_whole_ones(shape):
    cases = [
        {"B": B, "S": S, "ring": ring, "block": block}
        for (B, S), ring, block in itertools.product(
            [(1, 48), (2, 29), (1, 1)], [False, True], [5, 100]
        )
    ]
    # Positions after a row are seen where nothing is padded.
    whole = {"S": 4 * _processes(shape), "block": 100, "causal": False}
    cases += [{"B": 1, "ring": ring, **whole} for ring in (False, True)]
    assert _worst(shape, cases)[0] < 1e-12


def test_keys_go_round_three_in_the_right_order():
    """Round two, both ways are the same."""
    cases = [{"B": B, "S": 40, "ring": True} for B in (1, 2)]
    assert _worst((3, 1, 1), cases)[0] < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_is_the_whole_layers_and_of_the_rows_that_it_computes(shape):
    cases = [
        {"B": 1, "S": 37},
        {"B": 2, "S": 24, "ring": True},
        {"B": 1, "S": 40, "start": 9, "stride": 4},
        {"B": 2, "S": 300, "start": 1, "stride": 4},  # more rows than one tile of masks
    ]
    assert _worst(shape, cases, dropout=0.4)[0] < 1e-12


def _distances(rank, shape, case, half):
    """Squares of this process's parts: distances from double precision, and that."""
    mesh = CubeMesh(*shape)
    exact = Pair(mesh, **case).pairs
    found = {}
    for name, (ours, theirs) in Pair(mesh, **case, dtype=torch.float32, half=half).pairs.items():
        truth = exact[name][1]
        apart = [ours.double() - truth, theirs.double() - truth, truth]
        found[name] = [t.square().sum().item() for t in apart]
    return found


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1), (1, 1, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)]
)
def test_in_single_and_half_precision_the_error_is_about_the_whole_layers(shape, half):
    for case in ({"B": 1, "S": 96}, {"B": 2, "S": 61, "ring": True}):
        found = run_ranks(_processes(shape), _distances, shape, case, half)
        ours, theirs, truth = (
            [sum(answer[name][i] for answer in found) for name in found[0]] for i in range(3)
        )
        # Of all tensors together: a ReLU that flips by rounding tells in a few of them.
        distance = [
            sum(d / t for d, t in zip(of, truth, strict=True)) ** 0.5 for of in (ours, theirs)
        ]
        assert distance[0] <= 2 * distance[1], distance
        assert distance[0] < (0.5 if half else 1e-5)


def _shares(rank, shape):
    mesh = CubeMesh(*shape)
    layer = _layer(torch.float32)
    cube = CubeLayer(layer, mesh)
    for name, cut in layer_cuts().items():
        part = cube.get_parameter(name)
        assert torch.equal(cut.whole(part.detach(), mesh), layer.get_parameter(name))
        assert torch.equal(cut.dtensor(part.detach(), mesh).to_local(), part)
    assert [n for n, _ in cube.named_parameters()] == [n for n, _ in layer.named_parameters()]
    return sum(p.numel() for p in cube.parameters()), sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("shape", ALL)
def test_every_process_holds_exactly_its_share(shape):
    for own, whole in run_ranks(_processes(shape), _shares, shape):
        assert own * _processes(shape) == whole


def _kept(rank, shape):
    """Bytes that a layer keeps for its backward pass, less what it is given."""
    mesh = CubeMesh(*shape)
    layer = CubeLayer(_layer(torch.float32), mesh)
    kept = {}
    for block in (4, 64):
        layout = RowLayout.of(mesh, batch=1, length=64, block=block)
        rows = len(layout.positions("y"))
        x = torch.randn(rows, 1, WIDTH // mesh.sizes["z"], requires_grad=True)
        given = {t.data_ptr() for t in (x, *layer.parameters())}
        seen = {}

        def pack(t, given=given, seen=seen):
            if t.data_ptr() not in given:
                seen[t.data_ptr()] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(x, layout)
        kept[block] = sum(seen.values())
    return kept


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_kept_is_the_attention_output_of_the_own_share_whatever_the_blocks(shape):
    x, y, z = shape
    for kept in run_ranks(_processes(shape), _kept, shape):
        vectors = 4 * (5 * WIDTH // z + 3 * WIDTH // y + 2 * WIDTH // y + WIDTH // z)
        output = 4 * 64 * WIDTH // _processes(shape)
        lse = 4 * 64 // (x * z) * 4 // y
        assert set(kept.values()) == {output + lse + vectors}


def _refusals(rank, shape):
    told = []
    mesh = CubeMesh(*shape)
    for width, heads, feed_forward in [(WIDTH + 4, 4, 48), (WIDTH, 3, 48), (WIDTH, 4, 50)]:
        size = LayerSize(width=width, heads=heads, feed_forward=feed_forward)
        layer = TransformerLayer(size, kind="blockwise", recompute=False)
        try:
            CubeLayer(layer, mesh)
        except ValueError as error:
            told.append(str(error))
    layout = RowLayout.of(mesh, batch=1, length=5)
    try:
        CubeLayer(_layer(torch.float32), mesh)(torch.randn(1, 1, 6), layout, Scope(causal=False))
    except ValueError as error:
        told.append(str(error))
    return told


def test_sizes_that_cannot_be_cut_are_refused_by_all_with_those_that_can():
    for told in run_ranks(8, _refusals, (2, 2, 2)):
        assert len(told) == 4, told
        assert told[0].startswith("width: got 28, expected a multiple of")
        assert told[1].startswith("heads: got 3, expected a multiple of")
        assert told[2].startswith("feed_forward: got 50, expected a multiple of")
        assert told[3].startswith("layout: got 5 positions padded to")


def _calls(rank, shape, batch, ring):
    """Calls by axis and kind, for one block and for eight."""
    mesh, found = CubeMesh(*shape), []
    layer = CubeLayer(_layer(torch.float32), mesh, ring=ring)
    for block in (1000, 8):
        layout = RowLayout.of(mesh, batch=batch, length=128, block=block)
        sequences = layout.sequences.stop - layout.sequences.start
        rows = len(layout.positions("y")), sequences, WIDTH // mesh.sizes["z"]
        with Traffic(mesh) as traffic:
            layer(torch.ones(rows), layout).sum().backward()
        calls = {(line.axis, line.kind): line.calls for line in traffic.lines}
        found.append((len(layout.blocks), calls))
    return found


def test_weights_are_gathered_once_in_each_pass_whatever_the_blocks():
    for (one, calls), (many, more) in run_ranks(2, _calls, (2, 1, 1), 2, False):
        assert (one, many) == (1, 16)
        # Matrices twice and vectors once; the gradients of both.
        assert calls == more == {("x", "all-gather"): 3, ("x", "all-to-all"): 2}
    for (one, calls), (many, more) in run_ranks(2, _calls, (2, 1, 1), 1, False):
        assert (one, many) == (2, 8)
        heads = 4  # keys and values of each one, in both passes, and their gradients
        assert calls == more
        assert calls == {("x", "all-gather"): 3 + 2 * heads, ("x", "all-to-all"): 2 + heads}
    for (one, calls), (many, more) in run_ranks(2, _calls, (1, 2, 1), 1, False):
        # A block gathers twice and sums twice forward, and five and three times back.
        for blocks, counted in ((one, calls), (many, more)):
            assert counted["y", "all-gather"] == 7 * blocks + 1  # vectors
            assert counted["y", "all-to-all"] == 5 * blocks + 1


def test_a_cube_of_one_process_calls_no_other():
    cube = Pair(CubeMesh(), B=2, S=29)
    assert max(cube.errors().values()) < 1e-12
    with Traffic() as traffic:
        Pair(CubeMesh(), B=1, S=16, ring=True)
    assert traffic.lines == []
