"""Acting with a key/value cache: milliseconds per decision of the real policy.

    python -m benchmarks.rollout --threads 1 2 --json results.json

A decision is one environment step of all contexts, through `Policy`; the simulator is not in it.
Every context holds random keys and values, and goes back to its length after each decision. Beside
it, from the same rounds:

- the floor: the bytes of all keys and values by the rate at which a large tensor is summed;
- SDPA: the same model with `F.scaled_dot_product_attention` on a cache (1, H, S, K), one context
  after the other, as a PyTorch user writes it;
- encoding the whole context again, which is measured on short ones and extrapolated by
  a·S + b·S².
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from scipy.optimize import nnls
from torch import Tensor

from agentic.config import LayerConfig, ModelConfig, TokensConfig
from agentic.model import AgenticTransformer, ModelSpec
from agentic.policy import Policy
from agentic.tokens import TOKENS_PER_STEP, Steps
from benchmarks import measure
from benchmarks.report import Report, mb, number
from benchmarks.whole_model import draw_steps
from envs import TASKS

DEVICE = torch.device("cpu")
SUMMED = 2**29  # bytes


def make_spec(layout: str) -> ModelSpec:
    """The default model on walker_walk."""
    task = TASKS["walker_walk"]
    return ModelSpec(
        tasks=(task.name,),
        observation_size=task.observation_size,
        action_size=task.action_size,
        episode_steps=task.episode_steps,
        trajectories=9,
        tokens=TokensConfig(
            layout=layout,
            past_action="keep",
            past_reward="keep",
            dropout=0.0,
            trajectory_embedding=False,
        ),
        model=ModelConfig(**OmegaConf.load(str(files("configs") / "model/small.yaml"))),
        layer=LayerConfig(kind="memory_efficient", recompute=False),
    )


@dataclass
class PlainCache:
    """One layer's keys and values, (contexts, H, capacity, K)."""

    key: Tensor
    value: Tensor
    length: int = 0


class SdpaModel(AgenticTransformer):
    """The same model, decoding as a PyTorch user writes it."""

    def caches(  # type: ignore[override]  # noqa: D102
        self, contexts: int, env_steps: int, dtype: torch.dtype = torch.float32
    ) -> list[PlainCache]:
        size = self.spec.layer_size()
        shape = (contexts, size.heads, env_steps * self.spec.tokens_per_step, size.head_width)
        return [PlainCache(*torch.randn(2, *shape, dtype=dtype)) for _ in self.layers]

    @torch.no_grad()
    def decode(  # type: ignore[override]  # noqa: D102
        self, previous: Steps | None, current: Steps, caches: list[PlainCache]
    ) -> Tensor:
        before = None if previous is None else self.normalise(previous)
        new_BSD = self.embedding.next(before, self.normalise(current))
        outs = []
        for context, x in enumerate(new_BSD.split(1)):
            for layer, cache in zip(self.layers, caches, strict=True):
                x = self._layer(layer, x, cache, slice(context, context + 1))
            outs.append(x[:, -1])
        for cache in caches:
            cache.length += new_BSD.shape[1]
        return self._act(torch.cat(outs))

    def _layer(self, layer: Any, x: Tensor, cache: PlainCache, context: slice) -> Tensor:
        new, end = x.shape[1], cache.length + x.shape[1]
        parts = layer.query_key_value(layer.norm_attention(x)).chunk(3, dim=2)
        heads = cache.key.shape[1]
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in parts)
        cache.key[context, :, cache.length : end] = k
        cache.value[context, :, cache.length : end] = v
        mask = None if new == 1 else torch.ones(new, end, dtype=torch.bool).tril(cache.length)
        out = F.scaled_dot_product_attention(
            q, cache.key[context, :, :end], cache.value[context, :, :end], attn_mask=mask
        )
        x = x + layer.output(out.transpose(1, 2).flatten(2))
        return x + layer.down(F.relu(layer.up(layer.norm_feed_forward(x))))


class Rollout:
    """A policy whose contexts are `tokens` long, decision after decision."""

    def __init__(self, model: AgenticTransformer, caches: list, contexts: int, tokens: int) -> None:
        spec = model.spec
        self.policy = Policy(model, np.zeros(contexts, int), trials=0)
        self.policy.caches = caches
        self.tokens = tokens
        rng = np.random.default_rng(0)
        self.observation = rng.standard_normal((contexts, spec.observation_size), np.float32)
        self.reward = rng.random(contexts, np.float32)

    def decide(self) -> None:
        """One environment step."""
        policy = self.policy
        for cache in policy.caches:
            cache.length = self.tokens
        if policy.timestep % policy.model.spec.episode_steps == 0:
            policy.begin_trial()
        action = policy.act(self.observation, self.reward)
        policy.record(action, self.reward, np.zeros_like(self.reward))


