"""The layout's rule: agentic -> parallel, agentic -> envs, no other arrow; nothing undeclared."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agentic", "parallel", "envs")
FORBIDDEN = {
    "envs": {"agentic", "parallel", "torch", "hydra", "configs"},
    "parallel": {"agentic", "envs", "gymnasium", "dm_control", "mujoco", "hydra", "configs"},
}
NEEDS_AN_EXTRA = {"agentic/exchange.py", "agentic/foreign.py"}  # to be imported


def _imported(node: ast.AST) -> set[str]:
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            names |= {alias.name.split(".")[0] for alias in inner.names}
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            names.add(inner.module.split(".")[0])
    return names


def _trees(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    for package in packages:
        files = list((ROOT / package).rglob("*.py"))
        assert files
        yield from ((path, ast.parse(path.read_text())) for path in files)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_follow_the_layout(package):
    for path, tree in _trees(package):
        assert not _imported(tree) & FORBIDDEN[package], path


def _names(requirements: list[str]) -> set[str]:
    return {_plain(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_declared_and_extras_are_imported_where_they_are_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = _names(project["dependencies"])
    extra = _names(
        [r for name in ("minari", "video") for r in project["optional-dependencies"][name]]
    )
    extra |= {"h5py"}  # minari[hdf5]
    distributions = packages_distributions()
    known = sys.stdlib_module_names | {*PACKAGES, "configs"}
    for path, tree in _trees(*PACKAGES):
        for statement in tree.body:
            late = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            allowed = required | (
                extra if late or str(path.relative_to(ROOT)) in NEEDS_AN_EXTRA else set()
            )
            for name in _imported(statement) - known:
                assert {_plain(d) for d in distributions[name]} & allowed, (path, name)
