"""The header of an array of numpy's, from a file of anyone."""

import math
from typing import IO

import numpy as np

_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether the first axis runs fastest, and dtype; the file then stands at the numbers.

    Raises:
        ValueError: there is no such header, or it is of Python's objects.
        OSError: it cannot be read.
    """
    try:
        version = np.lib.format.read_magic(file)
        shape, fortran, dtype = _READERS[version](file)
        math.prod(shape)
    except OSError:
        raise
    except Exception as error:  # damage shows in numpy, ast and tokenize alike
        # numpy's own words would advise to unpickle it.
        raise ValueError(f"its header is not numpy's, {type(error).__name__}") from error
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"its header says shape {shape}")
    if dtype.hasobject:
        raise ValueError(f"its header says dtype {dtype}, expected numbers")
    return shape, fortran, dtype
