"""The memory plan beside what is measured: bare layers, and steps of the trainer.

    python -m benchmarks.memory_plan --lengths 4096 16384 --json results.json

A row is one training step, whose peak PyTorch's own allocator tells (see `allocations`), with what
`parallel.memory.plan` says of it: gradients and activations. Parameters, their average and the
optimiser's state are exact in both and left out, so that they hide no error. "layers" is a stack of
bare layers; "model" a step of `agentic.trainer` on one chain of cartpole trajectories, four tokens
a step, the loss on all of them. What would take more than half of the memory here is not run.
"""

import gc
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from agentic import runs
from agentic.budget import VARIANTS, budget_of
from agentic.config import TrainConfig
from agentic.store import EpisodeStore, in_memory
from agentic.train import build_model
from agentic.trainer import Trainer
from benchmarks import measure
from benchmarks.allocations import allocated
from benchmarks.report import Report, mb
from envs import TASKS
from parallel import LayerSize, TransformerLayer
from parallel.memory import Batch, MemoryPlan, Stack, plan

CPU = torch.device("cpu")
Step = Callable[[], object]


def layers_step(stack: Stack, batch: Batch) -> tuple[Step, MemoryPlan]:
    """A step of bare layers on a new input, and its plan."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        TransformerLayer(
            stack.size, kind=stack.kind, recompute=stack.recompute, blocks=stack.blocks
        )
        for _ in range(stack.layers)
    )

    def step() -> None:
        x_BSD = torch.randn(batch.sequences, batch.tokens, stack.size.width).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=stack.half):
            for layer in layers[:-1]:
                x_BSD = layer(x_BSD)
            x_BSD = layers[-1](x_BSD, batch.scope)
        loss = x_BSD.square().mean()
        del x_BSD
        loss.backward()
        layers.zero_grad()

    return step, plan(stack, batch, parameters=stack.layers * stack.layer_parameters)


def chain_settings(
    kind: str, recompute: bool, precision: str, *, trajectories: int, episode_steps: int
) -> dict[str, Any]:
    """Settings of `agentic-train` for steps on one whole chain, the loss on all of it."""
    return {
        "layer": kind,
        "layer.recompute": recompute,
        "precision": precision,
        "tokens.layout": "interleaved",
        "tokens.past_action": "keep",
        "tokens.past_reward": "keep",
        "chain.trajectories": trajectories,
        "chain.count": "fixed",
        "chain.window_share": 0,
        "chain.loss_on": "all",
        "batch_steps": trajectories * episode_steps,
        "device": "cpu",
    }


def model_plan(trajectories: int, episode_steps: int, **settings: Any) -> MemoryPlan:
    """What the plan says of a step with these settings; nothing large is made."""
    config, store = train_config(**settings), random_store(trajectories, episode_steps)
    return budget_of(config, runs.model_spec(config, store), store, CPU).plan()


def model_step(trajectories: int, episode_steps: int, **settings: Any) -> Step:
    """A step of the trainer with these settings."""
    config, store = train_config(**settings), random_store(trajectories, episode_steps)
    spec = runs.model_spec(config, store)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:  # only checkpoints are written to it
        every, none = np.arange(trajectories), np.arange(0)
        trainer = Trainer(config, build_model(spec, store), store, every, none, Path(folder))
    for parameter in trainer.model.parameters():  # the optimiser's state comes with its first step
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return trainer.update


def train_config(**settings: Any) -> TrainConfig:
    """What `agentic-train` makes of these settings."""
    with initialize_config_module("configs", version_base="1.3"):
        composed = compose("train", [f"{name}={value}" for name, value in settings.items()])
    return runs.settings(OmegaConf.to_container(composed, resolve=True), [])  # type: ignore[arg-type]


def random_store(episodes: int, steps: int) -> EpisodeStore:
    """Noise in the shapes of cartpole."""
    task = TASKS["cartpole_swingup"]
    rng = np.random.default_rng(0)
    reward_KET = rng.random((1, episodes, steps), np.float32)
    return in_memory(
        (task,),
        observation_ETO=rng.standard_normal((episodes, steps, task.observation_size), np.float32),
        action_ETA=rng.random((episodes, steps, task.action_size), np.float32),
        reward_KET=reward_KET,
    )


def compare(step: Step, planned: MemoryPlan) -> dict[str, Any]:
    """Bytes predicted and measured, or why they were not measured."""
    predicted = planned.gradients + planned.activations
    if planned.total > measure.available_bytes(CPU) / 2:
        return {"predicted_bytes": predicted, "failure": "does not fit here"}
    gc.collect()
    measured = allocated(step).peak
    return {
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "ratio": predicted / measured,
    }


def _row(name: str, kind: str, recompute: bool, found: dict[str, Any]) -> dict[str, str]:
    return {
        "": name,
        "layer": f"{kind}{', recompute' if recompute else ''}",
        "predicted MB": mb(found["predicted_bytes"]),
        "measured MB": found.get("failure") or mb(found["measured_bytes"]),
        "predicted / measured": f"{found['ratio']:.3f}" if "ratio" in found else "",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """One table for every length, shape and precision."""
    parser = measure.arguments(__doc__, rounds=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="tokens")
    parser.add_argument("--shapes", nargs="+", default=["128/1"], metavar="WIDTH/HEADS")
    parser.add_argument("--batch", type=int, default=1, help="of the bare layers")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--kinds", nargs="+", default=sorted({kind for kind, _ in VARIANTS}))
    parser.add_argument(
        "--what", nargs="+", choices=["layers", "model"], default=["layers", "model"]
    )
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args(argv)
    torch.set_num_threads(settings.threads)  # the plan counts a kernel's buffers of each
    report = Report(settings.json, **vars(settings))
    variants = [(kind, recompute) for kind, recompute in VARIANTS if kind in settings.kinds]
    worst = 1.0
    for shape, length, precision in itertools.product(
        settings.shapes, settings.lengths, settings.precision
    ):
        width, heads = map(int, shape.split("/"))
        size = LayerSize(width=width, heads=heads, feed_forward=4 * width)
        rows, cases = [], []
        for what, (kind, recompute) in itertools.product(settings.what, variants):
            measure.log(f"{length} tokens {shape} {precision}: {what} {kind} {recompute}")
            if what == "layers":
                stack = Stack(
                    size=size,
                    layers=settings.layers,
                    kind=kind,
                    recompute=recompute,
                    half=precision == "bf16",
                )
                step, planned = layers_step(stack, Batch(sequences=settings.batch, tokens=length))
            else:
                shape_of = {"trajectories": 4, "episode_steps": length // 16}
                told = chain_settings(kind, recompute, precision, **shape_of) | {
                    "model.width": width,
                    "model.heads": heads,
                    "model.layers": settings.layers,
                }
                planned = model_plan(**shape_of, **told)
                step = model_step(**shape_of, **told)
            found = compare(step, planned)
            measure.log(f"  {found}")
            rows.append(_row(what, kind, recompute, found))
            cases.append({"what": what, "kind": kind, "recompute": recompute, **found})
            worst = max(worst, found.get("ratio", 1.0), 1 / found.get("ratio", 1.0))
        title = f"{length:,} tokens, {settings.layers} layers, {width} wide, {heads} head(s), "
        report.case(title + precision, rows, {"measured": cases})
    report.note(f"Predictions are off by a factor of {worst:.3f} at most.")


if __name__ == "__main__":
    main()
