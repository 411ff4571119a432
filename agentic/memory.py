"""Memory that ran out: told in one line with what was planned, and not as an error of the program.

A signal of the system's own (a killed process) leaves no time for that.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

KERNELS = 64  # compiled kernels that oneDNN keeps: more than a step's, less than many steps'

# What PyTorch and the libraries below it say of memory in a RuntimeError.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "could not create a memory",
    "could not create a primitive",
    "unable to mmap",
    "Cannot allocate memory",
)


def ran_out(error: BaseException) -> bool:
    """Whether an error is that an allocation has failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def spell_failure(error: BaseException) -> str:
    """What could not be allocated, in one line."""
    told = " ".join(str(error).split()) or "no more could be allocated"
    return f"memory: {told.rpartition('DefaultCPUAllocator: ')[2].rstrip('.')}"


def bound_kernels() -> None:
    """Has oneDNN keep few compiled kernels, before it compiles the first; see `KERNELS`.

    It compiles one for every shape of a product in half precision. Micro-batches of drawn lengths
    bring ever new shapes, and those of 1,000 products, oneDNN's and PyTorch's own default, take a
    gigabyte.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS))


@contextmanager
def planned(plan: Callable[[], str]) -> Iterator[None]:
    """Has a failed allocation say what was planned, and which settings need less.

    Raises:
        ValueError: an allocation has failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise ValueError(f"{spell_failure(error)}; {plan()}") from error
