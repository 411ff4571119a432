"""Steps whose loss or gradients are not finite: how many were left out, and where it began."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from agentic.console import say
from agentic.episodes import write_atomically
from agentic.imitation import Imitation, seed_micro_batch
from agentic.metrics import SKIPPED_CHAINS, MetricLog
from agentic.sampler import ChainSampler, Windows
from agentic.tokens import Steps
from agentic.wording import spell_setting
from parallel.collectives import all_reduce
from parallel.mesh import CUBE, CubeMesh

SHOWN = 8  # chains on the console


class Skips:
    """Counts the steps that are left out.

    Attributes:
        total: all of them.
        in_row: those up to the last step.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total, self.in_row = limit, 0, 0

    def count(self, finite: bool) -> None:
        """A step is over."""
        self.total += not finite
        self.in_row = 0 if finite else self.in_row + 1

    @property
    def too_many(self) -> bool:
        """Whether training should stop here."""
        return self.in_row >= self.limit

    def tell(
        self,
        step: int,
        measured: dict[str, float],
        sampler: ChainSampler,
        indices: range,
        log: MetricLog | None,
    ) -> None:
        """That a step was left out, with the chains of its micro-batches."""
        chains = [chain for index in indices for chain in chains_of(sampler, index)]
        say(
            f"step {step}: loss {measured['train/loss']:g}, gradient norm "
            f"{measured['train/gradient_norm']:g}: left out ({self.in_row} in a row, {self.total} "
            f"so far); micro-batches {indices[0]} to {indices[-1]}, chains {spell_chains(chains)}"
        )
        if log is not None:
            log.note(step, {SKIPPED_CHAINS: chains})


