import errno
import hashlib
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from conftest import make_model
from ranks import run_ranks
from safetensors import safe_open
from training import plain_state

from agentic import checkpoint
from agentic.layout import Layout, changed
from agentic.seal import Damaged
from parallel import shards
from parallel.mesh import CubeMesh, PeerLost
from parallel.sharding import SPREAD, Cut

CUTS = {
    "qkv.weight": Cut(y=1, x=1, z=2, stack=3),
    "qkv.bias": Cut(y=1, x=1, stack=3),
    "up.weight": Cut(y=0, x=0, z=1),
    "norm.weight": SPREAD,
    "head.bias": Cut(),
}
SHAPES = [{"x": 2, "y": 2, "z": 2}, {"y": 2}, {"x": 3, "y": 2}, {"x": 2, "dp": 2}, {"dp": 2}]
MORE = [{"x": 4}, {"y": 4}, {"z": 2}, {"x": 6, "y": 2}, {"x": 2, "y": 2, "z": 2, "dp": 2}]


def _state(seed=0, step=300):
    """A serial state with real AdamW moments, in fp32 and bf16."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"qkv.weight": (36, 24), "qkv.bias": (36,), "up.weight": (24, 12), "norm.weight": (24,)}
    parameters = [torch.randn(size, generator=random) for size in [*sizes.values(), (7,)]]
    parameters[2] = parameters[2].bfloat16()
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    optimizer.step()
    model = dict(zip(CUTS, parameters, strict=True)) | {"unit": torch.arange(5)}
    return plain_state(make_model()) | {
        "step": step,
        "model": model,
        "averaged": {name: 2 * value for name, value in model.items()},
        "optimizer": optimizer.state_dict(),
        "torch_rng": {"cpu": random.get_state()},
    }


def _layout(shape, cuts=CUTS):
    return Layout(CubeMesh(**shape), cuts)


def _world(shape):
    return torch.Size(shape.values()).numel()


def _saves(rank, shape, path, seed=0):
    layout = _layout(shape)
    checkpoint.save(path, changed(_state(seed), layout.part), layout)


def _loads(rank, shape, paths):
    """How many tensors of this rank are, for every one of the paths, the right ones."""
    layout = _layout(shape)
    expected = changed(_state(), layout.part)
    return [_equal(checkpoint.load(path, layout), expected) for path in paths]


def _equal(state, expected):
    """The number of tensors; everything is the same, bit by bit."""
    if isinstance(expected, dict):
        assert dict(state).keys() - {"format", "version", "migrated"} == expected.keys()
        return sum(_equal(state[key], value) for key, value in expected.items())
    if not isinstance(expected, torch.Tensor):
        assert state == expected
        return 0
    assert state.dtype == expected.dtype
    assert state.shape == expected.shape
    pair = [tensor.reshape(-1).view(torch.uint8) for tensor in (state, expected)]
    assert torch.equal(*pair)
    return 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint from a cube of 2 x 2 x 1; not to be changed."""
    path = tmp_path_factory.mktemp("saved") / "checkpoints" / "step_000000300.pt"
    path.parent.mkdir()
    run_ranks(4, _saves, {"x": 2, "y": 2}, path)
    return path.with_suffix("")


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)


@pytest.mark.parametrize("shapes", [SHAPES, pytest.param(MORE, marks=pytest.mark.slow)])
def test_any_shape_reads_what_any_shape_has_written(shapes, tmp_path):
    serial = tmp_path / "serial.pt"
    checkpoint.save(serial, _state())
    paths = [serial]
    for number, shape in enumerate(shapes):
        path = tmp_path / f"from_{number}.pt"
        run_ranks(_world(shape), _saves, shape, path)
        paths.append(path if shape == {"dp": 2} else path.with_suffix(""))
    assert all(checkpoint.exists(path) for path in paths)
    tensors = 2 * 6 + 2 * 5 + 5 + 2  # weights twice, moments, counts of steps, returns and RNG
    assert [_equal(checkpoint.load(path), _state()) for path in paths] == [tensors] * len(paths)
    for shape in shapes:
        counted = run_ranks(_world(shape), _loads, shape, paths)
        assert counted == [[tensors] * len(paths)] * _world(shape)


