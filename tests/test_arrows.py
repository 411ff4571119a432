"""The layout's rule: agentic -> parallel, agentic -> envs, and no other arrow."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "envs": {"agentic", "parallel", "torch", "hydra", "configs"},
    "parallel": {"agentic", "envs", "gymnasium", "dm_control", "mujoco", "hydra", "configs"},
}


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_follow_the_layout(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not _imported(path) & FORBIDDEN[package], path
