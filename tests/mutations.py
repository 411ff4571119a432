"""Damaged and invented variants of files, by chance and by what is known of their form."""

import io
import json
import random
import zipfile

import yaml

JUNK = (
    *(None, True, 0, -1, 2**31, 2**63, 10**30, 1e308, -0.5, "", "x", "../../x", "/etc/passwd"),
    *("${oc.env:HOME}", "${steps}", "é\x00\x1b[2J", [], {}, [[]], [None], {"a": 1}, "1" * 5000),
)
BYTES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\r\n", b"{", b"[", b"}", b'"', b"-", b"9" * 40, b"&a")
LONGEST = 2**24  # bytes of a member
WORDS = (
    *("!!python/object/apply:os.system ['x']", "!!timestamp x", "!!binary x", "!!bool x", "!!int "),
    *("&a [*a]", "<<: {a: 1}", "? [x]", "1e999", "NaN", "-Infinity", "'", "{[", "0x", "1:2:3"),
)


def by_bytes(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """A few bytes turned, cut, doubled, moved, or taken from another file."""
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not content:
            return bytes(rng.choices(range(256), k=rng.randrange(64)))
        here, there = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        there = min(there, here + rng.choice((1, 2, 4, 8, 64, 4096)))
        piece = content[here:there]
        start = rng.randrange(len(other) + 1)
        new = rng.choice(
            (
                bytes(byte ^ (1 << rng.randrange(8)) for byte in piece),
                bytes(rng.choices(range(256), k=len(piece))),
                b"",
                piece * 2,
                other[start : start + len(piece)],
                rng.choice(BYTES),
                rng.choice(BYTES) * len(piece),
            )
        )
        content = content[:here] + new + content[there:]
    return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.1 else content


def by_value(value: object, rng: random.Random) -> object:
    """Plain values with one of them replaced, taken out, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        choice = rng.random()
        if choice < 0.1:
            del changed[key]
        elif choice < 0.15:
            changed[str(rng.choice(JUNK))] = changed.pop(key)
        else:
            changed[key] = by_value(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        new = rng.choice(([], [value[index]] * 2, [by_value(value[index], rng)]))
        return value[:index] + new + value[index + 1 :]
    return rng.choice((*JUNK, value))


def by_json(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """Of a json file: mostly another file of json."""
    try:
        value = json.loads(content)
    except ValueError:
        return by_bytes(content, rng, other)
    if rng.random() < 0.3:
        return by_bytes(content, rng, other)
    return json.dumps(by_value(value, rng)).encode()


def by_yaml(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """Of a yaml file: mostly another file of yaml, or one with its odder words."""
    choice = rng.random()
    if choice < 0.3:
        return by_bytes(content, rng, other)
    if choice < 0.6:
        lines = content.decode(errors="replace").split("\n")
        index = rng.randrange(len(lines))
        lines[index] = lines[index].partition(":")[0] + ": " + rng.choice(WORDS)
        return "\n".join(lines).encode(errors="replace")
    try:
        return yaml.safe_dump(by_value(yaml.safe_load(content), rng)).encode(errors="replace")
    except Exception:  # made by an earlier mutation
        return by_bytes(content, rng, other)


def by_member(content: bytes, rng: random.Random, other: bytes) -> bytes:
    """Of a zip: mostly a sound zip, of which a member is another."""
    if rng.random() < 0.3:
        return by_bytes(content, rng, other)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(info, archive.read(info)) for info in archive.infolist()]
    except Exception:  # made by an earlier mutation
        return by_bytes(content, rng, other)
    if not members:
        return by_bytes(content, rng, other)
    chosen = rng.randrange(len(members))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for index, (info, data) in enumerate(members):
            name, way = info.filename, info.compress_type
            if index == chosen:
                choice = rng.random()
                if choice < 0.6:  # mostly where a member says what it is
                    head = rng.choice((32, 128, 512, len(data)))
                    data = by_bytes(data[:head], rng, other) + data[head:]
                elif choice < 0.7:
                    name = rng.choice(("../x.npy", "/x.npy", "a\\b", "", members[0][0].filename))
                elif choice < 0.8:
                    continue
                elif choice < 0.9:
                    way = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
                else:
                    data = (data * rng.choice((0, 2, 100)))[:LONGEST]
            made = zipfile.ZipInfo(name)
            made.compress_type = way
            made.external_attr = rng.choice((*[info.external_attr] * 20, 0o120777 << 16))
            archive.writestr(made, data)
    return buffer.getvalue()