def test_a_cube_of_one_writes_the_serial_file(tmp_path):
    _saves(0, {}, tmp_path / "a.pt")
    assert _equal(torch.load(tmp_path / "a.pt"), _state())
    assert _loads(0, {}, [tmp_path / "a.pt"])


def test_nothing_but_the_state_is_a_pickle(saved):
    state, *tensors = sorted(path for path in saved.rglob("*") if path.is_file())
    assert state == saved / "state.pt"
    assert torch.load(state)["version"] == checkpoint.VERSION  # weights_only is torch's default
    assert len(tensors) == 4
    sizes = []
    for path in tensors:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            sizes.append(sum(file.get_tensor(n).nbytes for n in names if n.startswith("model.qkv")))
    assert sizes == [(36 * 24 + 36) * 4 / 4] * 4  # each has its quarter, and no more


def test_a_model_is_restored_without_a_group(tmp_path):
    run_ranks(2, _saves_model, tmp_path / "best.pt")
    model = checkpoint.restore_model(checkpoint.load(tmp_path / "best"), torch.device("cpu"))
    assert _equal(model.state_dict(), dict(make_model(seed=1).state_dict()))


def _saves_model(rank, path):
    model = make_model(seed=1)
    cuts = {name: Cut(x=0 if len(p) % 2 == 0 else None) for name, p in model.named_parameters()}
    layout = _layout({"x": 2}, cuts)
    state = _state() | {
        "spec": model.spec.to_dict(),
        "model": dict(make_model(seed=2).state_dict()),
        "averaged": dict(model.state_dict()),
        "optimizer": {"state": {}, "param_groups": []},
    }
    checkpoint.save(path, changed(state, layout.part), layout)


@pytest.mark.parametrize("dying", ["the first, with all written", "another, before it writes"])
def test_a_killed_save_leaves_the_older_one(dying, copied):
    run_dir, place = copied.parent.parent, copied.with_suffix(".pt")
    killed = checkpoint.step_path(run_dir, 400)
    for path in (place, killed):
        with pytest.raises(AssertionError, match="died") as caught:
            run_ranks(2, _dies, path, dying)
        assert "PeerLost" in str(caught.value)  # the one that lives does not wait
        assert checkpoint.newest(run_dir) == checkpoint.find(run_dir) == copied
        assert _equal(checkpoint.load(copied), _state())
    assert len(list(copied.iterdir())) == 3  # state, old tensors, those of the killed save
    assert killed.with_suffix("").is_dir()
    run_ranks(2, _saves, {"x": 2}, place, 1)
    assert sorted(path.name for path in copied.iterdir()) == ["state.pt", "tensors_3"]
    assert checkpoint.step_files(run_dir) == [copied]
    assert list(copied.parent.iterdir()) == [copied]
    assert _equal(checkpoint.load(copied), _state(seed=1))


def _dies(rank, path, dying):
    if rank == 0 and dying.startswith("the first"):
        checkpoint.write_atomically = lambda *_: os._exit(9)
    if rank == 1 and dying.startswith("another"):
        shards._Writer.write_data = lambda *_: os._exit(9)
    try:
        _saves(rank, {"x": 2}, path, 1)
    except PeerLost as error:
        raise AssertionError("PeerLost") from error


def test_a_full_disk_is_told_by_all(tmp_path):
    told = run_ranks(2, _is_full, tmp_path / "step_000000300.pt")
    assert told == [(errno.ENOSPC, str(tmp_path / "step_000000300" / "tensors_1"))] * 2
    assert not checkpoint.exists(tmp_path / "step_000000300")


