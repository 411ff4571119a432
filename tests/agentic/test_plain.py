"""Files that were made to harm: refused with one line, without code that runs and without memory.

`read` below is what a fuzzer calls: whatever the bytes, a state or a ValueError.
"""

import io
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model
from training import plain_state

from agentic import checkpoint, seal

HEAD = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION}


def read(content):
    """All that is done with a checkpoint before its model acts."""
    state = checkpoint.read(content, "a.pt")
    checkpoint.check_fit("checkpoint: a.pt", state)
    checkpoint.restore_model(state, torch.device("cpu"))
    return state


@pytest.fixture(scope="module")
def state():
    """Of a model of a few thousand numbers, with moments."""
    model = make_model(layers=1, width=8)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return plain_state(model) | HEAD | {"optimizer": optimizer.state_dict()}


def _sealed(archive):
    return seal.sealed(io.BytesIO(archive))


def _repacked(content, change, **settings):
    """The archive with records as `change(name, bytes)` says, sealed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for member in old.infolist():
            for name, data in change(member.filename, old.read(member)):
                new.writestr(zipfile.ZipInfo(name), data, **settings)
    return seal.sealed(buffer)


def _same(name, data):
    return [(name, data)]


def _with_pickle(content, pickled):
    return _repacked(content, lambda n, d: [(n, pickled if n.endswith("data.pkl") else d)])


def _refused(content, told=""):
    with pytest.raises(ValueError, match=rf"^checkpoint: a\.pt.*{told}") as caught:
        read(content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_whole_one_is_read_also_when_another_program_has_packed_it(state):
    content = checkpoint.packed(state)
    for packed in (content, _repacked(content, _same)):
        again = read(packed)
        assert again["step"] == 0
        assert all(torch.equal(again["model"][k], v) for k, v in state["model"].items())
        assert again["optimizer"]["state"].keys() == state["optimizer"]["state"].keys()


def test_records_that_inflate_are_refused(state):
    content = checkpoint.packed(state)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        packed = _repacked(content, _same, compress_type=method)
        _refused(packed, "a compressed or encrypted record")


def test_records_that_share_bytes_or_names_are_refused(state):
    content = checkpoint.packed(state)
    _refused(_repacked(content, lambda n, d: [(n, d), (n.upper(), d)]), "two records of one name")
    # Every record of the directory points to the largest one.
    members = zipfile.ZipFile(io.BytesIO(content)).infolist()
    most = max(members, key=lambda member: member.file_size)
    forged = bytearray(content[: -seal.LENGTH - 2] + b"\0\0")
    place = forged.index(b"PK\1\2")
    while place >= 0:
        struct.pack_into("<II", forged, place + 20, most.file_size, most.file_size)
        struct.pack_into("<I", forged, place + 42, most.header_offset)
        place = forged.find(b"PK\1\2", place + 1)
    _refused(_sealed(forged), "records are longer than the file")


def test_a_directory_elsewhere_is_refused(state):
    content = checkpoint.packed(state)
    bare = content[: -seal.LENGTH - 2] + b"\0\0"
    _refused(_sealed(b"x" + bare), "no zip archive")
    _refused(_sealed(b"PK\3\4" + bare), "two ends")
    # zipfile would make up for bytes in front, and torch would not.
    shifted = bytearray(b"PK\3\4" + bare)
    (place,) = struct.unpack_from("<Q", shifted, len(shifted) - 34)
    struct.pack_into("<Q", shifted, len(shifted) - 34, place + 4)
    _refused(_sealed(shifted), "bytes within")
    _refused(content + b"x", "bytes behind")


class Evil:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "evil",
    [
        Evil(print, "unpickled"),
        Evil(eval, "print('unpickled')"),
        Evil(bytearray, 10**15),
        Evil(torch.Tensor, 10**12),
        Evil(torch.empty, 10**12),
        Evil(torch._utils._rebuild_parameter, 1, 2, 3),
        Evil(torch.sparse_coo_tensor, [[0]], [1.0], (10**9,)),
    ],
)
def test_code_and_constructors_are_refused(evil, state, capsys):
    content = checkpoint.packed(state)
    for value in (evil, state | {"step": evil}):
        _refused(_with_pickle(content, pickle.dumps(value, protocol=2)), "it wants|NotImplemented")
    _refused(pickle.dumps(evil), "damaged or not a checkpoint")
    assert "unpickled" not in capsys.readouterr().out


def _knot():
    knot = []
    knot.append(knot)
    return knot


def _bomb():
    bomb = ()
    for _ in range(14):
        bomb = (bomb,) * 9
    return bomb


@pytest.mark.parametrize("nested", [_knot(), _bomb(), {"x": [_knot(), _bomb()]}, "deep"])
def test_what_holds_itself_is_refused(nested, state):
    pickled = pickle.dumps(nested, protocol=2)
    if nested == "deep":
        pickled = b"\x80\2" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."
    content = _with_pickle(checkpoint.packed(state), pickled)
    _refused(content, "it holds itself, or something many times")


@pytest.mark.parametrize(
    "value", [b"x", {1, 2}, 1j, {(1, 2): 3}, {1.5: 3}, torch.zeros(2, dtype=torch.complex64)]
)
def test_other_types_are_refused(value, state):
    buffer = io.BytesIO()
    torch.save(state | {"x": value}, buffer)
    _refused(seal.sealed(buffer), "damaged or not a checkpoint")


class Attributed:
    """Is pickled as an OrderedDict whose methods are hidden."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        hidden = dict.fromkeys(("items", "keys", "values", "get", "__iter__"), 5)
        return OrderedDict, (), hidden, None, iter(self.content.items())


