"""Verification of stored episodes: are they unchanged, and does the simulator agree with them?"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agentic.flat import FlatStore
from agentic.relabel import MODES, changed_rewards
from envs import TaskSpec, domain_tasks, reward
from envs.simulator import Simulator

MEANING = """\
state after one step: from every stored state the stored action is taken; largest \
difference from the next stored state, over positions and velocities
state, open loop: the same, with all actions played from the first state on, never corrected
observation: of every stored state, computed again (jaco's torques: of the step that led there)
reward: the simulator's own, against the one computed from the stored state
All are rounding (below 1e-6; cheetah's open loop up to 1e-3) for this very MuJoCo. Data of an \
older one differ a little after one step, and open loop amplifies that up to another movement: no \
fault, training reads the stored states. Large differences of observations or rewards mean files \
of another task or layout."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Absolute differences between an episode of T steps and the simulator, for K tasks.

    Attributes:
        one_step: (T,) state reached from every stored state, largest over its P entries.
        open_loop: (T,) state reached from the first one, largest over its P entries.
        observation: (T,) computed again from the stored states, largest over its O entries.
        reward: (K, T) the simulator's own less the relabelled one.
    """

    one_step: np.ndarray
    open_loop: np.ndarray
    observation: np.ndarray
    reward: np.ndarray


def changed_rows(flat: FlatStore) -> list[int]:
    """The rows in use whose content no longer has the checksum that it was stored with."""
    changed = []
    for row in tqdm(flat.rows.values(), desc="checksums", disable=None, leave=False):
        if flat.row_checksum(row) != flat.index.checksums[row]:
            changed.append(row)
        flat.release()
    return changed


def spread(rows: list[int], count: int) -> list[int]:
    """`count` of the rows, evenly from the first to the last; all of them if there are fewer."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return [rows[place] for place in places.round().astype(int)]


def replay(
    simulators: list[Simulator], observation: np.ndarray, action: np.ndarray, physics: np.ndarray
) -> Replay:
    """Plays one stored episode again.

    Args:
        simulators: one for each of the K tasks; they differ in nothing but what they pay for.
        observation: (T+1, O); row 0 is the reset.
        action: (T+1, A); action[t] led to observation[t].
        physics: (T+1, P) float64.
    """
    first, T = simulators[0], len(action) - 1
    first.begin(physics[0])
    reached_TP = np.array([first.step(a) for a in action[1:]])
    open_loop_T = np.abs(reached_TP - physics[1:]).max(axis=1)

    one_step_T, observation_T = np.empty(T), np.empty(T)
    live_KT = np.empty((len(simulators), T))
    first.begin(physics[0])
    for t in range(T):
        reached_P = first.step(action[t + 1])
        one_step_T[t] = np.abs(reached_P - physics[t + 1]).max()
        for k, simulator in enumerate(simulators):
            simulator.place(physics[t + 1], action[t + 1])
            live_KT[k, t] = simulator.reward()
        observation_T[t] = np.abs(first.observation() - observation[t + 1]).max()
    relabelled_KT = [
        reward(s.task.name, observation=observation[1:], action=action[1:], physics=physics[1:])
        for s in simulators
    ]
    return Replay(
        one_step=one_step_T,
        open_loop=open_loop_T,
        observation=observation_T,
        reward=np.abs(live_KT - relabelled_KT),
    )


def verify(flat: FlatStore, episodes: int, console: Console) -> bool:
    """Checks every row and its rewards, plays `episodes` again, and prints what was found.

    Returns:
        Whether all checksums and rewards are right; differences from the simulator are only
        reported.
    """
    title = f"{flat.index.domain}/{flat.index.algorithm}"
    changed = set(changed_rows(flat))
    for row in sorted(changed):
        console.print(f"{title}: row {row}, {flat.index.names[row]}, is not what was stored")
    sound = [row for row in flat.rows.values() if row not in changed]
    console.print(f"{title}: {len(sound):,} of {len(flat.rows):,} checksums are right")
    specs = domain_tasks(flat.index.domain)
    wrong = [
        (spec, mode, row)
        for spec in specs
        for mode in MODES
        for row in changed_rewards(flat, spec, mode)
    ]
    for spec, mode, row in wrong:
        name = flat.index.names[row]
        console.print(f"{title}: row {row}, {name}, has other rewards of {spec.name}, {mode}")
    rows = spread(sound, episodes)
    if rows:
        simulators = [Simulator(spec.name) for spec in specs]
        replays = [
            replay(simulators, *(flat.arrays[name][row] for name in _REPLAYED))
            for row in tqdm(rows, desc="playing again", disable=None, leave=False)
        ]
        for simulator in simulators:
            simulator.close()
        console.print(_table(f"{title}: {len(rows)} episodes played again", specs, replays))
    return not (changed or wrong)


_REPLAYED = ("observation", "action", "physics")


def _table(title: str, specs: tuple[TaskSpec, ...], replays: list[Replay]) -> Table:
    table = Table(title=title)
    table.add_column("difference from the simulator")
    table.add_column("median", justify="right")
    table.add_column("max", justify="right")

    def add(name: str, values: Iterable[np.ndarray]) -> None:
        joined = np.concatenate(list(values))
        table.add_row(name, f"{np.median(joined):.1e}", f"{joined.max():.1e}")

    add("state after one step", (r.one_step for r in replays))
    add("state, open loop", (r.open_loop for r in replays))
    add("observation", (r.observation for r in replays))
    for k, spec in enumerate(specs):
        add(f"reward of {spec.name}", (r.reward[k] for r in replays))
    return table
