"""The training loop, its state and its clocks."""

import math
import signal
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from agentic import checkpoint
from agentic.config import ChainConfig, TrainConfig
from agentic.console import say
from agentic.cube_model import CubeTransformer
from agentic.imitation import Imitation, accumulate, clip_gradients, ended, learning_rate
from agentic.interrupt import Interrupt
from agentic.keeping import Keeping
from agentic.layout import Layout, changed
from agentic.metrics import MetricLog, peak_memory
from agentic.migrations import MIGRATED
from agentic.model import AgenticTransformer, InUnits
from agentic.nonfinite import Skips, give_up, trace
from agentic.recovery import newest_sound
from agentic.sampler import ChainSampler
from agentic.selecting import Rollouts
from agentic.store import EpisodeStore
from agentic.stream import ChainStream
from agentic.strict import build
from parallel.collectives import all_reduce
from parallel.mesh import CUBE, CubeMesh
from parallel.sharding import Cut
from parallel.world import World

VALIDATION_BATCHES = 4


class Trainer:
    """Trains a model on chains from a store; resumable after every checkpoint, bit by bit.

    All processes of a run call the same methods in the same order. The first one alone writes,
    logs, acts and says something.

    Args:
        config: the run's settings.
        model: whole, on its device, with its units set, the same in all processes.
        store: the episodes.
        training, held_out: indices of the episodes for training and for validation.
        run_dir: for checkpoints and metrics.
        world, mesh: the processes; None: this one is alone.

    Raises:
        ValueError: the model cannot be cut over the cube.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: InUnits,
        store: EpisodeStore,
        training: np.ndarray,
        held_out: np.ndarray,
        run_dir: Path,
        *,
        world: World | None = None,
        mesh: CubeMesh | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.run_dir = run_dir
        self.world = world or World()
        self.mesh = mesh or CubeMesh()
        self.device = model.device
        self.model = model
        copies = self.mesh.sizes["dp"]
        assert config.optimizer.accumulate % copies == 0, "copies share out micro-batches"
        cuts = {name: Cut() for name, _ in model.named_parameters()}
        if self.mesh.sizes[CUBE] > 1:
            assert isinstance(model, AgenticTransformer), "no baseline is cut"
            cube = CubeTransformer(model, self.mesh, ring=config.parallel.keys == "ring")
            self.model, cuts = cube, cube.cuts
        self.layout = Layout(self.mesh, cuts) if self.world.size > 1 else None
        self.imitation = Imitation(self.model, config.precision)
        self.learner: nn.Module = self.imitation
        if copies > 1:
            self.learner = DistributedDataParallel(
                self.imitation, process_group=self.mesh.group("dp"), forward_sync_buffers=False
            )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.betas[0], config.optimizer.betas[1]),
            weight_decay=config.optimizer.weight_decay,
            fused=True,  # one pass over each parameter
        )

        def sampler(episodes: np.ndarray, chain: ChainConfig) -> ChainSampler:
            return ChainSampler(
                store,
                episodes,
                chain,
                batch_steps=config.batch_steps,
                seed=config.seed,
                context_steps=config.context_steps,
            )

        self.stream = ChainStream(
            sampler(training, config.chain),
            rank=self.mesh.place["dp"],
            ranks=copies,
            threads=config.data.prefetch,
        )
        self.held_out = len(held_out)
        self.validation: ChainSampler | None = None
        if config.chain.fits(len(held_out)):
            self.validation = sampler(held_out, replace(config.chain, window_share=0.0))
        # Imitation acts better with averaged weights than its loss lets one expect: gradient noise
        # is amplified by acting (Block et al. 2024, "Butterfly Effects of SGD Noise").
        self.averaged = AveragedModel(
            self.model, multi_avg_fn=get_ema_multi_avg_fn(config.optimizer.average)
        )
        self.step = 0
        self.keeping = Keeping(config, run_dir, self.world, self.layout)
        self.skips = Skips(config.optimizer.skip_limit)
        self.interrupt = Interrupt()
        self.log: MetricLog | None = None
        self.logged: int | None = 0  # lines of the log, where none is open
        self.rollouts = Rollouts(config, store)
        self.spent = 0.0  # seconds of training, rollouts among them
        self.updated = [0.0, 0]  # seconds and tokens of the updates since the last logged one

    def state(self) -> dict[str, Any]:
        """All that the rest of the run depends on, in plain types, with this process's parts."""
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
            # Its rates are the settings' and the step's: a run resumed at its end makes none anew.
            "optimizer": {"state": self.optimizer.state_dict()["state"]},
            "stream": self.stream.state_dict(),
            "best": self.rollouts.best,
            "rolled": self.rollouts.done,
            "spent": [self.spent, self.rollouts.spent, self.rollouts.last],
            "updated": list(self.updated),
            "skipped": [self.skips.total, self.skips.in_row],
            "logged": self.logged if self.log is None else self.log.lines,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint of this very run, as `checkpoint.load` returns it.

        Raises:
            ValueError: the data or the settings are not those of the checkpoint.
        """
        if state["data"]["quantiles"] != self.store.return_quantiles():
            raise ValueError(
                f"data_dir: got {self.store.episodes} episodes, expected the same data as before "
                f"({state['data']['episodes']} episodes); their returns differ"
            )
        before = build(TrainConfig, state["config"])
        given, own = asdict(self.config.learning), asdict(before.learning)
        changed = [k for k in given if given[k] != own[k]]
        if changed:
            raise ValueError(
                f"{changed[0]}: got {given[changed[0]]}, expected {own[changed[0]]} as in the "
                "checkpoint; a run goes on with its own settings"
            )
        self.step = state["step"]
        rollouts = self.rollouts
        rollouts.best = state["best"]
        rollouts.done = state["rolled"]
        self.spent, rollouts.spent, rollouts.last = state["spent"]
        self.updated = list(state["updated"])
        self.skips.total, self.skips.in_row = state["skipped"]
        self.logged = state["logged"]
        self.model.load_state_dict(state["model"])
        self.averaged.module.load_state_dict(state["averaged"])
        self.averaged.n_averaged.fill_(self.step - self.skips.total)
        moments = {"state": state["optimizer"]["state"]}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | moments)
        self.stream.load_state_dict(state["stream"])
        self.keeping.step = self.step

    def resume(self) -> Path:
        """Goes on from the run's newest sound checkpoint; where it lies.

        Raises:
            ValueError: there is none, or it is of other data, settings or software.
        """
        path = Path(self.world.on_main(lambda: str(newest_sound(self.run_dir, self._say))))
        state = checkpoint.load(path, self.layout, self.model)
        for told in state[MIGRATED]:
            self._say(f"{path.name} is of an older version: {told}")
        self.load_state(state)
        return path

    def train(self, log: MetricLog | None, *, progress: bool = True) -> signal.Signals | None:
        """Updates until `config.steps`; returns the signal that ended it earlier, if one did.

        A checkpoint that cannot be written is left out, but for the last one.

        Args:
            log: where numbers go; None in all processes but the first.
            progress: whether the first one shows a bar.

        Raises:
            ValueError: `optimizer.skip_limit` steps in a row were not finite.
            OSError: the last checkpoint cannot be written.
        """
        config, clocks = self.config, self.config.clocks
        self.log = log
        if self.step > 0 and self._due(clocks.histogram_steps):  # TensorBoard has forgotten them
            self._histograms()
        with (
            closing(self.stream),
            Interrupt(quiet=not self.world.main) as self.interrupt,
            tqdm(
                total=config.steps,
                initial=self.step,
                desc="training",
                unit="step",
                disable=None if progress and self.world.main else True,
            ) as bar,
        ):
            began = time.monotonic() - self.spent
            while (ended_by := self._ended()) is None:
                self.spent = time.monotonic() - began
                if self.rollouts.due(self.step):  # first: a run that ended in one begins with it
                    self._rollout()
                    continue
                if self.step == config.steps:
                    break
                updating = time.monotonic()
                measured = self.update()
                if measured is None:
                    continue
                self.updated[0] += time.monotonic() - updating
                self.updated[1] += int(measured.pop("tokens"))
                bar.set_postfix(loss=f"{measured['train/loss']:.4f}", refresh=False)
                bar.update()
                if self.skips.in_row and self.world.main:
                    self.skips.tell(
                        self.step, measured, self.stream.sampler, self._micro_batches(), self.log
                    )
                if self._due(clocks.log_steps):
                    seconds, tokens = self.updated
                    measured["train/tokens_per_second"] = tokens / seconds
                    measured["train/tokens"] = float(tokens)  # since the last such line
                    measured["train/memory_bytes"] = peak_memory(self.device)
                    measured["train/skipped_steps"] = float(self.skips.total)
                    self._scalars(measured)
                    self.updated = [0.0, 0]
                if self._due(clocks.validate_steps) and self.validation is not None:
                    validation = self.validate()
                    self._scalars({"validation/loss": validation})
                    self._say(
                        f"step {self.step}: training loss {measured['train/loss']:.4f}, "
                        f"validation loss {validation:.4f}"
                    )
                if self._due(clocks.histogram_steps):
                    self._histograms()
                if self.skips.too_many:
                    self._give_up(measured)
                if self._due(clocks.checkpoint_steps) or self.rollouts.due(self.step):
                    self.save()
            if self.keeping.step == self.step:
                self.keeping.prune()
            else:
                self.save(last=True)
            return ended_by or self._ended()  # one that came meanwhile

    def update(self) -> dict[str, float] | None:
        """One optimiser step over `accumulate` micro-batches; None where a signal came before.

        Where loss or gradients are not finite, weights, moments and average stay as they are.
        """
        config, before = self.config, self.stream.state_dict()
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        brought = accumulate(self.learner, self.model, self.stream, config, self.mesh, self._ended)
        if brought is None:
            self.stream.load_state_dict(before)
            self.optimizer.zero_grad(set_to_none=True)
            return None
        loss, tokens = brought
        norm = clip_gradients(self.model, config.optimizer.clip_norm, self.mesh)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.averaged.update_parameters(self.model)
        self.skips.count(finite)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {
            "train/loss": loss,
            "train/gradient_norm": norm,
            "train/learning_rate": rate,
            "tokens": tokens,
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Action error on chains of held-out episodes, the same ones every time."""
        assert self.validation is not None
        imitation = Imitation(self.averaged.module.eval(), self.config.precision)  # type: ignore[arg-type]
        losses = [imitation(*self.validation.batch(i)) for i in range(VALIDATION_BATCHES)]
        return float(all_reduce(torch.stack(losses).mean(), self.mesh, CUBE))

    def acting(self) -> InUnits:
        """The whole model with averaged weights, in evaluation mode: what acts and is judged."""
        averaged = self.averaged.module
        assert isinstance(averaged, InUnits)
        if not isinstance(averaged, CubeTransformer):
            return averaged.eval()
        whole = AgenticTransformer(self.model.spec).to(self.device)
        whole.load_state_dict(self._whole("averaged", averaged))
        return whole.eval()

    def save(self, *, last: bool = False) -> None:
        """Writes the checkpoint of this step; see `Keeping.save`."""
        self.keeping.save(self.state(), last=last)

    def _whole(self, key: str, model: nn.Module) -> dict[str, Tensor]:
        """The state of a model with whole tensors; all processes take part."""
        state = {key: model.state_dict()}
        return state[key] if self.layout is None else changed(state, self.layout.whole)[key]

    def _scalars(self, values: dict[str, float]) -> None:
        if self.log is not None:
            self.log.scalars(self.step, values)

    def _say(self, text: str) -> None:
        if self.world.main:
            say(text)

    def _ended(self) -> signal.Signals | None:
        return ended(self.interrupt, self.mesh, self.device)

    def _micro_batches(self) -> range:
        """Those of the last step."""
        end = self.stream.position
        return range(end - self.config.optimizer.accumulate, end)

    def _give_up(self, measured: dict[str, float]) -> None:
        """Saves, and ends a training that has left out too many steps in a row."""
        indices = self._micro_batches()
        found = trace(self.imitation, self.stream.sampler, self.config.seed, self.mesh, indices)
        told = f"step {self.step}: {self.skips.in_row} steps in a row were not finite and left out"
        self.skips.in_row = 0  # a run that goes on may try as often again
        self.save(last=True)
        self.world.on_main(lambda: give_up(self.run_dir, told, self.step, measured, found))

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _rollout(self) -> None:
        """Acts in the simulator: the first process, however long it takes, and the others wait."""
        acting = self.acting()

        def asked() -> bool:
            return self.interrupt.signal is not None

        told = self.world.on_main(
            lambda: self.rollouts.act(self.step, acting, self.spent, self.log, asked), asked
        )
        if told == "interrupted":
            return
        if told is not None and self.rollouts.beats(float(told)):
            before = self.rollouts.best
            self.rollouts.best = {"score": float(told), "step": self.step}
            if not self.keeping.save_best(self.state()):
                self.rollouts.best = before
        self.rollouts.done = self.step
        self.save()

    def _histograms(self) -> None:
        whole, log = self._whole("model", self.model), self.log
        if log is None:
            return
        for name, _ in self.model.named_parameters():
            log.histogram(self.step, f"weights/{name}", whole[name])
        steps, _ = self.stream.sampler.batch(self.stream.position)
        normal = self.model.normalise(steps.to(self.device))
        for name in ("return_to_go", "observation", "action", "reward"):
            log.histogram(self.step, f"data/{name}", getattr(normal, name))