def test_attributes_of_an_ordered_dict_do_nothing(state):
    again = read(checkpoint.packed(state | {"model": Attributed(state["model"])}))
    assert again["model"].keys() == state["model"].keys()


def _absurd_shapes(state):
    """States of a kilobyte or so that declare petabytes."""
    expanded = torch.zeros(1).expand(2**50)
    empty = torch.empty(2**50, device="meta")
    for tensor in (expanded, empty):
        for key in ("model", "averaged"):
            first = next(iter(state[key]))
            yield state | {key: state[key] | {first: tensor}}
        yield state | {"data": state["data"] | {"returns": tensor[None]}}
        moments = {"step": torch.tensor(1.0), "exp_avg": tensor, "exp_avg_sq": tensor}
        yield state | {"optimizer": {"state": {0: moments}, "param_groups": []}}
    for name, value in (("width", 2**40), ("layers", 2**40), ("feed_forward", 2**62)):
        spec = state["spec"] | {"model": state["spec"]["model"] | {name: value}}
        yield state | {"spec": spec}
    for name in ("observation_size", "action_size", "episode_steps"):
        yield state | {"spec": state["spec"] | {name: 2**50}}


def test_absurd_shapes_take_no_memory(state):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for absurd in _absurd_shapes(state):
        _refused(checkpoint.packed(absurd))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def _changes():
    """(path to a value, another value, what is said)."""
    nan = float("nan")
    for name in ("step", "rolled"):
        for value in ("3", -1, 1.0, None, True, []):
            yield (name,), value, name
    for value in ([], "x", 1, {}, {"score": "x", "step": 1}, {"score": nan, "step": 1}, {"a": 1}):
        yield ("best",), value, "best"
    for value in (None, [], {}, {"position": -1}, {"position": "x"}, {"position": 0, "x": 1}):
        yield ("stream",), value, "stream"
    for value in (None, [], [1.0], [0.0, 0.0, -1.0], [nan] * 3, ["x"] * 3, 3, {"a": 1}):
        yield ("spent",), value, "spent"
        yield ("updated",), value, "updated"
        yield ("skipped",), value, "skipped"
    for value in ("x", -1, 1.5, []):
        yield ("logged",), value, "logged"
    for name in ("spec", "config", "data", "model", "averaged", "optimizer"):
        for value in (None, 3, "x", [], {"x": 1}, {}, {0: torch.zeros(1)}):
            yield (name,), value, "spec|config|data|model|averaged|optimizer|parameters"
    for name in ("episodes", "quantiles", "returns"):
        for value in ("x", -0.5, {"a": 1}, [[]], torch.zeros(3, 3, 3), [{"max": "x"}]):
            yield ("data", name), value, f"data.{name}"
    yield ("config", "optimizer", "learning_rate"), 2**2000, "config.optimizer.learning_rate"
    yield ("config", "chain", "window_share"), 7.0, "chain.window_share"
    yield ("spec", "tasks"), "walker", "spec.tasks"
    yield ("spec", "model", "heads"), 0, "model.heads"
    wrong = torch.zeros(3, 3, 3)
    for name in ("exp_avg", "exp_avg_sq"):
        for value in (wrong, None, 1.0, wrong.to("meta")):
            yield ("optimizer", "state", 0, name), value, f"optimizer.state.0.{name}"
    for value in (wrong, None, "x", torch.tensor(-1.0), torch.tensor(nan)):
        yield ("optimizer", "state", 0, "step"), value, "optimizer.state.0.step"
    yield ("optimizer", "state"), {"x": {}}, "optimizer.state"
    yield ("version",), 2**70, "newer version"
    yield ("format",), 3, "not a checkpoint"


