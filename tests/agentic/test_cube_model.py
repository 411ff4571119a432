"""The model on a cube against the whole model in one process: loss and every gradient."""

import dataclasses
import itertools

import pytest
import torch
from conftest import make_model
from ranks import run_ranks

from agentic.cube_model import CubeTransformer
from agentic.imitation import clip_gradients
from agentic.tokens import Steps
from benchmarks.processes import pretended
from parallel.collectives import all_reduce
from parallel.mesh import CUBE, CubeMesh
from parallel.traffic import Traffic

SHAPES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]
MORE = [(3, 2, 1), (4, 2, 1), (1, 4, 2)]
T = 5


def _steps(B, N, ragged):
    g = torch.Generator().manual_seed(1)
    L = N * T
    valid = torch.ones(B, L, dtype=torch.bool)
    valid[0, L - 3 * ragged :] = False
    wide = {"generator": g, "dtype": torch.float64}
    rubbish_BL = torch.where(valid, 0.0, torch.nan)  # padding may hold anything
    return Steps(
        return_to_go=torch.rand(B, L, **wide) + rubbish_BL,
        observation=torch.randn(B, L, 3, **wide) + rubbish_BL[..., None],
        action=torch.rand(B, L, 2, **wide) * 2 - 1,
        reward=torch.rand(B, L, **wide),
        completion=(torch.arange(L) % T == T - 1).double().expand(B, L),
        timestep=torch.arange(T).repeat(N).expand(B, L),
        trajectory=torch.arange(N).repeat_interleave(T).expand(B, L),
        task=torch.arange(B) % 2,
        valid=valid,
    )


def _check(rank, shape):
    """The largest difference of each case, relative to a tensor's largest number, and where."""
    mesh, found = CubeMesh(*shape), {}
    layouts = [("step", 1), ("step", 3), ("interleaved", 1), ("interleaved", 2)]
    if mesh.sizes[CUBE] == 8:  # eight processes share two cores
        layouts = layouts[1:3]
    for (layout, B), ring, loss_on in itertools.product(layouts, [False, True], ["last", "all"]):
        model = make_model(
            layout=layout, width=48, heads=4, feed_forward=2, layer_dropout=0.3, kind="blockwise",
            recompute=ring, block_query=16, past_action="dropout", past_reward="dropout",
            trajectory_embedding=B == 1, timestep_embedding=B == 1,
            tasks=("walker_walk", "walker_run"),
        ).double().train()  # fmt: skip
        steps = _steps(B, 3, ragged=loss_on == "all")
        weight_BL = torch.rand(B, 3 * T, generator=torch.Generator().manual_seed(3)).double()
        weight_BL *= steps.valid
        if loss_on == "last":
            weight_BL[:, : 2 * T] = 0
        cube = CubeTransformer(model, mesh, ring=ring).train()
        assert [n for n, _ in cube.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert list(cube.state_dict()) == list(model.state_dict())
        torch.manual_seed(9)
        whole = model.loss(steps, weight_BL)
        torch.manual_seed(9)
        own = cube.loss(steps, weight_BL)
        whole.backward()
        own.backward()
        total = all_reduce(own.detach(), mesh, CUBE)
        errors = {"loss": (abs(total - whole) / whole).item()}
        for name, parameter in cube.named_parameters():
            theirs = cube.cuts[name].part(model.get_parameter(name).grad, mesh)
            scale = model.get_parameter(name).grad.abs().max().clamp(min=1e-6)
            errors[name] = ((parameter.grad - theirs).abs().max() / scale).item()
        model.eval(), cube.eval()
        told = model.loss(steps, weight_BL), all_reduce(cube.loss(steps, weight_BL), mesh, CUBE)
        errors["eval"] = (abs(told[1] - told[0]) / told[0]).item()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        errors["norm"] = abs(clip_gradients(cube, 0.1, mesh) - norm) / norm
        clipped = cube.get_parameter("head.bias").grad - model.head.bias.grad
        errors["clipped"] = clipped.abs().max().item()
        found[layout, B, ring, loss_on] = max((e, name) for name, e in errors.items())
    return found


@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE)]
)
def test_loss_and_gradients_are_the_whole_models_dropout_included(shape):
    for found in run_ranks(shape[0] * shape[1] * shape[2], _check, shape):
        for case, (error, name) in found.items():
            assert error < 1e-10, (case, name, error)


def _shares(rank, shape):
    mesh = CubeMesh(*shape)
    model = make_model(width=48, heads=4, kind="blockwise")
    cube = CubeTransformer(model, mesh)
    assert cube.parameter_count() == model.parameter_count()
    theirs = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not theirs & {t.data_ptr() for t in (*cube.parameters(), *cube.buffers())}
    kept = [p for name, p in cube.named_parameters() if name != "head.bias"]
    optimizer = torch.optim.AdamW(cube.parameters())
    cube.loss(_float(_steps(1, 3, False)), torch.ones(1, 3 * T)).backward()
    optimizer.step()
    moments = [optimizer.state[p][k].numel() for p in kept for k in ("exp_avg", "exp_avg_sq")]
    gradients = sum(p.grad.numel() for p in kept)
    return sum(p.numel() for p in kept), gradients, sum(moments), model.parameter_count()


def _float(steps):
    wide = {f: getattr(steps, f).float() for f in ("return_to_go", "observation", "action")}
    wide |= {f: getattr(steps, f).float() for f in ("reward", "completion")}
    return Steps(**{**{f: getattr(steps, f) for f in Steps.__dataclass_fields__}, **wide})


@pytest.mark.parametrize("shape", SHAPES)
def test_every_process_holds_its_share_of_parameters_gradients_and_moments(shape):
    P = shape[0] * shape[1] * shape[2]
    for parameters, gradients, moments, whole in run_ranks(P, _shares, shape):
        share, rest = divmod(whole - 2, P)  # all have the two biases of the head
        assert rest == 0
        assert (parameters, gradients, moments) == (share, share, 2 * share)


def _received(actions=2, recompute=False):
    """Traffic of both passes in half precision, of a process that pretends to be one of two."""
    model = make_model(kind="blockwise", recompute=recompute, action_size=actions)
    steps = dataclasses.replace(_float(_steps(1, 3, False)), action=torch.rand(1, 3 * T, actions))
    with pretended(2):
        mesh = CubeMesh(z=2, timeout=None)
        cube = CubeTransformer(model, mesh)
        with torch.autocast("cpu", torch.bfloat16), Traffic(mesh) as forward:
            loss = cube.loss(steps, torch.ones(1, 3 * T))
        with Traffic(mesh) as backward:
            loss.backward()
    return forward, backward


def test_the_heads_sums_are_sent_in_single_precision():
    few, many = (_received(actions)[0].bytes("z", "all-to-all") for actions in (2, 10))
    rows = 16  # 15 steps and one that fills up; the own half of them is received
    assert many - few == 4 * 8 * rows // 2


def test_recomputed_layers_receive_their_forward_pass_again():
    (forward, once), (_, twice) = _received(), _received(recompute=True)
    again = twice.bytes("z", "all-to-all") - once.bytes("z", "all-to-all")
    head = 4 * 2 * 16 // 2
    assert again == forward.bytes("z", "all-to-all") - head
