import pytest
import torch
from ranks import run_ranks

from parallel.mesh import CubeMesh
from parallel.products import product_ab, product_abt, product_atb

SHAPES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]
MORE = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 2, 1), (4, 2, 1), (1, 4, 2)]
FORMS = {  # how op(A) op(B) is spelt, and where the index that is summed over stands in A and B
    "ab": (product_ab, lambda a, b: a @ b, 1, 0),
    "abt": (product_abt, lambda a, b: a @ b.T, 1, 1),
    "atb": (product_atb, lambda a, b: a.T @ b, 0, 0),
}
DIRECTIONS = [("y", "x", "z"), ("z", "x", "y"), ("x", "y", "z")]


def _cut(whole, mesh, rows, columns):
    """A matrix's part: rows and columns cut along these axes, the outermost first."""
    for dim, axes in ((0, rows), (1, columns)):
        for axis in axes:
            whole = whole.chunk(mesh.sizes[axis], dim)[mesh.place[axis]]
    return whole.contiguous()


def _check(rank, shape, form, directions, keep):
    """The largest errors of the product and of its two gradients."""
    mesh = CubeMesh(*shape)
    product, definition, summed_a, summed_b = FORMS[form]
    u, v, w = directions
    sizes = {u: 48, v: 96, w: 72}  # of the index that is cut along each axis
    g = torch.Generator().manual_seed(0)

    def matrix(first, second):
        return torch.randn(sizes[first], sizes[second], generator=g, dtype=torch.float64)

    # A misses u and has the indices of v and w; B those of u and w; the product those of v and u.
    order_a, order_b = [v, w], [u, w]
    a = matrix(*(order_a if summed_a == 1 else order_a[::-1])).requires_grad_()
    b = matrix(*(order_b if summed_b == 1 else order_b[::-1])).requires_grad_()
    z = definition(a, b)
    dz = matrix(v, u)
    z.backward(dz)

    def part(whole, misses):
        rows, columns = [axis for axis in (u, v, w) if axis != misses], None
        order = [next(axis for axis in rows if sizes[axis] == n) for n in whole.shape]
        rows, columns = order
        return _cut(whole.detach(), mesh, [rows, misses], [columns])

    own_a, own_b = part(a, u).requires_grad_(), part(b, v).requires_grad_()
    more = {"keep": True} if keep else {}
    own_z = product(own_a, own_b, mesh, directions, **more)
    own_z.backward(part(dz, w))
    pairs = [(own_z, part(z, w)), (own_a.grad, part(a.grad, u)), (own_b.grad, part(b.grad, v))]
    return [(ours - theirs).abs().max().item() for ours, theirs in pairs]


def _check_all(rank, shape):
    found = {}
    for form in FORMS:
        for directions in DIRECTIONS:
            for keep in (False, True) if form == "abt" else (False,):
                found[form, directions, keep] = _check(rank, shape, form, directions, keep)
    return found


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE)]
)
def test_all_three_products_and_their_gradients_are_those_of_whole_matrices(shape):
    for found in run_ranks(shape[0] * shape[1] * shape[2], _check_all, shape):
        for case, errors in found.items():
            assert max(errors) < 1e-12, (case, errors)
