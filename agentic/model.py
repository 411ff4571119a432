"""The Agentic Transformer: token embedding, layers of `parallel`, an action head."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from agentic.config import LayerConfig, ModelConfig, TokensConfig
from agentic.tokens import ACTION_READ_AT, TOKENS_PER_STEP, Steps, TokenEmbedding
from parallel import KVCache, LayerSize, TransformerLayer


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

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one environment step takes in this layout."""
        return TOKENS_PER_STEP[self.tokens.layout]

    def layer_size(self) -> LayerSize:
        """The layers' widths as `parallel` takes them."""
        return LayerSize(
            width=self.model.width,
            heads=self.model.heads,
            feed_forward=self.model.feed_forward * self.model.width,
            dropout=self.model.dropout,
        )

    def to_dict(self) -> dict:
        """Plain types, for a checkpoint."""
        return dataclasses.asdict(self)


class AgenticTransformer(nn.Module):
    """Predicts every step's action from all that came before it in the chain.

    The normalisation of observations and the return scale of each task are buffers, so that a
    checkpoint acts in the units it was trained in.
    """

    observation_mean: Tensor
    observation_std: Tensor
    return_scale: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
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
                spec.layer_size(), kind=spec.layer.kind, recompute=spec.layer.recompute
            )
            for _ in range(spec.model.layers)
        )
        self.norm = nn.LayerNorm(spec.model.width)
        self.head = nn.Linear(spec.model.width, spec.action_size)
        self.register_buffer("observation_mean", torch.zeros(spec.observation_size))
        self.register_buffer("observation_std", torch.ones(spec.observation_size))
        self.register_buffer("return_scale", torch.ones(len(spec.tasks)))

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

    def forward(self, steps: Steps) -> Tensor:
        """Actions (B, L, A) in (-1, 1) for raw `steps`; a_t sees nothing later than s_t."""
        x_BSD = self.embedding(self.normalise(steps))
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        layout = self.spec.tokens.layout
        return self._act(x_BSD[:, ACTION_READ_AT[layout] :: TOKENS_PER_STEP[layout]])

    @torch.no_grad()
    def decode(self, previous: Steps | None, current: Steps, caches: list[KVCache]) -> Tensor:
        """The action (B, A) for one more step of each context; its tokens join the caches."""
        before = None if previous is None else self.normalise(previous)
        x_BSD = self.embedding.next(before, self.normalise(current))
        for layer, cache in zip(self.layers, caches, strict=True):
            x_BSD = layer.decode(x_BSD, cache)  # type: ignore[operator]
        return self._act(x_BSD[:, -1])

    def caches(self, contexts: int, env_steps: int) -> list[KVCache]:
        """Empty key/value caches, one a layer, for `contexts` contexts of `env_steps` steps."""
        size = self.spec.layer_size()
        return [
            KVCache(
                batch=contexts,
                heads=size.heads,
                capacity=env_steps * self.spec.tokens_per_step,
                head_width=size.head_width,
                device=self.head.weight.device,
            )
            for _ in self.layers
        ]

    def parameter_count(self) -> int:
        """Trainable numbers."""
        return sum(p.numel() for p in self.parameters())

    def _act(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(self.norm(x)))
