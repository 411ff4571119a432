"""The whole model and the padded batch: where rows that nobody reads need not be computed.

    python -m benchmarks.whole_model --json results.json

First table: one training step (forward, loss, backward, AdamW) on one chain of trajectories, four
tokens a step. A PyTorch user computes all tokens in every layer and reads the actions at the state
tokens. Second table: one layer, forward and backward, on sequences of different lengths, padded on
the right, with a dense mask of causality and padding and with `Scope(lengths=...)`. "x ours" is the
median over interleaved rounds of the time / ours.
"""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agentic.config import LayerConfig, ModelConfig, TokensConfig
from agentic.model import AgenticTransformer, ModelSpec, action_loss
from agentic.tokens import ACTION_READ_AT, Steps
from benchmarks import measure, peers
from benchmarks.allocations import allocated
from benchmarks.report import Report, mb, number
from envs import TASKS
from parallel import LayerSize, Scope, TransformerLayer

WIDTH, HEADS, LAYERS = 128, 1, 3
DEVICE = torch.device("cpu")


class PlainModel(AgenticTransformer):
    """The same model on layers of `peers`: all rows of all layers, then the rows that are read."""

    def __init__(self, spec: ModelSpec, variant: str) -> None:
        super().__init__(spec)
        width = spec.model.width
        self.layers = peers.make(
            variant,
            layers=spec.model.layers,
            width=width,
            heads=spec.model.heads,
            feed_forward=spec.model.feed_forward * width,
        ).layers

    def forward(self, steps: Steps, first: int = 0) -> Tensor:  # noqa: D102
        x_BSD = self.embedding(self.normalise(steps))
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        read_at = ACTION_READ_AT[self.spec.tokens.layout]
        x_BLD = x_BSD[:, read_at :: self.spec.tokens_per_step]
        return torch.tanh(self.head(self.norm(x_BLD)))[:, first:]


def make_spec(kind: str, trajectories: int, episode_steps: int) -> ModelSpec:
    """The paper's model on cartpole."""
    task = TASKS["cartpole_swingup"]
    return ModelSpec(
        tasks=(task.name,),
        observation_size=task.observation_size,
        action_size=task.action_size,
        episode_steps=episode_steps,
        trajectories=trajectories,
        tokens=TokensConfig(
            layout="interleaved",
            past_action="keep",
            past_reward="keep",
            dropout=0.0,
            trajectory_embedding=False,
        ),
        model=ModelConfig(layers=LAYERS, width=WIDTH, heads=HEADS, feed_forward=4, dropout=0.0),
        layer=LayerConfig(kind=kind, recompute=False),
    )


def draw_steps(spec: ModelSpec) -> Steps:
    """One chain of random whole trajectories."""
    N, T = spec.trajectories, spec.episode_steps
    L = N * T
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Steps(
        return_to_go=normal(1, L),
        observation=normal(1, L, spec.observation_size),
        action=normal(1, L, spec.action_size).tanh(),
        reward=normal(1, L),
        completion=torch.zeros(1, L),
        timestep=torch.arange(T).repeat(N)[None],
        trajectory=torch.arange(N).repeat_interleave(T)[None],
        task=torch.zeros(1, dtype=torch.int64),
        valid=torch.ones(1, L, dtype=torch.bool),
    )


class Training:
    """Steps of one model on one chain; the loss counts the actions from step `first` on."""

    def __init__(self, model: AgenticTransformer, steps: Steps, first: int, bf16: bool) -> None:
        self.model, self.steps, self.first, self.bf16 = model, steps, first, bf16
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss(self) -> Tensor:
        """Of the actions that count."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            predicted_BLA = self.model(self.steps, self.first)
        action_BLA = self.steps.action[:, self.first :]
        weight_BL = torch.ones(action_BLA.shape[:2])
        return action_loss(predicted_BLA, action_BLA, weight_BL, weight_BL.sum())

    def step(self) -> None:
        """One update."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()  # here, so that what is counted begins without gradients

    def gradient(self) -> Tensor:
        """Of all parameters, in one row."""
        gradients = torch.autograd.grad(self.loss(), list(self.model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])