def _is_full(rank, path):
    def write_data(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        shards._Writer.write_data = write_data
    with pytest.raises(OSError, match="No space") as caught:
        _saves(rank, {"x": 2}, path)
    return caught.value.errno, caught.value.filename


def test_the_latest_form_of_a_step_replaces_the_other(copied):
    run_dir, place = copied.parent.parent, copied.with_suffix(".pt")
    best = copied.parent / checkpoint.BEST
    checkpoint.save(place, _state())
    assert checkpoint.step_files(run_dir) == [place]
    assert not copied.exists()
    run_ranks(2, _saves, {"x": 2}, place)
    assert checkpoint.step_files(run_dir) == [copied]
    assert not place.exists()
    later = checkpoint.step_path(run_dir, 1000)
    checkpoint.save(later, _state())
    assert checkpoint.step_files(run_dir) == [copied, later]
    run_ranks(2, _saves, {"x": 2}, best)
    assert checkpoint.find(run_dir) == best.with_suffix("")
    assert checkpoint.find(copied) == copied
    checkpoint.remove(later)
    checkpoint.remove(copied)
    assert list(copied.parent.iterdir()) == [best.with_suffix("")]


def test_the_digest_is_of_all_files(tmp_path):
    run_ranks(2, _saves_model, tmp_path / "best.pt")
    place = tmp_path / "best"
    files = [place / "state.pt", *shards.files(place / "tensors_1")]
    assert len(files) == 3
    whole = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    assert checkpoint.load_with_digest(place)[1] == whole.hexdigest()


def test_a_flipped_bit_or_a_lost_end_of_any_file_is_refused(copied):
    random = np.random.default_rng(0)
    for path in (copied / "state.pt", *shards.files(copied / "tensors_1")):
        content = path.read_bytes()
        harmed = [content[:length] for length in random.integers(len(content), size=20)]
        for place in random.integers(8 * len(content), size=60):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            harmed.append(flipped)
        for bad in harmed:
            path.write_bytes(bad)
            with pytest.raises(Damaged, match=f"checkpoint: {copied}.* is damaged") as caught:
                checkpoint.load(copied)
            assert path.name == "state.pt" or str(path) in str(caught.value)
        path.write_bytes(content)
    assert _equal(checkpoint.load(copied), _state())


def _older(directory):
    """Makes it a checkpoint of version 1, which had no checksums: the readers' own checks stay."""
    state = torch.load(directory / "state.pt")
    del state["digests"]
    torch.save(state | {"version": 1}, directory / "state.pt")


SECOND = "shard-00002.*safetensors is damaged"


def _cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def _twice(path):
    shutil.copy(path, path.with_name("twice.safetensors"))


@pytest.mark.parametrize(
    ("harm", "named", "older_named"),
    [
        (_cut_off, SECOND, SECOND),
        (lambda path: path.write_bytes(b""), SECOND, SECOND),
        (lambda path: path.write_bytes(os.urandom(999)), SECOND, SECOND),
        (lambda path: path.write_bytes(b"\xff" * 999), SECOND, SECOND),
        (lambda path: path.unlink(), "tensors_1 lacks shard-00002", "lacks parts of "),
        (_twice, "has a foreign twice.safetensors", "lacks parts of .* or has some twice"),
        (
            lambda path: shutil.rmtree(path.parent),
            "tensors_1 lacks shard-00001",
            "tensors_1 is damaged .FileNotFoundError",
        ),
    ],
)
def test_damaged_tensors_are_refused(harm, named, older_named, copied):
    harm(shards.files(copied / "tensors_1")[1])
    with pytest.raises(Damaged, match=f"checkpoint: {copied}/?.*{named}"):
        checkpoint.load(copied)
    _older(copied)
    with pytest.raises(ValueError, match=f"checkpoint: {copied}/?.*{older_named}") as caught:
        checkpoint.load(copied)
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_of_an_older_header_is_refused_or_harmless(copied):
    _older(copied)
    path = shards.files(copied / "tensors_1")[0]
    content = path.read_bytes()
    places = range(0, 8 + int.from_bytes(content[:8], "little"), 29)
    refused = harmless = 0
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        try:
            state = checkpoint.load(copied)
        except ValueError as error:
            refused += str(copied) in str(error)
        else:
            harmless += _equal(state, _state()) > 0
    assert refused > harmless
    assert refused + harmless == len(places)


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


def _changed_state(directory, change):
    state = torch.load(directory / "state.pt")
    change(state)
    (directory / "state.pt").write_bytes(checkpoint.packed(state))


def _outside(state):
    state["tensors"] = "../tensors_1"


def _absurd(state):
    state["model"]["qkv.weight"] = torch.empty(2**40, 2**20, device="meta")


def _other_type(state):
    state["averaged"]["unit"] = torch.empty(5, device="meta", dtype=torch.float64)


def _another_name(state):
    state["model"]["new"] = state["model"].pop("qkv.weight")


def _one_less(state):
    del state["averaged"]["qkv.weight"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_outside, r"is damaged \(tensors: '../tensors_1'\)"),
        (_absurd, r"model.qkv.weight as torch.float32 \(3, 12, 24\), expected .*1099511627776"),
        (_other_type, "averaged.unit as torch.int64 .* expected torch.float64"),
        (_another_name, "lacks model.new"),
        (_one_less, r"has \['averaged.qkv.weight'\], which the state beside it does not know"),
        (lambda state: state.pop("tensors"), "only a part of one"),
        (lambda state: state.pop("digests"), "has no checksums"),
        (lambda state: state.pop("step"), r"lacks \['step'\]"),
    ],
)
def test_tensors_that_are_not_the_states_are_refused(change, told, copied):
    _changed_state(copied, change)
    with pytest.raises(ValueError, match=f"{copied}.*{told}"):
        checkpoint.load(copied)


