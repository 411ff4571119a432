"""The Agentic Transformer: token embedding, layers of `parallel`, an action head."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from agentic.config import LayerConfig, ModelConfig, TokensConfig
from agentic.tokens import ACTION_READ_AT, TOKENS_PER_STEP, Steps, TokenEmbedding
from parallel import BlockSettings, KVCache, LayerSize, Scope, TransformerLayer, in_blocks

CACHE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # numbers of keys and values
HEAD_ROWS = 4096  # of a block of the action head, where it is computed in blocks


def layer_size(config: ModelConfig) -> LayerSize:
    """The layers' widths as `parallel` takes them."""
    return LayerSize(
        width=config.width,
        heads=config.heads,
        feed_forward=config.feed_forward * config.width,
        dropout=config.dropout,
    )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that fixes the model's parameters; stands in every checkpoint."""

    tasks: tuple[str, ...]
    observation_size: int
    action_size: int
    episode_steps: int
    trajectories: int
    tokens: TokensConfig
    model: ModelConfig
    layer: LayerConfig
    method: str = "at"
    context_steps: int | None = None  # K, all that it sees of a trial; none: the whole context

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one environment step takes in this layout; in cloning, one observation."""
        return 1 if self.method == "bc" else TOKENS_PER_STEP[self.tokens.layout]

    def layer_size(self) -> LayerSize:
        """The layers' widths as `parallel` takes them."""
        return layer_size(self.model)

    def cache_bytes(self, trials: int, cache: str) -> int:
        """Of all layers' keys and values of so many trials."""
        if self.context_steps is not None:
            return 0  # the last steps are encoded again, see `agentic.window_policy`
        tokens = trials * self.episode_steps * self.tokens_per_step
        return tokens * self.model.layers * 2 * self.model.width * CACHE_TYPES[cache].itemsize

    def block_settings(self) -> BlockSettings:
        """The blockwise layers' block sizes as `parallel` takes them."""
        layer = self.layer
        return BlockSettings(query=layer.block_query, key=layer.block_key, rows=layer.block_rows)

    def to_dict(self) -> dict:
        """Plain types, for a checkpoint."""
        return dataclasses.asdict(self)


class InUnits(nn.Module):
    """A model of any method: a loss, and the units of its observations and returns.

    The units are buffers, so that a checkpoint acts in the units it was trained in.
    """

    observation_mean: Tensor
    observation_std: Tensor
    return_scale: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("observation_mean", torch.zeros(spec.observation_size))
        self.register_buffer("observation_std", torch.ones(spec.observation_size))
        self.register_buffer("return_scale", torch.ones(len(spec.tasks)))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.return_scale.device

    def loss(self, steps: Steps, weight_BL: Tensor) -> Tensor:
        """Mean squared action error over the weighted steps, of which there is at least one."""
        raise NotImplementedError

    def parameter_count(self) -> int:
        """Trainable numbers."""
        return sum(p.numel() for p in self.parameters())

    def set_units(
        self, *, observation_mean: np.ndarray, observation_std: np.ndarray, return_scale: np.ndarray
    ) -> None:
        """Fixes the normalisation: (O,), (O,) and one return scale per task (K,)."""
        self.observation_mean.copy_(torch.as_tensor(observation_mean))
        self.observation_std.copy_(torch.as_tensor(observation_std))
        self.return_scale.copy_(torch.as_tensor(return_scale))

    def normalise(self, steps: Steps) -> Steps:
        """Raw observations and returns-to-go in the model's units."""
        return dataclasses.replace(
            steps,
            observation=(steps.observation - self.observation_mean) / self.observation_std,
            return_to_go=steps.return_to_go / self.return_scale[steps.task][:, None],
        )