class Survey:
    """Counts what is not finite in one micro-batch's way through the model, and back.

    Every tensor has a name, in this order: `batch.` and the array's, `parameter.` and `buffer.`,
    `activation.` and the module's in the order of the forward pass, `loss`, `gradient.` and the
    parameter's in the order of the backward pass.

    Args:
        imitation: as in training; all processes of a cube and all copies of it call this together.
        mesh: the processes.
    """

    def __init__(self, imitation: Imitation, mesh: CubeMesh) -> None:
        self.imitation, self.mesh = imitation, mesh
        self._found: dict[str, Tensor] = {}  # NaN and infinite numbers, as they were come upon

    def run(self, steps: Steps, weight_BL: Tensor) -> dict[str, tuple[int, int]]:
        """NaN and infinite numbers of all bad tensors, the first one first; gradients are lost."""
        self._found = {}
        model = self.imitation.model
        for field in fields(Steps):
            self._look(f"batch.{field.name}", getattr(steps, field.name))
        for name, parameter in model.named_parameters():
            self._look(f"parameter.{name}", parameter)
        for name, buffer in model.named_buffers():
            self._look(f"buffer.{name}", buffer)
        forward = [
            module.register_forward_hook(self._output(_activation(name)))
            for name, module in model.named_modules()
        ]
        try:
            loss = self.imitation(steps, weight_BL)
        finally:
            for hook in forward:  # what is computed again in the backward pass is known
                hook.remove()
        self._look("loss", loss)
        backward = [
            parameter.register_hook(self._gradient(f"gradient.{name}"))
            for name, parameter in model.named_parameters()
        ]
        try:
            loss.backward()
        finally:
            for hook in backward:
                hook.remove()
            model.zero_grad(set_to_none=True)
        return self._of_all()

    def _names(self) -> Iterator[str]:
        """Of all tensors there can be, the same for all processes."""
        model = self.imitation.model
        yield from (f"batch.{field.name}" for field in fields(Steps))
        yield from (f"parameter.{name}" for name, _ in model.named_parameters())
        yield from (f"buffer.{name}" for name, _ in model.named_buffers())
        yield from (_activation(name) for name, _ in model.named_modules())
        yield "loss"
        yield from (f"gradient.{name}" for name, _ in model.named_parameters())

    def _of_all(self) -> dict[str, tuple[int, int]]:
        """What any process has found, in this one's order."""
        names = list(self._names())
        none = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        counts_N2 = torch.stack([self._found.get(name, none).to(none) for name in names])
        counts_N2 = all_reduce(all_reduce(counts_N2, self.mesh, CUBE), self.mesh, "dp").cpu()
        by_name = dict(zip(names, counts_N2.long().tolist(), strict=True))
        order = [*self._found, *(name for name in names if name not in self._found)]
        return {name: tuple(by_name[name]) for name in order if any(by_name[name])}

    def _look(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach()
            counts = torch.stack([value.isnan().sum(), value.isinf().sum()]).double()
            self._found[name] = self._found[name] + counts if name in self._found else counts
        elif isinstance(value, tuple | list):
            for each in value:
                self._look(name, each)

    def _output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, given, output: self._look(name, output)

    def _gradient(self, name: str) -> Callable[[Tensor], None]:
        return lambda gradient: self._look(name, gradient)


def _activation(module: str) -> str:
    return f"activation.{module or 'model'}"


def trace(
    imitation: Imitation, sampler: ChainSampler, seed: int, mesh: CubeMesh, indices: range
) -> dict[str, Any]:
    """Goes over the micro-batches of a step again, as they were; all processes together.

    Returns:
        `tensors`: name, NaN and infinite numbers of the bad ones, the first one first, in the first
        micro-batches (one for each copy of the model) that have any, none where what went wrong
        does not happen again; `chains` of these micro-batches, or of all; those with bad arrays say
        which.
    """
    copies, own = mesh.sizes["dp"], mesh.place["dp"]
    for first in indices[::copies]:
        seed_micro_batch(seed, first + own)
        found = Survey(imitation, mesh).run(*sampler.batch(first + own))
        if found:
            indices = range(first, first + copies)
            break
    chains = []
    for index in indices:
        bad = _bad_arrays(sampler.batch(index)[0])
        for row, chain in enumerate(chains_of(sampler, index)):
            wrong = {"not_finite": bad[row]} if row in bad else {}
            chains.append({"micro_batch": index, **chain, **wrong})
    tensors = [{"name": name, "nan": nan, "inf": inf} for name, (nan, inf) in found.items()]
    return {"tensors": tensors, "chains": chains}


def _bad_arrays(steps: Steps) -> dict[int, list[str]]:
    """Names of the arrays of every chain that are not finite."""
    bad: dict[int, list[str]] = {}
    for field in fields(Steps):
        array = getattr(steps, field.name)
        bad_B = ~array.isfinite().reshape(len(array), -1).all(dim=1)
        for row in bad_B.nonzero().flatten().tolist():
            bad.setdefault(row, []).append(field.name)
    return bad


def spell_trace(found: dict[str, Any]) -> str:
    """The first bad tensor and the chains it came with, in one line."""
    chains = found["chains"]
    told = spell_chains([chain for chain in chains if "not_finite" in chain] or chains)
    if not found["tensors"]:
        return f"all numbers are finite when they are computed again; chains {told}"
    first = found["tensors"][0]
    return (
        f"first bad tensor: {first['name']} ({first['nan']:,} NaN, {first['inf']:,} infinite), "
        f"micro-batch {chains[0]['micro_batch']}, chains {told}"
    )


def chains_of(sampler: ChainSampler, index: int) -> list[dict[str, Any]]:
    """Task and episodes of every chain of a micro-batch; of windows also length and first steps."""
    drawn, store = sampler.draw(index), sampler.store
    if not isinstance(drawn, Windows):
        return [
            {
                "task": store.specs[chain.task].name,
                "episodes": [store.name(episode) for episode in chain.episodes],
            }
            for chain in drawn
        ]
    rows = zip(drawn.task, drawn.episodes, drawn.start, strict=True)
    return [
        {
            "task": store.specs[task].name,
            "episodes": [store.name(episode) for episode in episodes],
            "steps": drawn.length,
            "from": starts.tolist(),
        }
        for task, episodes, starts in rows
    ]


def spell_chains(chains: list[dict[str, Any]]) -> str:
    """The first of them in one line."""
    told = [f"{chain['task']} {' '.join(chain['episodes'])}" for chain in chains[:SHOWN]]
    more = len(chains) - len(told)
    return "; ".join(told) + (f"; and {more:,} more" if more > 0 else "")


def give_up(
    run_dir: Path, told: str, step: int, measured: dict[str, float], found: dict[str, Any]
) -> NoReturn:
    """Writes what `trace` has found to `nonfinite_<step>.json`, and raises it as a ValueError."""
    path = run_dir / f"nonfinite_{step:09d}.json"
    content = {"step": step, **measured, **found}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    raise ValueError(
        f"{told}; {spell_trace(found)}; the weights are sound and saved: "
        f"{spell_setting('resume', str(run_dir))} goes on "
        f"behind these steps (details: {path})"
    )
