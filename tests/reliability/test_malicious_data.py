"""Data made to harm: refused in one line that names file and member, in little memory."""

import io
import json
import struct
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import make_episode
from places import SPEC

from agentic.archive import open_zip, read_member
from agentic.episodes import Episode, most_bytes, parse_episode, read_episode
from agentic.exchange import import_dataset
from agentic.foreign import FILE
from agentic.sources import find_source

ROOT = Path(__file__).parents[2]


def npy(shape=(1001, 1), descr="<f4", data=b""):
    """A file of numpy's that declares what it likes."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


def members(seed=0):
    """The five arrays of a sound episode by the names that they have in an npz."""
    made = {}
    for f in fields(Episode):
        buffer = io.BytesIO()
        np.save(buffer, getattr(make_episode(SPEC, seed), f.name))
        made[f"{f.name}.npy"] = buffer.getvalue()
    return made


def zipped(content, *, links=(), twice=(), method=zipfile.ZIP_DEFLATED):
    """A zip of names and bytes, some of them as links or twice."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in content.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            if name in links:
                info.external_attr = 0o120777 << 16
            archive.writestr(info, data)
            if name in twice:
                with pytest.warns(UserWarning, match="Duplicate"):
                    archive.writestr(info, data)
    return buffer.getvalue()


def encrypted(content):
    """The same zip with every member marked as encrypted."""
    changed = bytearray(content)
    for signature, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = changed.find(signature)
        while at >= 0:
            changed[at + place] |= 1
            at = changed.find(signature, at + 4)
    return bytes(changed)


def crowded(count):
    """A zip whose list has `count` members of no bytes at all."""
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"a"
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, *[0] * 7, 1, *[0] * 6)
    size = count * (len(entry) + 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, size, len(local), 0)
    return local + (entry + b"a") * count + end


HUGE = 10**15
CASES = {
    "pickled objects": (lambda m: m | {"action.npy": npy(descr="|O", data=b"cos\n.")}, "action"),
    "absurd rows": (lambda m: m | {"action.npy": npy((HUGE, 1))}, f"action has shape .{HUGE}, 1"),
    "absurd width": (lambda m: m | {"reward.npy": npy((1001, HUGE))}, "reward declares"),
    "negative rows": (lambda m: m | {"physics.npy": npy((-1, 4))}, "physics is not an array"),
    "structure": (lambda m: m | {"action.npy": npy(descr=[("a", "<f4")])}, "action has dtype"),
    "bomb": (lambda m: m | {"action.npy": bytes(10**8)}, "action.npy inflates to 100,000,000"),
    "bomb beside": (
        lambda m: m | {"action.npy": m["action.npy"] + bytes(10**6)},
        "action declares",
    ),
    "way out": (lambda m: m | {"../../x.npy": b"x"}, r"member '../../x.npy' leads out"),
    "absolute": (lambda m: m | {"/x.npy": b"x"}, "member '/x.npy' leads out"),
    "backslash": (lambda m: m | {"..\\x.npy": b"x"}, "leads out"),
    "missing": (lambda m: {k: v for k, v in m.items() if k != "physics.npy"}, "missing: physics"),
}


def content_of(name):
    return zipped(CASES[name][0](members()))


OF_ZIP = {
    "link": (lambda: zipped(members(), links=["action.npy"]), "action.npy' is a link"),
    "twice": (lambda: zipped(members(), twice=["action.npy"]), "action.npy' is there twice"),
    "encrypted": (lambda: encrypted(zipped(members())), "observation.npy' is encrypted"),
    "method": (lambda: zipped(members(), method=zipfile.ZIP_BZIP2), "compressed by method 12"),
    "crowded": (lambda: crowded(10**6), "longer than"),
} | {name: (lambda name=name: content_of(name), words) for name, (_, words) in CASES.items()}


@pytest.mark.parametrize("name", OF_ZIP)
def test_an_npz_is_refused(tmp_path, name):
    make, words = OF_ZIP[name]
    path = tmp_path / "episode_000000_1000.npz"
    path.write_bytes(make())
    with pytest.raises(ValueError, match=words) as caught:
        read_episode(path, SPEC)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path.parent / "x.npy").exists()


@pytest.mark.parametrize("name", OF_ZIP)
def test_an_npz_in_a_domains_zip_is_refused(tmp_path, name):
    make, words = OF_ZIP[name]
    (tmp_path / "cartpole").mkdir()
    place = tmp_path / "cartpole" / "td3.zip"
    place.write_bytes(zipped({"buffer/episode_000000_1000.npz": make()}))
    source = find_source(tmp_path, "cartpole", "td3")
    if name == "crowded":  # larger than any episode
        words = "buffer/episode_000000_1000.npz inflates to"

    def read(file):
        with source.opened() as open_file, open_file(file) as content:
            return parse_episode(content, source.path(file), SPEC)

    with pytest.raises(ValueError, match=words) as caught:
        read(source.files[0])
    assert str(caught.value).startswith(f"{place}/episode_000000_1000.npz: ")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda name, npz: zipped({name: npz}, links=[name]), "is a link"),
        (lambda name, npz: zipped({name: npz}, twice=[name]), "is there twice"),
        (lambda name, npz: zipped({name: npz, "../evil": b""}), "'../evil' leads out"),
        (lambda name, npz: encrypted(zipped({name: npz})), "is encrypted"),
        (lambda name, npz: zipped({name: npz}, method=zipfile.ZIP_LZMA), "method 14"),
        (lambda name, npz: crowded(10**6), "longer than 16,777,216 bytes"),
    ],
)
def test_a_domains_zip_is_refused(tmp_path, make, words):
    (tmp_path / "cartpole").mkdir()
    place = tmp_path / "cartpole" / "td3.zip"
    place.write_bytes(make("buffer/episode_000000_1000.npz", zipped(members())))
    with pytest.raises(ValueError, match=words) as caught:
        find_source(tmp_path, "cartpole", "td3")
    assert str(place) in str(caught.value)


