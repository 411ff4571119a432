"""What `torch.save` has written of plain types, read from bytes that nobody vouches for.

`torch.load(weights_only=True)` runs no code, but it may be made to take any amount of memory: by
records that inflate, by records that share their bytes, by constructors with a size. All that is
refused before it reads, so that a file takes no more memory than a few times its length.
"""

import io
import pickletools
import struct
import zipfile
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_STORAGES = "Double Float Half BFloat16 Long Int Short Char Byte Bool".split()
_GLOBALS = frozenset(
    [
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_meta_tensor_no_storage",
        *(f"torch {name}Storage" for name in _STORAGES),
        *(str(dtype).replace(".", " ") for dtype in DTYPES),
    ]
)
_DEPTH = 16  # of containers in each other; a trainer's state has 5


def load(content: bytes) -> Any:
    """Dicts, lists, tuples, numbers, strings, None and dense tensors on the CPU or on "meta".

    Raises:
        ValueError: it is anything else; one line, which does not know the file's name.
    """
    try:
        pickled = _pickle_of(content)
        _check_pickle(pickled)
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # every layer of torch and zipfile has its own for damage
        # torch's own words would advise to unpickle it.
        told = f": {error}" if type(error) is ValueError else ""
        raise ValueError(f"{type(error).__name__}{told}") from error
    return _Copy(len(pickled)).of(loaded)


class _Copy:
    """A tree of nothing but plain types.

    Args:
        most: values; what a pickle holds once takes a byte of it at least.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    def of(self, value: Any, depth: int = 0) -> Any:
        """The copy of a value that lies in so many containers.

        Raises:
            ValueError: it holds itself, or something many times, or what is not plain.
        """
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            raise ValueError("it holds itself, or something many times")
        if isinstance(value, Tensor):
            return _checked(value)
        # The types' own methods: an OrderedDict may come with attributes of any name.
        if isinstance(value, dict):
            items = list(dict.items(value))
            for key, _ in items:
                if type(key) not in (str, int):
                    raise ValueError(f"a {type(key).__name__} as a key")
            return {key: self.of(item, depth + 1) for key, item in items}
        if type(value) in (list, tuple):
            return type(value)(self.of(item, depth + 1) for item in value)
        if value is None or type(value) in (str, int, float, bool):
            return value
        raise ValueError(f"a {type(value).__name__}")


def _pickle_of(content: bytes) -> bytes:
    """The pickle of a torch archive whose records are stored as they are, each in its own bytes."""
    _check_end(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        names = {member.filename.lower() for member in members}
        if len(names) < len(members):
            raise ValueError("two records of one name")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ValueError("a compressed or encrypted record")
            if member.file_size != member.compress_size:
                raise ValueError("a record of two sizes")
        if sum(member.file_size for member in members) > len(content):
            raise ValueError("records are longer than the file")
        root = members[0].filename.partition("/")[0] if members else ""
        return archive.read(f"{root}/data.pkl")


def _check_end(content: bytes) -> None:
    """Refuses what zipfile and torch could read differently: the directory is right at the end."""
    end = content.rfind(b"PK\5\6")
    if not content.startswith(b"PK\3\4") or end < 0 or len(content) < end + 22:
        raise ValueError("no zip archive")
    size, start, comment = struct.unpack_from("<IIH", content, end + 12)
    if end + 22 + comment != len(content):
        raise ValueError("bytes behind the zip archive")
    directory_end = end
    if end >= 76 and content[end - 20 : end - 16] == b"PK\6\7":
        directory_end = end - 76
        (place,) = struct.unpack_from("<Q", content, end - 12)
        if place != directory_end or content[place : place + 4] != b"PK\6\6":
            raise ValueError("a zip archive with two ends")
        size, start = struct.unpack_from("<QQ", content, place + 40)
    if start + size != directory_end:
        raise ValueError("bytes within the zip archive's directory")


def _check_pickle(pickled: bytes) -> None:
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "PROTO" and argument != 2:
            raise ValueError(f"pickle protocol {argument}")
        if operation.name == "GLOBAL" and argument not in _GLOBALS:
            raise ValueError(f"it wants {argument!r}"[:200])


def _checked(tensor: Tensor) -> Tensor:
    """Dense, and as long as it says."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor of {tensor.dtype} that is not plain")
    size = tensor.numel() * tensor.itemsize
    if not tensor.is_meta and size > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor {tuple(tensor.shape)} of fewer numbers")
    return tensor.detach()