def _changed(tree, path, value):
    if not path:
        return value
    return tree | {path[0]: _changed(tree.get(path[0]), path[1:], value)}


def test_wrong_types_at_every_key_are_refused_by_name(state):
    changes = list(_changes())
    assert len(changes) > 100
    for path, value, told in changes:
        _refused(checkpoint.packed(_changed(state, path, value)), f"({told})")
    for key in state:
        told = {"format": "not a checkpoint", "version": "has version None"}.get(
            key, f"lacks.*{key}"
        )
        _refused(checkpoint.packed({k: v for k, v in state.items() if k != key}), told)
    moments = state["optimizer"]["state"]
    _refused(checkpoint.packed(_changed(state, ("optimizer", "state", -1), moments[0])), "got -1")


def test_other_groups_of_an_optimizer_mean_nothing(state, tmp_path):
    from training import make_trainer

    trainer = make_trainer(tmp_path)
    trainer.update()
    whole = trainer.state()
    whole["optimizer"] |= {"param_groups": [{"lr": "x", "maximize": True}]}
    checkpoint.save(checkpoint.step_path(tmp_path, 1), whole)
    resumed = make_trainer(tmp_path)
    resumed.resume()
    (group,) = resumed.optimizer.param_groups
    assert group["maximize"] is False
    assert resumed.update() == trainer.update()


def _mutations(content, count, seed):
    """Bytes that differ, sealed as if nothing had happened or not."""
    random = np.random.default_rng(seed)
    bare = content[: -seal.LENGTH - 2] + b"\0\0"
    for _ in range(count):
        harmed = bytearray(bare)
        start, end = sorted(random.integers(len(bare), size=2))
        match random.integers(5):
            case 0:
                harmed[start] = random.integers(256)
            case 1:
                for place in random.integers(len(bare), size=8):
                    harmed[place] ^= 1 << random.integers(8)
            case 2:
                del harmed[start : min(end, start + 64)]
            case 3:
                harmed[start:start] = harmed[start : min(end, start + 64)]
            case 4:
                struct.pack_into("<I", harmed, start % (len(bare) - 4), 2**32 - 1)
        sealed = random.random() < 0.8 and harmed[-2:] == b"\0\0"
        yield _sealed(bytes(harmed)) if sealed else bytes(harmed)


def _fuzz(count, seed):
    """How many mutations were refused; anything but ValueError is raised."""
    model = make_model(layers=1, width=8)
    contents = [checkpoint.packed(plain_state(model) | HEAD)]
    with zipfile.ZipFile(io.BytesIO(contents[0])) as archive:
        pickled = archive.read("archive/data.pkl")
    random, refused = np.random.default_rng(seed), 0
    for number, content in enumerate(_mutations(contents[0], count, seed)):
        if number % 2:  # of the pickle, with right sums of the records
            harmed = bytearray(pickled)
            for place in random.integers(len(pickled), size=random.integers(1, 4)):
                harmed[place] = random.integers(256)
            content = _with_pickle(contents[0], bytes(harmed))
        try:
            read(content)
        except ValueError as error:
            refused += str(error).startswith("checkpoint") and "\n" not in str(error)
        else:
            refused += 1j  # bytes of a weight or of a name, say: as good as before
    return int(refused.real), int(refused.imag)


def test_mutations_are_refused_or_read(state):
    refused, good = _fuzz(300, seed=0)
    assert refused + good == 300
    assert refused > 150


@pytest.mark.slow
def test_many_mutations_in_bounded_memory():
    code = (
        "import resource, sys; sys.path[:0] = sys.argv[1:]\n"
        "import torch, test_plain\n"
        "torch.set_num_threads(1)\n"
        "test_plain._fuzz(20, seed=1)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(*test_plain._fuzz(6000, seed=2))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    here = Path(__file__)
    run = subprocess.run(
        [sys.executable, "-c", code, str(here.parents[1]), str(here.parent)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    counts, kibibytes = run.stdout.splitlines()
    assert sum(map(int, counts.split())) == 6000
    assert int(kibibytes) < 64 * 1024
