"""agentic-reproduce: every row on every task with every seed, as jobs that resume, and a report."""

import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from agentic.entry import Terminated, run
from agentic.interrupt import Interrupt
from agentic.jobs import ReproduceConfig, check_settings, data_jobs, train_jobs
from agentic.launch import Launcher, command_line
from agentic.report import write_report
from agentic.strict import build


def command(values: dict[str, Any]) -> None:
    """Runs what is not finished, then reports what is."""
    config = build(ReproduceConfig, values)
    console = Console(markup=False, emoji=False)
    if not config.report:
        check_settings(config)
    if config.plan:
        _print_plan(config)
        return
    failed = [] if config.report else _run_jobs(config, console)
    output = Path(config.output)
    if config.report or any(job.finished() for job in train_jobs(config)):
        write_report(output, config.tasks, console)
    for line in failed:
        print(line, file=sys.stderr)
    if failed:
        sys.exit(1)


def _print_plan(config: ReproduceConfig) -> None:
    """The commands that are left, one a line; those that collect data must end first."""
    collecting = [job for job in data_jobs(config) if not job.finished()]
    for job in [*collecting, *(job for job in train_jobs(config) if not job.finished())]:
        print(command_line(job, config.threads))
    if collecting:
        print(
            f"agentic-reproduce: the first {len(collecting)} lines collect data, and must have "
            "ended before the others begin",
            file=sys.stderr,
        )


def _run_jobs(config: ReproduceConfig, console: Console) -> list[str]:
    """A line for every job that failed."""
    collecting, training = data_jobs(config), train_jobs(config)
    Path(config.output).mkdir(parents=True, exist_ok=True)
    launcher = Launcher(config.threads, console)
    with Interrupt(quiet=True) as interrupt:
        launcher.run(collecting, 1, interrupt)  # limited by seconds, with workers of their own
        if not interrupt.signal:
            launcher.run(training, config.jobs, interrupt)
    if interrupt.signal:
        left = sum(not job.finished() for job in training)
        console.print(f"{left} of {len(training)} jobs are left; the same command goes on")
        raise Terminated if interrupt.signal == signal.SIGTERM else KeyboardInterrupt
    return [f"{f.job.name}: {f.reason}, see {f.job.log}" for f in launcher.failures]


def main() -> None:
    """The console script."""
    run("agentic-reproduce", "reproduce", command)


if __name__ == "__main__":
    main()