def test_foreign_directories_are_refused(copied, tmp_path, capsys):
    for place in (tmp_path, tmp_path / "nothing", copied / "tensors_1"):
        with pytest.raises(ValueError, match=f"{place}, which is neither a file nor a directory"):
            checkpoint.load(place)
    with pytest.raises(ValueError, match=r"state.pt is only a part of one"):
        checkpoint.load(copied / "state.pt")
    evil = pickle.dumps({"format": checkpoint.FORMAT, "x": Evil()})
    for content in (b"", evil, (copied / "state.pt").read_bytes()[:-500]):
        (copied / "state.pt").write_bytes(content)
        with pytest.raises(ValueError, match=f"{copied} is damaged or not a checkpoint"):
            checkpoint.load(copied)
    assert "unpickled" not in capsys.readouterr().out


def test_a_model_that_is_not_the_layouts_is_refused(saved):
    told = run_ranks(5, _refused, {"x": 5}, CUTS, saved)
    assert all("model.qkv.weight of shape (36, 24)" in line for line in told)
    told = run_ranks(2, _refused, {"x": 2}, CUTS | {"new": Cut()}, saved)
    assert all("lacks the parameters ['new']" in line for line in told)
    (fewer := dict(CUTS)).popitem()
    told = run_ranks(2, _refused, {"x": 2}, fewer, saved)
    assert all("optimizer.state.4.exp_avg, expected 4 parameters" in line for line in told)
    flat = CUTS | {"qkv.bias": Cut(x=0)}
    told = run_ranks(2, _refused, {"x": 2}, flat, saved)
    assert all("model.qkv.bias as (3, 12), expected (36,)" in line for line in told)


def _refused(rank, shape, cuts, path):
    with pytest.raises(ValueError, match="checkpoint: ") as caught:
        checkpoint.load(path, _layout(shape, cuts))
    return str(caught.value)
