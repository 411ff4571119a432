"""What a reproduction consists of: every row on every task with every seed, and its data."""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hydra import compose
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from agentic.collect import CollectCommand
from agentic.collect_config import CollectConfig
from agentic.collector import unfinished
from agentic.config import MAX_SEED, TrainConfig
from agentic.explore import RECIPES
from agentic.foreign_config import check_override
from agentic.interpolation import plain
from agentic.runs import read_config
from agentic.runs import settings as train_settings
from agentic.strict import at_least, between, build, one_of
from agentic.wording import one_line
from envs import expand

OWN_SETTINGS = 4  # of a training job: task, seed, data_dir, run_dir
Rows = dict[str, tuple[str, ...]]  # settings of agentic-train by the row's name

_OWN = ("task", "seed", "data_dir", "run_dir", "resume")  # what jobs are told apart by
_NAME = re.compile(r"[\w%+-][\w.%+-]*")
_PLAIN = re.compile(r"[A-Za-z_./][\w./%+-]*", re.ASCII)
_WORDS = {"null", "true", "false", "inf", "nan"}  # which hydra does not read as strings


@dataclass(frozen=True, kw_only=True)
class Section:
    """Rows on tasks: a table, or a part of one."""

    section: str  # the table's name
    tasks: tuple[str, ...]
    rows: Rows | None = None  # none: the main table's
    overrides: tuple[str, ...] = ()  # of all its jobs
    # settings of agentic-collect; empty: the task's own recipe; none: the data are there
    collect: tuple[str, ...] | None = ()


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Everything that `agentic-reproduce` is told."""

    section: str
    tasks: tuple[str, ...]
    rows: Rows
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]  # of all jobs, before those of their section and row
    only: tuple[str, ...] | None  # rows of these names alone
    collect: tuple[str, ...] | None
    extra: tuple[Section, ...]
    data_dir: str
    output: str
    jobs: int  # at a time
    threads: int  # of each
    plan: bool
    report: bool

    def __post_init__(self) -> None:
        at_least("jobs", self.jobs, 1, 10_000)
        at_least("threads", self.threads, 1, 10_000)
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            raise ValueError(f"seeds: got {list(self.seeds)}, expected each once, at least one")
        for seed in self.seeds:
            between("seeds", seed, 0, MAX_SEED)
        if self.only == ():
            raise ValueError("only: got [], expected rows, or null for all")
        known = [name for section in self.sections for name in section.rows or ()]
        for name in self.only or ():
            if name not in known:
                raise ValueError(f"only: got {name!r}, expected rows of {sorted(set(known))}")
        names = [("section", section.section) for section in self.sections]
        for setting, name in [*names, *(("rows", name) for name in known)]:
            if not _NAME.fullmatch(name):  # a folder, which needs no quoting
                raise ValueError(
                    f"{setting}: got {name!r}, expected a name of letters, digits, ._%+-"
                )
        for section in self.sections:
            for task in section.tasks:
                if section.tasks.count(task) > 1:
                    raise ValueError(f"tasks: got {task} twice, expected each once")
        places = [(s.section, t, r) for s in self.sections for t in s.tasks for r in s.rows or ()]
        if not places:
            raise ValueError("tasks: got no row on any task, expected at least one")
        for place in places:
            expand(place[1])
            if places.count(place) > 1:
                raise ValueError(f"extra: {'/'.join(place)} is there twice, expected it once")

    @property
    def sections(self) -> tuple[Section, ...]:
        """The main table and the extra ones, all with rows of their own."""
        main = Section(section=self.section, tasks=self.tasks, rows=self.rows, collect=self.collect)
        return tuple(
            Section(
                section=s.section,
                tasks=s.tasks,
                rows=self.rows if s.rows is None else s.rows,
                overrides=s.overrides,
                collect=s.collect,
            )
            for s in (main, *self.extra)
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command that leaves something behind, and goes on with it when called again."""

    name: str  # its place below the output, without `runs`
    module: str  # agentic.train or agentic.collect
    settings: tuple[str, ...]
    log: Path
    result: Path | CollectConfig  # a file that is there when it is finished, or a collection
    data_dir: str
    needs: str | None = None  # name of the job that collects its data

    @property
    def record(self) -> Path:
        """Where its time and memory are written down."""
        return self.log.with_suffix(".json")

    def finished(self) -> bool:
        """Whether nothing is left to do."""
        if isinstance(self.result, Path):
            return self.result.is_file()
        return not unfinished(self.result, Path(self.data_dir))


def data_jobs(config: ReproduceConfig) -> list[Job]:
    """One job for every data set, which all rows and seeds share.

    Raises:
        ValueError, HydraException: settings that agentic-collect would refuse.
    """
    jobs: dict[str, Job] = {}
    for section in config.sections:
        if section.collect is None:
            continue
        for task in section.tasks if _rows(config, section) else ():
            asked = _collect_config(task, section.collect)
            name = _data_name(task, asked)
            jobs.setdefault(
                name,
                Job(
                    name=name,
                    module="agentic.collect",
                    settings=(
                        f"task={task}",
                        _setting("data_dir", config.data_dir),
                        *section.collect,
                    ),
                    log=Path(config.output) / f"{name}.log",
                    result=asked,
                    data_dir=config.data_dir,
                ),
            )
    return list(jobs.values())


