"""What takes turns in `benchmarks.layers`: a variant at a case, in PyTorch or in JAX."""

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks import measure, peers
from benchmarks.allocations import allocated
from benchmarks.jax_client import JaxPeer
from parallel.kernels import kernel_for


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all variants compute."""

    sequence: int
    layers: int
    width: int
    heads: int
    precision: str  # fp32 | bf16 (autocast) | fp64, for reference
    device: torch.device
    batch: int = 1

    @property
    def unit(self) -> int:
        """Bytes of one activation of the model's width, in fp32."""
        return self.batch * self.sequence * self.width * 4

    @property
    def useful_flop(self) -> float:
        """Of a forward and backward pass, with a feed-forward of four widths."""
        s, d = self.sequence, self.width
        return self.batch * self.layers * (3.5 * 2 * s**2 * d + 72 * s * d**2)

    @property
    def score_bytes(self) -> int:
        """About what matrices of scores take at the peak, where they are built (as counted)."""
        matrix = self.batch * self.heads * self.sequence**2 * 4
        return int(matrix * (1.25 * self.layers + 2.2))

    def title(self) -> str:
        """For the table; names the attention kernel of ours."""
        dtype = measure.DTYPES[self.precision]
        return (
            f"{self.batch} x {self.sequence:,} tokens, {self.layers} layer(s), width {self.width}, "
            f"{self.heads} head(s), {self.precision}, kernel: "
            f"{kernel_for(self.device, dtype, self.width // self.heads).name}"
        )


class Contender(Protocol):
    """One variant at one case."""

    def seconds(self) -> float:
        """Of one forward and backward pass."""
        ...

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes at the peak, and kept after the forward pass."""
        ...

    def values(self) -> dict[str, Tensor]:
        """Output y, input gradient dx, and the parameters' gradients by name."""
        ...


class TorchContender:
    """A stack of `peers`, with the inputs given."""

    def __init__(self, variant: str, case: Case, inputs: dict[str, Tensor]) -> None:
        self.case = case
        self.stack = peers.make(
            variant,
            layers=case.layers,
            width=case.width,
            heads=case.heads,
            feed_forward=4 * case.width,
        )
        self.stack.load_state_dict({k: v for k, v in inputs.items() if k not in ("x", "g")})
        dtype = torch.float64 if case.precision == "fp64" else torch.float32
        self.stack.to(case.device, dtype)
        self.x = inputs["x"].detach().to(case.device, dtype).requires_grad_()
        self.g = inputs["g"].to(case.device, dtype)
        for parameter in self.stack.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self) -> Tensor:
        """The output, under autocast where that is asked for."""
        autocast = self.case.precision == "bf16"
        with torch.autocast(self.case.device.type, torch.bfloat16, enabled=autocast):
            return self.stack(self.x)

    def step(self) -> Tensor:
        """Forward and backward; the output."""
        y = self.forward()
        y.backward(self.g)
        return y.detach()

    def reset(self) -> None:
        """Gradients as they are before a step."""
        self.x.grad = None
        for parameter in self.stack.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()

    def seconds(self) -> float:  # noqa: D102
        self.reset()
        taken = measure.seconds(self.step, self.case.device)
        self.x.grad = None  # the next contender shall find the memory free
        return taken

    def memory(self) -> tuple[int, int]:  # noqa: D102
        self.reset()
        gc.collect()
        kept = allocated(self.forward, self.case.device).kept
        peak = allocated(self.step, self.case.device).peak
        self.reset()
        return peak, kept

    def values(self) -> dict[str, Tensor]:  # noqa: D102
        self.reset()
        y, dx = self.step(), self.x.grad
        assert dx is not None
        gradients = {k: p.grad for k, p in self.stack.named_parameters() if p.grad is not None}
        return {"y": y, "dx": dx, **gradients}


class JaxContender:
    """The authors' layer in its own process; one at a time can be built."""

    def __init__(self, peer: JaxPeer, case: Case, inputs: dict[str, Tensor]) -> None:
        self.peer = peer
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/inputs.npz"
            np.savez(path, allow_pickle=False, **{k: v.numpy() for k, v in inputs.items()})
            self.built = peer(
                "build",
                layers=case.layers,
                sequence=case.sequence,
                batch=case.batch,
                width=case.width,
                heads=case.heads,
                feed_forward=4 * case.width,
                dtype={"fp32": "float32", "bf16": "bfloat16"}[case.precision],
                weights=path,
            )

    def seconds(self) -> float:  # noqa: D102
        return self.peer("step")["seconds"]

    def memory(self) -> tuple[int, None]:  # noqa: D102
        return int(self.built["temp_bytes"] + self.built["output_bytes"]), None

    def values(self) -> dict[str, Tensor]:  # noqa: D102
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "values.npz"
            self.peer("values", path=str(path))
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays}


def draw(case: Case) -> dict[str, Tensor]:
    """Parameters, input x and output gradient g.

    Norms and biases are not left at 1 and 0. Half of the hidden units are on for every token and
    half are off: where one is near 0, two exact computations may differ in a ReLU, and with it in
    gradients by far more than they round.
    """
    torch.manual_seed(0)
    sizes = {"width": case.width, "heads": case.heads, "feed_forward": 4 * case.width}
    inputs = peers.make("sdpa", layers=case.layers, **sizes).state_dict()
    for name, value in inputs.items():
        if "norm" in name or name.endswith("bias"):
            value.add_(0.1 * torch.randn_like(value))
        if name.endswith("up.bias"):
            value.add_(4 * torch.randn_like(value).sign())
    shape = (case.batch, case.sequence, case.width)
    return {**inputs, "x": torch.randn(shape), "g": torch.randn(shape)}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of y, dx, and the worst parameter's gradient."""

    def error(name: str) -> float:
        difference = found[name].cpu().double() - expected[name].cpu()
        return float(difference.abs().max() / expected[name].abs().max())

    parameters = [name for name in expected if name not in ("y", "dx")]
    return {"y": error("y"), "dx": error("dx"), "parameters": max(map(error, parameters))}
