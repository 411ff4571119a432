"""Small fake data and models; everything random is seeded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from agentic.config import LayerConfig, ModelConfig, TokensConfig
from agentic.episodes import Episode, buffer_dir, write_episode
from agentic.methods import fresh_model
from agentic.model import AgenticTransformer, InUnits, ModelSpec
from agentic.store import EpisodeStore, in_memory
from agentic.tokens import Steps
from envs import TASKS, TaskSpec


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the soak takes."""
    parser.addoption("--soak-minutes", type=float, default=30.0, help="of the slow test_soak.py")


@pytest.fixture
def soak_minutes(request: pytest.FixtureRequest) -> float:
    """All sessions' training together."""
    return request.config.getoption("--soak-minutes")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors on many threads only wait for each other."""
    torch.set_num_threads(1)


def make_episode(spec: TaskSpec, seed: int, steps: int | None = None) -> Episode:
    """Right shapes and row 0, random content."""
    rng = np.random.default_rng(seed)
    rows = (spec.episode_steps if steps is None else steps) + 1
    action = rng.uniform(-1, 1, (rows, spec.action_size)).astype(np.float32)
    action[0] = 0
    reward = rng.uniform(0, 1, (rows, 1)).astype(np.float32)
    reward[0] = 0
    return Episode(
        observation=rng.standard_normal((rows, spec.observation_size)).astype(np.float32),
        action=action,
        reward=reward,
        discount=np.ones((rows, 1), np.float32),
        physics=rng.standard_normal((rows, spec.physics_size)),
    )


@pytest.fixture
def cartpole_data(tmp_path: Path) -> Path:
    """A data_dir with 12 random cartpole episodes in `td3`."""
    spec = TASKS["cartpole_swingup"]
    directory = buffer_dir(tmp_path / "data", "cartpole", "td3")
    directory.mkdir(parents=True)
    for i in range(12):
        write_episode(directory / f"episode_{i:06d}_1000.npz", make_episode(spec, i))
    return tmp_path / "data"


def make_store(returns: list[float], steps: int = 4, tasks: int = 1) -> EpisodeStore:
    """A store whose episode e earns returns[e] in equal parts; values name their place."""
    E, O, A = len(returns), 3, 2
    specs = tuple(TASKS.values())[:tasks]
    reward_KET = np.empty((tasks, E, steps), np.float32)
    for k in range(tasks):  # every further task turns the ranking round
        reward_KET[k] = (np.array(returns) * (-1) ** k / steps)[:, None]
    place = np.arange(E * steps, dtype=np.float32).reshape(E, steps, 1)
    return in_memory(
        specs,
        observation_ETO=np.repeat(place, O, axis=2),
        action_ETA=np.repeat(place / (E * steps), A, axis=2),
        reward_KET=reward_KET,
    )


def make_model(seed: int = 0, *, layer_dropout: float = 0.0, **changes: object) -> InUnits:
    """A small model of episodes of 5 steps; `changes` go to the config that has the field.

    `dropout` is that of the tokens, `layer_dropout` that of the layers.
    """
    fields: dict[str, dict] = {
        "tokens": {
            "layout": "step",
            "past_action": "keep",
            "past_reward": "keep",
            "dropout": 0.5,
            "trajectory_embedding": False,
            "timestep_embedding": True,
            "task_embedding": True,
        },
        "model": {"layers": 2, "width": 16, "heads": 2, "feed_forward": 2},
        "layer": {
            "kind": "memory_efficient",
            "recompute": False,
            "block_query": None,
            "block_key": None,
            "block_rows": None,
        },
        "spec": {
            "tasks": ("cartpole_swingup",),
            "observation_size": 3,
            "action_size": 2,
            "episode_steps": 5,
            "trajectories": 3,
            "method": "at",
            "context_steps": None,
        },
    }
    for name, value in changes.items():
        group = next(g for g in fields.values() if name in g)
        group[name] = value
    torch.manual_seed(seed)
    spec = ModelSpec(
        tokens=TokensConfig(**fields["tokens"]),
        model=ModelConfig(**fields["model"], dropout=layer_dropout),
        layer=LayerConfig(**fields["layer"]),
        **fields["spec"],
    )
    model = fresh_model(spec)
    if isinstance(model, AgenticTransformer):
        # Parameters that start at zero would hide what depends on them.
        torch.nn.init.normal_(model.embedding.completion.weight)
    return model.eval()


@pytest.fixture
def random_steps() -> Callable[..., Steps]:
    """Makes B chains of N trajectories of T steps with random content."""

    def make(B: int, N: int, T: int, seed: int = 0, tasks: int = 1) -> Steps:
        g = torch.Generator().manual_seed(seed)
        L = N * T
        completion = torch.zeros(B, L)
        completion[:, T - 1 :: T] = 1.0
        return Steps(
            return_to_go=torch.rand(B, L, generator=g),
            observation=torch.randn(B, L, 3, generator=g),
            action=torch.rand(B, L, 2, generator=g) * 2 - 1,
            reward=torch.rand(B, L, generator=g),
            completion=completion,
            timestep=torch.arange(T).repeat(N).expand(B, L),
            trajectory=torch.arange(N).repeat_interleave(T).expand(B, L),
            task=torch.arange(B) % tasks,
            valid=torch.ones(B, L, dtype=torch.bool),
        )

    return make