def train_jobs(config: ReproduceConfig) -> list[Job]:
    """One job for every row, task and seed.

    All rows of the first seed on all tasks come first: an early end leaves whole tables.
    """
    placed = [
        (section, task, _needed(task, section))
        for section in config.sections
        for task in section.tasks
    ]
    return [
        _train_job(config, section, task, row, seed, needs)
        for seed in config.seeds
        for section, task, needs in placed
        for row in _rows(config, section)
    ]


def check_settings(config: ReproduceConfig) -> None:
    """Composes what agentic-train will be told, before hours of collecting; seeds are all alike.

    Raises:
        ValueError: a row's settings would be refused, are those that jobs are told apart by,
            read other data than are collected for it, or are not those of its finished runs.
    """
    collected = {job.name: job.result for job in data_jobs(config)}
    for job in train_jobs(replace(config, seeds=config.seeds[:1])):
        place = job.name.rpartition("/")[0]
        for setting in job.settings[OWN_SETTINGS:]:
            _check_setting(
                "rows", setting, place, ("task", "seed", "data_dir", "run_dir", "resume")
            )
        try:
            told = train_settings(plain(compose("train", list(job.settings))), [])
        except (ValueError, HydraException, OmegaConfBaseException) as error:
            raise ValueError(f"rows: {place}: {one_line(error)}") from error
        _check_data(place, told, None if job.needs is None else collected[job.needs])
        assert isinstance(job.result, Path)
        for seed in config.seeds:
            _check_finished(job.result.parent.with_name(f"seed{seed}"), told)


def _check_data(place: str, told: TrainConfig, collected: Path | CollectConfig | None) -> None:
    """Raises ValueError where a row reads other data than are made for it."""
    if collected is None:
        if told.algorithms is None:
            raise ValueError(
                f"algorithms: got null in {place}, expected the data that are there, e.g. "
                f"[{told.task.collect.recipe}], since collect=null makes none"
            )
        return
    assert isinstance(collected, CollectConfig)
    read = told.algorithms or (told.task.collect.recipe,)
    if collected.recipe not in {name.partition(":")[0] for name in read}:
        raise ValueError(
            f"algorithms: got {list(read)} in {place}, expected {collected.recipe!r} among them, "
            "which is collected for it; collect=null where the data are there"
        )


def _check_finished(run_dir: Path, told: TrainConfig) -> None:
    """Raises ValueError where there are results, of other settings."""
    if not (run_dir / "results.json").is_file():
        return
    before, now = (replace(c.learning, seed=0) for c in (read_config(run_dir), told))
    if before != now:
        raise ValueError(
            f"output: {run_dir} is finished, with other settings than now, expected a new output, "
            "or report=true"
        )


def _train_job(
    config: ReproduceConfig, section: Section, task: str, row: str, seed: int, needs: str | None
) -> Job:
    assert section.rows is not None
    name = f"{section.section}/{task}/{row}/seed{seed}"
    run_dir = Path(config.output) / "runs" / name
    return Job(
        name=name,
        module="agentic.train",
        settings=(
            f"task={task}",
            f"seed={seed}",
            _setting("data_dir", config.data_dir),
            _setting("run_dir", str(run_dir)),
            *config.overrides,
            *section.overrides,
            *section.rows[row],
        ),
        log=run_dir.with_name(f"{run_dir.name}.log"),
        result=run_dir / "results.json",
        data_dir=config.data_dir,
        needs=needs,
    )


def _rows(config: ReproduceConfig, section: Section) -> list[str]:
    return [name for name in section.rows or () if config.only is None or name in config.only]


def _needed(task: str, section: Section) -> str | None:
    """Name of the job that collects the task's data."""
    if section.collect is None:
        return None
    return _data_name(task, _collect_config(task, section.collect))


def _data_name(task: str, asked: CollectConfig) -> str:
    return f"data/{expand(task)[0].domain}-{asked.recipe}"


def _collect_config(task: str, settings: tuple[str, ...]) -> CollectConfig:
    """What agentic-collect would be told; hydra has been initialised."""
    for setting in settings:
        _check_setting("collect", setting, task, ("task", "data_dir"))
    try:
        asked = build(CollectCommand, plain(compose("collect", [f"task={task}", *settings])))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"collect: {one_line(error)}") from error
    one_of("recipe", asked.recipe, tuple(RECIPES))
    return CollectConfig(**{f.name: getattr(asked, f.name) for f in fields(CollectConfig)})


def _check_setting(field: str, setting: str, place: str, own: tuple[str, ...]) -> None:
    """Raises ValueError for one of a row that is no setting, or one that jobs are told apart by."""
    try:
        override = check_override(setting, hydra=False)
    except ValueError as error:
        raise ValueError(f"{field}: {place}: {error}") from error
    if override.key_or_group.partition(".")[0] in own:
        raise ValueError(f"{field}: got {setting!r} in {place}, expected none of {list(own)}")


def _setting(name: str, value: str) -> str:
    """As hydra reads it: a string, whatever is in it."""
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return f"{name}={value}"
    quoted = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""), value)
    return f"{name}='{quoted}'"