def encoding(model: AgenticTransformer, lengths: Sequence[int]) -> tuple[list[float], np.ndarray]:
    """Seconds of encoding one context of these lengths for its last action, and (a, b)."""
    steps = draw_steps(model.spec)
    seconds = []
    for tokens in lengths:
        L = tokens // model.spec.tokens_per_step
        part = Steps(
            **{
                f.name: steps.task if f.name == "task" else getattr(steps, f.name)[:, :L]
                for f in fields(Steps)
            }
        )
        with torch.no_grad():
            call: Callable[[], Tensor] = lambda part=part, L=L: model(part, L - 1)  # noqa: E731
            call()
            seconds.append(statistics.median(measure.seconds(call, DEVICE) for _ in range(3)))
    S = np.array(lengths, float)
    relative = np.stack([S, S**2], axis=1) / np.array(seconds)[:, None]
    return seconds, nnls(relative, np.ones(len(S)))[0]


def rollouts(
    tokens: int, settings: argparse.Namespace, encoded: dict[str, np.ndarray]
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Rows and measurements of one length of context."""
    contexts = settings.contexts
    found: dict[str, Rollout] = {}
    shared: dict[str, list] = {}
    room = {layout: tokens // TOKENS_PER_STEP[layout] + 2 for layout in settings.layouts}
    for layout in settings.layouts:
        for kind, build in (("ours", AgenticTransformer), ("SDPA", SdpaModel)):
            torch.manual_seed(0)
            model = build(make_spec(layout)).eval()
            for name in settings.caches if kind == "ours" else ["fp32"]:
                if f"{kind} {name}" not in shared:  # both layouts read the same keys and values
                    most = max(room.values(), key=lambda steps: steps * model.spec.tokens_per_step)
                    shared[f"{kind} {name}"] = model.caches(contexts, most, measure.DTYPES[name])
                    if kind == "ours":
                        for cache in shared[f"{kind} {name}"]:
                            cache.key_PNCK.normal_()
                            cache.value_PNCK.normal_()
                caches = shared[f"{kind} {name}"]
                found[f"{layout} {kind} {name}"] = Rollout(model, caches, contexts, tokens)
    summed = torch.ones(SUMMED // 4)
    contenders = {name: measure.Turns(rollout.decide, DEVICE) for name, rollout in found.items()}
    contenders["sum"] = measure.Turns(summed.sum, DEVICE)
    taken = measure.interleave(contenders, settings.rounds)
    rows, measured = [], []
    size = make_spec(settings.layouts[0])
    for layout in settings.layouts:
        again = contexts * float(encoded[layout] @ [tokens, tokens**2])
        for name in settings.caches:
            times = taken[f"{layout} ours {name}"]
            width = measure.DTYPES[name].itemsize
            nbytes = 2 * size.model.layers * size.model.width * width * tokens * contexts
            floors = [nbytes * seconds / SUMMED for seconds in taken["sum"]]
            middle = statistics.median(times)
            sdpa = taken[f"{layout} SDPA fp32"]
            rows.append(
                {
                    "layout": layout,
                    "tokens": f"{tokens:,}",
                    "cache": name,
                    "keys, values MB": mb(nbytes),
                    "ms a decision": number(1e3 * middle),
                    "ms a context": number(1e3 * middle / contexts),
                    "env steps/s": number(contexts / middle),
                    "floor ms": number(1e3 * statistics.median(floors)),
                    "x floor": number(measure.ratio(times, floors)),
                    "SDPA fp32 ms": number(1e3 * statistics.median(sdpa)),
                    "SDPA / ours": number(measure.ratio(sdpa, times)),
                    "encoding again ms, extrapolated": number(1e3 * again),
                    "again / ours": number(again / middle),
                }
            )
            measured.append(
                {
                    "layout": layout,
                    "tokens": tokens,
                    "cache": name,
                    "bytes": nbytes,
                    "rounds": times,
                    "floor_rounds": floors,
                    "sdpa_rounds": sdpa,
                    "encoding_again_seconds": again,
                }
            )
    return rows, {"measured": measured}


def main(argv: Sequence[str] | None = None) -> None:
    """One table for every number of threads."""
    parser = measure.arguments(__doc__, rounds=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--layouts", nargs="+", choices=TOKENS_PER_STEP, default=[*TOKENS_PER_STEP])
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--caches", nargs="+", choices=measure.DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--encoded", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    settings = parser.parse_args(argv)
    measure.pin(max(settings.threads))
    report = Report(settings.json, **vars(settings))
    for threads in settings.threads:
        measure.pin(threads)
        seconds, encoded = {}, {}
        for layout in settings.layouts:
            measure.log(f"encoding contexts of {settings.encoded} tokens, {layout} layout")
            model = AgenticTransformer(make_spec(layout)).eval()
            seconds[layout], encoded[layout] = encoding(model, settings.encoded)
        rows: list[dict[str, str]] = []
        measured: list[dict[str, Any]] = []
        for tokens in settings.lengths:
            measure.log(f"{settings.contexts} contexts of {tokens:,} tokens, {threads} thread(s)")
            more, about = rollouts(tokens, settings, encoded)
            rows += more
            measured += about["measured"]
            gc.collect()
        report.case(
            f"A decision for {settings.contexts} contexts, {threads} thread(s)",
            rows,
            {"threads": threads, "encoding_seconds": seconds, "rollouts": measured},
        )


if __name__ == "__main__":
    main()