def training_step(
    trajectories: int, episode_steps: int, precision: str, rounds: int
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of the first table."""
    spec = make_spec("blockwise", trajectories, episode_steps)
    torch.manual_seed(0)
    ours = AgenticTransformer(spec)
    steps = draw_steps(spec)
    last = (trajectories - 1) * episode_steps
    plain = make_spec("memory_efficient", trajectories, episode_steps)
    models: dict[str, tuple[AgenticTransformer, int]] = {
        "sdpa+checkpoint": (PlainModel(plain, "sdpa+checkpoint"), 0),
        "sdpa": (PlainModel(plain, "sdpa"), 0),
        "blockwise": (ours, 0),
        "sdpa, loss on last": (PlainModel(plain, "sdpa"), last),
        "blockwise, loss on last": (AgenticTransformer(spec), last),
    }
    trainings = {}
    for name, (model, first) in models.items():
        model.load_state_dict(ours.state_dict())
        trainings[name] = Training(model, steps, first, precision == "bf16")
    exact = {name: trainings[name].gradient() for name in ("sdpa", "sdpa, loss on last")}
    errors = {}
    for name, training in trainings.items():
        expected = exact["sdpa, loss on last" if training.first else "sdpa"]
        errors[name] = float((training.gradient() - expected).norm() / expected.norm())
    tokens = spec.tokens_per_step * steps.valid.shape[1]
    title = f"Training step: {tokens:,} tokens, {LAYERS} layers, width {WIDTH}, {precision}"
    measure.log(title)
    contenders = {name: training.step for name, training in trainings.items()}
    return title, *compare(contenders, rounds, "blockwise", errors)


def padded_layer(
    sequence: int, precision: str, rounds: int
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of the second table."""
    lengths = (sequence, sequence * 7 // 8, sequence * 5 // 8, sequence // 2)
    torch.manual_seed(0)
    size = LayerSize(width=WIDTH, heads=HEADS, feed_forward=4 * WIDTH)
    plain = peers.Layer(WIDTH, HEADS, 4 * WIDTH)
    ours = TransformerLayer(size, kind="blockwise", recompute=False)
    ours.load_state_dict(plain.state_dict())
    valid_BS = torch.arange(sequence) < torch.tensor(lengths)[:, None]
    mask_B1SS = torch.ones(sequence, sequence, dtype=torch.bool).tril() & valid_BS[:, None, None]
    x_BSD = torch.randn(len(lengths), sequence, WIDTH).requires_grad_()
    g_BSD = torch.randn_like(x_BSD) * valid_BS[..., None]  # no loss on padding

    def run(layer: nn.Module, *seen: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            y_BSD = layer(x_BSD, *seen)
        y_BSD.backward(g_BSD)
        dx_BSD, x_BSD.grad = x_BSD.grad, None
        layer.zero_grad()
        assert dx_BSD is not None
        return dx_BSD

    contenders: dict[str, Callable[[], Tensor]] = {
        "sdpa, dense mask": lambda: run(plain, mask_B1SS),
        "sdpa, causal only": lambda: run(plain),  # enough where the padding has no loss
        "blockwise": lambda: run(ours, Scope(lengths=lengths)),
    }
    expected = contenders["sdpa, dense mask"]()
    errors = {
        name: float((function() - expected).norm() / expected.norm())
        for name, function in contenders.items()
    }
    title = f"Padded layer: lengths {lengths}, width {WIDTH}, {precision}"
    measure.log(title)
    extra = {"sdpa, dense mask": mask_B1SS.nbytes}
    return title, *compare(contenders, rounds, "blockwise", errors, extra)


def compare(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    base: str,
    errors: Mapping[str, float],
    extra_bytes: Mapping[str, int] | None = None,
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Rows and measurements; `extra_bytes` were allocated before and belong to a contender."""

    def timed(function: Callable[[], object]) -> Callable[[], float]:
        return lambda: measure.seconds(function, DEVICE)

    for name, function in contenders.items():
        measure.log(f"  warm-up: {name} {measure.seconds(function, DEVICE):.4g} s")
    taken = measure.interleave({k: timed(f) for k, f in contenders.items()}, rounds)
    rows: list[dict[str, str]] = []
    measured: dict[str, dict[str, Any]] = {}
    for name, function in contenders.items():
        gc.collect()
        peak = allocated(function).peak + (extra_bytes or {}).get(name, 0)
        measured[name] = {
            "seconds": statistics.median(taken[name]),
            "rounds": taken[name],
            "time_over_ours": measure.ratio(taken[name], taken[base]),
            "peak_bytes": peak,
            "gradient_error": errors[name],
        }
        rows.append(
            {
                "variant": name,
                "seconds": number(measured[name]["seconds"]),
                "x ours": number(measured[name]["time_over_ours"]),
                "peak MB": mb(peak),
                "gradient, relative to sdpa": f"{errors[name]:.0e}",
            }
        )
    return rows, {"variants": measured}


def main(argv: Sequence[str] | None = None) -> None:
    """Both tables."""
    parser = measure.arguments(__doc__, rounds=7)
    parser.add_argument("--trajectories", type=int, default=4, help="0: no first table")
    parser.add_argument("--episode-steps", type=int, default=1000)
    parser.add_argument("--padded", type=int, default=8192, help="longest sequence; 0: no table")
    parser.add_argument("--precision", nargs="+", choices=measure.DTYPES, default=["fp32"])
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args(argv)
    measure.pin(settings.threads)
    report = Report(settings.json, **vars(settings))
    for precision in settings.precision:
        if settings.trajectories:
            sizes = settings.trajectories, settings.episode_steps
            report.case(*training_step(*sizes, precision, settings.rounds))
        if settings.padded:
            report.case(*padded_layer(settings.padded, precision, settings.rounds))


if __name__ == "__main__":
    main()
