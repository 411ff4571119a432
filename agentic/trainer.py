"""The training loop, its state and its clocks."""

import math
import resource
import signal
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from agentic import checkpoint
from agentic.config import TrainConfig
from agentic.evaluator import Interrupted
from agentic.interrupt import Interrupt
from agentic.metrics import MetricLog
from agentic.model import AgenticTransformer
from agentic.sampler import ChainSampler
from agentic.selecting import score_of, trial_scalars
from agentic.store import EpisodeStore
from agentic.stream import ChainStream
from agentic.strict import build
from agentic.tokens import Steps

VALIDATION_BATCHES = 4


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to `final_fraction`; for the update that makes step + 1."""
    optimizer = config.optimizer
    warm = min(1.0, (step + 1) / max(1, optimizer.warmup_steps))
    past = max(0, step - optimizer.warmup_steps) / max(1, config.steps - optimizer.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * past))
    floor = optimizer.final_fraction
    return optimizer.learning_rate * warm * (floor + (1 - floor) * cosine)


def action_loss(predicted_BLA: Tensor, action_BLA: Tensor, weight_BL: Tensor) -> Tensor:
    """Mean squared action error over the weighted steps."""
    error_BL = (predicted_BLA.float() - action_BLA).square().mean(dim=2)
    return (error_BL * weight_BL).sum() / weight_BL.sum()


class Trainer:
    """Trains a model on chains from a store; resumable after every checkpoint, bit by bit.

    Args:
        config: the run's settings.
        model: on its device, with its units set.
        store: the episodes.
        training, held_out: indices of the episodes for training and for validation.
        run_dir: for checkpoints and metrics.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: AgenticTransformer,
        store: EpisodeStore,
        training: np.ndarray,
        held_out: np.ndarray,
        run_dir: Path,
    ) -> None:
        self.config = config
        self.model = model
        self.store = store
        self.run_dir = run_dir
        self.device = model.head.weight.device
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.betas[0], config.optimizer.betas[1]),
            weight_decay=config.optimizer.weight_decay,
        )
        accumulate = config.optimizer.accumulate
        sampler = ChainSampler(
            store,
            training,
            config.chain,
            batch_steps=config.batch_steps,
            seed=config.seed,
            window_batches=round(config.steps * config.chain.window_fraction) * accumulate,
        )
        self.stream = ChainStream(sampler, threads=config.data.prefetch)
        self.held_out = len(held_out)
        self.validation: ChainSampler | None = None
        if len(held_out) >= config.chain.trajectories:
            self.validation = ChainSampler(
                store,
                held_out,
                replace(config.chain, window_share=0.0),
                batch_steps=config.batch_steps,
                seed=config.seed,
            )
        # Imitation acts better with averaged weights than its loss lets one expect: gradient noise
        # is amplified by acting (Block et al. 2024, "Butterfly Effects of SGD Noise").
        self.averaged = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(config.optimizer.average)
        )
        self.step = 0
        self.best: dict[str, Any] | None = None
        self.rolled = 0  # the last step whose rollouts are done, or were left out
        self.spent = 0.0  # seconds of training, rollouts among them
        self.spent_rolling = 0.0
        self.last_rollout = 0.0  # seconds

    def state(self) -> dict[str, Any]:
        """All that the rest of the run depends on, in plain types."""
        rng: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "step": self.step,
            "spec": self.model.spec.to_dict(),
            "config": asdict(self.config),
            "data": {
                "episodes": self.store.episodes,
                "quantiles": self.store.return_quantiles(),
                "returns": torch.from_numpy(self.store.returns),  # (tasks, episodes)
            },
            "model": self.model.state_dict(),
            "averaged": self.averaged.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "torch_rng": rng,
            "best": self.best,
            "rolled": self.rolled,
            "spent": [self.spent, self.spent_rolling, self.last_rollout],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint of this very run.

        Raises:
            ValueError: the data or the settings are not those of the checkpoint.
        """
        if state["data"]["quantiles"] != self.store.return_quantiles():
            raise ValueError(
                f"data_dir: got {self.store.episodes} episodes, expected the same data as before "
                f"({state['data']['episodes']} episodes); their returns differ"
            )
        # Settings that are newer than the checkpoint have their defaults there.
        before = build(TrainConfig, state["config"])
        given, own = asdict(self.config.learning), asdict(before.learning)
        changed = [k for k in given if given[k] != own[k]]
        if changed:
            raise ValueError(
                f"{changed[0]}: got {given[changed[0]]}, expected {own[changed[0]]} as in the "
                "checkpoint; a run goes on with its own settings"
            )
        self.step = state["step"]
        self.best = state["best"]
        # Checkpoints from before these were kept: nothing is repeated.
        self.rolled = state.get("rolled", self.step)
        self.spent, self.spent_rolling, self.last_rollout = state.get("spent", (0.0, 0.0, 0.0))
        self.model.load_state_dict(state["model"])
        self.averaged.module.load_state_dict(state["averaged"])
        self.averaged.n_averaged.fill_(self.step)
        self.optimizer.load_state_dict(state["optimizer"])
        # Checkpoints from before there was a stream had taken so many.
        taken = self.step * self.config.optimizer.accumulate
        self.stream.load_state_dict(state.get("stream", {"position": taken}))
        torch.set_rng_state(state["torch_rng"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["torch_rng"]:
            torch.cuda.set_rng_state(state["torch_rng"]["cuda"], self.device)

    def train(self, log: MetricLog, *, progress: bool = True) -> signal.Signals | None:
        """Updates until `config.steps`; returns the signal that ended it earlier, if one did."""
        config, clocks = self.config, self.config.clocks
        seconds, tokens = 0.0, 0
        with (
            closing(self.stream),
            Interrupt() as interrupt,
            tqdm(
                total=config.steps,
                initial=self.step,
                desc="training",
                unit="step",
                disable=None if progress else True,
            ) as bar,
        ):
            began = time.monotonic() - self.spent
            while interrupt.signal is None:
                self.spent = time.monotonic() - began
                if self._rollout_due():  # first: a run that ended in one begins with it again
                    self._rollout(log, bar, interrupt)
                    continue
                if self.step == config.steps:
                    break
                updating = time.monotonic()
                measured = self.update()
                seconds += time.monotonic() - updating
                tokens += int(measured.pop("tokens"))
                bar.set_postfix(loss=f"{measured['train/loss']:.4f}", refresh=False)
                bar.update()
                if self._due(clocks.log_steps):
                    measured["train/tokens_per_second"] = tokens / seconds
                    measured["train/memory_bytes"] = _memory(self.device)
                    log.scalars(self.step, measured)
                    seconds, tokens = 0.0, 0
                if self._due(clocks.validate_steps) and self.validation is not None:
                    validation = self.validate()
                    log.scalars(self.step, {"validation/loss": validation})
                    bar.write(
                        f"step {self.step}: training loss {measured['train/loss']:.4f}, "
                        f"validation loss {validation:.4f}"
                    )
                if self._due(clocks.histogram_steps):
                    self._histograms(log)
                if self._due(clocks.checkpoint_steps) or self._rollout_due():
                    self.save()
        if not checkpoint.step_path(self.run_dir, self.step).exists():
            self.save()
        return interrupt.signal

    def update(self) -> dict[str, float]:
        """One optimiser step over `accumulate` micro-batches."""
        rate = learning_rate(self.step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        accumulate = self.config.optimizer.accumulate
        loss, tokens = 0.0, 0
        for _ in range(accumulate):
            steps, weight_BL = next(self.stream)
            tokens += int(steps.valid.sum()) * self.model.spec.tokens_per_step
            batch_loss = self._loss(self.model, steps, weight_BL) / accumulate
            batch_loss.backward()
            loss += batch_loss.item()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.optimizer.clip_norm
        )
        if not math.isfinite(loss) or not norm.isfinite():
            raise ValueError(
                f"step {self.step}: loss {loss} with gradient norm {float(norm)}, expected finite "
                f"values; the checkpoints up to here are sound (optimizer.learning_rate={rate:.3g})"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.averaged.update_parameters(self.model)
        self.step += 1
        return {
            "train/loss": loss,
            "train/gradient_norm": float(norm),
            "train/learning_rate": rate,
            "tokens": tokens,
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Action error on chains of held-out episodes, the same ones every time."""
        assert self.validation is not None
        acting = self.acting()
        batches = [self.validation.batch(i) for i in range(VALIDATION_BATCHES)]
        return float(np.mean([self._loss(acting, *batch).item() for batch in batches]))

    def acting(self) -> AgenticTransformer:
        """The model with averaged weights, in evaluation mode: what acts and is judged."""
        return self.averaged.module.eval()  # type: ignore[return-value]

    def save(self) -> None:
        """Writes the checkpoint of this step and removes those beyond `keep_checkpoints`."""
        checkpoint.save(checkpoint.step_path(self.run_dir, self.step), self.state())
        for old in checkpoint.step_files(self.run_dir)[: -self.config.keep_checkpoints]:
            old.unlink()

    def _loss(self, model: AgenticTransformer, steps: Steps, weight_BL: Tensor) -> Tensor:
        first = int(weight_BL.any(dim=0).nonzero()[0])  # the loss counts no step before it
        steps, weight_BL = steps.to(self.device), weight_BL.to(self.device)
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"
        ):
            predicted_BLA = model(steps, first)
        return action_loss(predicted_BLA, steps.action[:, first:], weight_BL[:, first:])

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _rollout_due(self) -> bool:
        clocks, steps = self.config.clocks, self.config.steps
        late = self.step >= clocks.rollout_from * steps
        return (
            clocks.rollout_steps > 0
            and late
            and self.step > self.rolled
            and (self._due(clocks.rollout_steps) or self.step == steps)
        )

    def _rollout(self, log: MetricLog, bar: tqdm, interrupt: Interrupt) -> None:
        """Acts in the simulator, unless that would take more than its share of the time so far.

        The first and the last step's rollouts are never left out.
        """
        more, most = self.last_rollout, self.config.clocks.rollout_share
        share = (self.spent_rolling + more) / (self.spent + more)
        if share > most and self.step < self.config.steps:
            bar.write(
                f"step {self.step}: no rollouts, they would take {share:.0%} of the time so far "
                f"(clocks.rollout_share={most})"
            )
        else:
            began = time.monotonic()
            try:
                self._act(log, bar, interrupt)
            except Interrupted:
                return
            self.last_rollout = time.monotonic() - began
            self.spent_rolling += self.last_rollout
        self.rolled = self.step
        self.save()

    def _act(self, log: MetricLog, bar: tqdm, interrupt: Interrupt) -> None:
        """Keeps the best model by the last trial's return over the dataset's best."""
        score, by_task = score_of(
            self.acting(), self.store, self.config, lambda: interrupt.signal is not None
        )
        for name, returns_CN in by_task.items():
            log.scalars(self.step, trial_scalars(f"rollout/{name}", returns_CN))
            told = "  ".join(f"{m:.1f}" for m in returns_CN.mean(axis=0))
            bar.write(f"step {self.step}: {name} trial by trial {told}")
        if self.best is None or score >= self.best["score"]:
            self.best = {"score": score, "step": self.step}
            checkpoint.save(self.run_dir / "checkpoints" / checkpoint.BEST, self.state())

    def _histograms(self, log: MetricLog) -> None:
        for name, parameter in self.model.named_parameters():
            log.histogram(self.step, f"weights/{name}", parameter)
        steps, _ = self.stream.sampler.batch(self.stream.position)
        normal = self.model.normalise(steps.to(self.device))
        for name in ("return_to_go", "observation", "action", "reward"):
            log.histogram(self.step, f"data/{name}", getattr(normal, name))


def _memory(device: torch.device) -> float:
    """Peak bytes so far: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)