class AgenticTransformer(InUnits):
    """Predicts every step's action from all that came before it in the chain."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.embedding = TokenEmbedding(
            spec.tokens,
            observation_size=spec.observation_size,
            action_size=spec.action_size,
            width=spec.model.width,
            episode_steps=spec.episode_steps,
            trajectories=spec.trajectories,
            tasks=len(spec.tasks),
        )
        self.layers = nn.ModuleList(
            TransformerLayer(
                spec.layer_size(),
                kind=spec.layer.kind,
                recompute=spec.layer.recompute,
                blocks=spec.block_settings(),
            )
            for _ in range(spec.model.layers)
        )
        self.norm = nn.LayerNorm(spec.model.width)
        self.head = nn.Linear(spec.model.width, spec.action_size)

    def forward(self, steps: Steps, first: int = 0) -> Tensor:
        """Actions (B, L - first, A) in (-1, 1) of the steps from `first` on.

        Args:
            steps: raw; a_t sees nothing later than s_t.
            first: nothing that only earlier actions need is computed.
        """
        x_BSD = self._embed(steps)
        group = self.spec.tokens_per_step
        lengths = None
        if not steps.valid.all():
            assert (steps.valid[:, 1:] <= steps.valid[:, :-1]).all(), "padding is on the right"
            lengths = tuple(int(n) * group for n in steps.valid.sum(dim=1))
        for layer in self.layers[:-1]:
            x_BSD = layer(x_BSD, Scope(lengths=lengths))
        # Only the tokens at which actions are read pass the last layer.
        read_at = first * group + ACTION_READ_AT[self.spec.tokens.layout]
        x_BLD = self.layers[-1](x_BSD, Scope(start=read_at, stride=group, lengths=lengths))
        return in_blocks(self._act, x_BLD, HEAD_ROWS) if self._lean else self._act(x_BLD)

    @torch.no_grad()
    def decode(self, previous: Steps | None, current: Steps, caches: list[KVCache]) -> Tensor:
        """The action (B, A) for one more step of each context; its tokens join the caches."""
        before = None if previous is None else self.normalise(previous)
        x_BSD = self.embedding.next(before, self.normalise(current))
        for layer, cache in zip(self.layers, caches, strict=True):
            # Of the last layer only the token that predicts the action is asked.
            last = 1 if layer is self.layers[-1] else None
            x_BSD = layer.decode(x_BSD, cache, last)  # type: ignore[operator]
        return self._act(x_BSD[:, -1])

    def caches(
        self, contexts: int, env_steps: int, dtype: torch.dtype = torch.float32
    ) -> list[KVCache]:
        """Empty key/value caches, one a layer, for `contexts` contexts of `env_steps` steps."""
        size = self.spec.layer_size()
        return [
            KVCache(
                batch=contexts,
                heads=size.heads,
                capacity=env_steps * self.spec.tokens_per_step,
                head_width=size.head_width,
                device=self.device,
                dtype=dtype,
            )
            for _ in self.layers
        ]

    def loss(self, steps: Steps, weight_BL: Tensor) -> Tensor:
        """See `InUnits.loss`."""
        first = int(weight_BL.any(dim=0).nonzero()[0])  # the loss counts no step before it
        weight_BL = weight_BL[:, first:]
        return action_loss(self(steps, first), steps.action[:, first:], weight_BL, weight_BL.sum())

    @property
    def _lean(self) -> bool:
        """Whether only the layers' inputs may be kept for the backward pass."""
        return self.spec.layer.recompute or self.spec.layer.kind == "blockwise"

    def _embed(self, steps: Steps) -> Tensor:
        steps = self.normalise(steps)
        if self._lean and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.embedding, steps, use_reentrant=False)
        return self.embedding(steps)

    def _act(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.norm(x)))


def action_loss(
    predicted_BLA: Tensor, action_BLA: Tensor, weight_BL: Tensor, total: Tensor
) -> Tensor:
    """Mean squared action error of weighted steps, which are some of those that weigh `total`."""
    error_BL = (predicted_BLA.to(action_BLA.dtype) - action_BLA).square().mean(dim=2)
    return (error_BL * weight_BL).sum() / total
