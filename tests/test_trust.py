"""Files are never code: what could make them so is called in one safe way only, or not at all."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for package in ("agentic", "benchmarks", "envs", "parallel")
    for path in sorted((ROOT / package).rglob("*.py"))
]
UNPICKLING = {"cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle"}
UNPICKLING |= {"pandas", "runpy", "shelve"}
# By name of the module or builtin and what is called of it: the keywords that it has to have.
ALLOWED = {
    ("np", "load"): {"allow_pickle": False},
    ("numpy", "load"): {"allow_pickle": False},
    ("torch", "load"): {"weights_only": True},
}
NEVER = {"eval", "exec", "compile", "__import__"}
NEVER_OF = {
    "np": {"fromregex", "DataSource", "read_array"},
    "os": {"system", "popen"},
    "yaml": {"unsafe_load", "full_load", "load_all", "unsafe_load_all", "full_load_all", "Loader"},
}
LOADERS = {"texts.py"}  # whose yaml.load has a loader of its own, which test_texts.py tries


def _wrong(tree: ast.AST, file: str) -> list[str]:
    """What is called or imported in a way that could run what a file says."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            found += [f"import {name}" for name in names & UNPICKLING]
        elif isinstance(node, ast.ImportFrom):
            module, names = (node.module or "").split(".")[0], {a.name for a in node.names}
            loads = module in ("numpy", "torch", "yaml") and "load" in names
            if module in UNPICKLING or loads:
                found.append(f"from {node.module} import {sorted(names)}")
        elif isinstance(node, ast.Call):
            found += _wrong_call(node, file)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in NEVER_OF.get(node.value.id, ()):
                found.append(f"{node.value.id}.{node.attr}")
    return found


def _wrong_call(node: ast.Call, file: str) -> list[str]:
    keywords = {
        word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)
    }
    if isinstance(node.func, ast.Name) and node.func.id in NEVER:
        return [node.func.id]
    if keywords.get("shell"):
        return ["shell=True"]
    if not (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
        return []
    called = node.func.value.id, node.func.attr
    if called == ("yaml", "load") and file not in LOADERS:
        return ["yaml.load"]
    needed = ALLOWED.get(called, {})
    if any(keywords.get(name, "missing") is not value for name, value in needed.items()):
        return [f"{'.'.join(called)} without {needed}"]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_becomes_code(path):
    assert _wrong(ast.parse(path.read_text()), path.name) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "from yaml import load",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "yaml.load(f, yaml.Loader)",
        "yaml.unsafe_load(f)",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_what_the_rule_finds(code):
    assert _wrong(ast.parse(code), "x.py")


def test_what_the_rule_leaves_alone():
    sound = "import json, numpy\nnp.load(f, allow_pickle=False)\nmodel.eval()\nyaml.safe_load(f)"
    assert _wrong(ast.parse(sound), "x.py") == []
