"""Chain of hindsight: trajectories from worst to best, all told to reach the best one's return.

Pure numpy functions. Axes: N trajectories of a chain, T steps. Source: Liu & Abbeel, "Emergent
Agentic Transformer from Chain of Hindsight Experience" (ICML 2023).
"""

import numpy as np


def ascending(returns_N: np.ndarray) -> np.ndarray:
    """Order of the trajectories, worst first; equal returns keep their order."""
    return np.argsort(returns_N, kind="stable")


def returns_to_go(reward_NT: np.ndarray, target: float | np.ndarray) -> np.ndarray:
    """R̂_0 = target for every trajectory, R̂_{t+1} = R̂_t - r_t, undiscounted.

    Args:
        reward_NT: reward of the step taken at t.
        target: the chain's target return, its best trajectory's; or one for each, (N, 1).

    Returns:
        (N, T) float64. The best trajectory's runs down towards its last reward, a worse one's
        ends above it by (target - its return).
    """
    earned_NT = np.cumsum(reward_NT, axis=-1, dtype=np.float64)
    return target - np.concatenate([np.zeros_like(earned_NT[..., :1]), earned_NT[..., :-1]], -1)


def completion(returns_N: np.ndarray, target: float, steps: int) -> np.ndarray:
    """d: 1 at the last step of a trajectory whose return reaches the target, 0 elsewhere.

    Returns:
        (N, T) float32.
    """
    d_NT = np.zeros((len(returns_N), steps), dtype=np.float32)
    d_NT[:, -1] = returns_N >= target
    return d_NT


def loss_weights(
    returns_N: np.ndarray, steps: int, loss_on: str, least: float | np.ndarray
) -> np.ndarray:
    """Which steps' actions the loss counts, of one chain or of several, (..., N).

    Args:
        returns_N: of the trajectories, the best last.
        steps: T, of each.
        loss_on: last: the best trajectory; all; top: the best and all that return at least `least`.
        least: one number, or one for each chain, (..., 1).

    Returns:
        (..., N, T) float32 of zeros and ones.
    """
    least = {"last": np.inf, "top": least, "all": -np.inf}[loss_on]
    counts_N = returns_N >= least
    counts_N[..., -1] = True
    return np.repeat(counts_N[..., None], steps, axis=-1).astype(np.float32)