def test_a_member_that_is_longer_than_it_says(tmp_path):
    content = bytearray(zipped({"action.npy": bytes(10**7)}))
    for at, place in ((content.find(b"PK\3\4"), 22), (content.find(b"PK\1\2"), 24)):
        struct.pack_into("<I", content, at + place, 1000)
    archive = open_zip(io.BytesIO(content), most_bytes(SPEC))
    with pytest.raises(ValueError, match=r"member action.npy is damaged"):
        read_member(archive, archive.infolist()[0], most_bytes(SPEC))


READ = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from agentic.episodes import read_episode
from envs import TASKS
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 200 * 2**20,) * 2)
for path in sorted(Path(sys.argv[1]).glob("*.npz")):
    try:
        read_episode(path, TASKS["cartpole_swingup"])
    except ValueError as error:
        print(error)
"""


def test_all_of_them_in_200_mib(tmp_path):
    made = {name: make() for name, (make, _) in OF_ZIP.items()}
    for number, content in enumerate(made.values()):
        (tmp_path / f"e_{number:02d}_1000.npz").write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == len(made)
    assert "memory" not in done.stdout


def dataset(folder, **changes):
    """A Minari dataset whose parts are as given: h5py's arguments of datasets, and metadata."""
    data = folder / "data"
    data.mkdir(parents=True)
    space = {"type": "Box", "dtype": "float32", "low": [-1.0], "high": [1.0]}
    metadata = {
        "data_format": "hdf5",
        "total_episodes": 1,
        "observation_space": json.dumps(space | {"shape": [SPEC.observation_size]}),
        "action_space": json.dumps(space | {"shape": [SPEC.action_size]}),
    } | changes.pop("metadata", {})
    metadata = {key: value for key, value in metadata.items() if value is not None}
    (data / "metadata.json").write_text(json.dumps(metadata))
    episode = make_episode(SPEC, 0)
    arrays = {
        "observations": {"data": episode.observation},
        "actions": {"data": episode.action[1:]},
        "rewards": {"data": episode.reward[1:, 0]},
        "terminations": {"data": np.zeros(1000, bool)},
        "infos/physics": {"data": episode.physics},
    } | changes
    with h5py.File(data / FILE, "w") as file:
        group = file.create_group("episode_0")
        for name, arguments in arrays.items():
            if isinstance(arguments, h5py.ExternalLink | h5py.SoftLink):
                group[name] = arguments
            else:
                group.create_dataset(name, **arguments)
    return folder


def test_the_environment_that_a_dataset_names_is_never_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = {"id": "x-v0", "entry_point": "subprocess:call", "kwargs": {"args": ["touch", "PWNED"]}}
    spec |= dict.fromkeys(("reward_threshold", "max_episode_steps", "vector_entry_point"))
    spec |= {"nondeterministic": False, "additional_wrappers": [], "disable_env_checker": True}
    metadata = {"env_spec": json.dumps(spec), "observation_space": None, "action_space": None}
    folder = dataset(tmp_path / "evil", metadata=metadata)
    with pytest.raises(ValueError, match=f"source: {folder}/data .* has no observation_space"):
        import_dataset(str(folder), SPEC, tmp_path / "data", "copy")
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"observations": {"shape": (HUGE, 5), "chunks": (1, 5)}}, "observations declares"),
        ({"actions": {"shape": (1, 1), "chunks": (2**20, 2**5), "maxshape": (None, None)}}, "decl"),
        ({"rewards": {"data": np.array([b"x"] * 3, "S1")}}, "rewards is not an array of numbers"),
        ({"actions": h5py.ExternalLink("other.hdf5", "/x")}, "actions is missing, or in another"),
        ({"actions": h5py.SoftLink("/episode_0/actions")}, "actions is missing, or in another"),
        (
            {"actions": {"shape": (9,), "dtype": "u1", "external": [("/etc/passwd", 0, 9)]}},
            "actions lies in another file",
        ),
        ({"infos/physics": h5py.SoftLink("/x")}, "physics is missing, or in another"),
        ({"metadata": {"data_format": "arrow"}}, "data_format is 'arrow', expected 'hdf5'"),
        ({"metadata": {"total_episodes": HUGE}}, f"total_episodes is {HUGE}, expected 1"),
        ({"metadata": {"observation_space": '{"type": "Dict"}'}}, "observation space is Dict"),
    ],
)
def test_a_dataset_of_minaris_is_refused(tmp_path, changes, words):
    folder = dataset(tmp_path / "made", **changes)
    with pytest.raises(ValueError, match=f"^source: .*{words}") as caught:
        import_dataset(str(folder), SPEC, tmp_path / "data", "copy")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("data/**/*.npz"))


def test_a_sound_dataset_made_so_is_taken(tmp_path):
    files = import_dataset(str(dataset(tmp_path / "made")), SPEC, tmp_path / "data", "copy")
    assert np.array_equal(read_episode(files[0], SPEC).physics, make_episode(SPEC, 0).physics)
