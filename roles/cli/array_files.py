"""Files of arrays, as numpy writes them: read with an error that says what is wrong, whatever is in them."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Final
from zipfile import BadZipFile

import numpy as np

from fabric.errors import ConfigError
from fabric.link import Tensor

_NPY, _ZIP, _PICKLE = b"\x93NUMPY", b"PK", b"\x80"
_CUT: Final = "it is damaged or cut short"
_DAMAGED: Final = (
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    EOFError,
    RuntimeError,  # a zip that is encrypted, or packed in a way that Python does not know
    SyntaxError,  # numpy takes the header apart as Python's words where it cannot read it as it is
    TokenError,
    BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What numpy and the modules below it raise on a changed or shortened file."""


def read_arrays(path: Path) -> Tensor | Mapping[str, Tensor]:
    """The array of an .npy file, or those of an .npz by their names: its first bytes say which. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            first = file.read(len(_NPY))
            if not first.startswith((_NPY, _ZIP)):
                raise ConfigError(f"{path} cannot be read: {_not_an_array(first)}")
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            arrays = dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except OSError as error:
        # bz2 raises one without a reason of the system's, for damaged data.
        raise ConfigError(f"{path} cannot be read: {error.strerror or _CUT}") from error
    except MemoryError as error:
        raise ConfigError(f"{path} cannot be read: there is no memory for it: {error}") from error
    except _DAMAGED as error:
        is_of_objects = "pickle" in str(error)
        reason = "it holds Python objects, not numbers" if is_of_objects else _CUT
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    for name, array in arrays.items() if isinstance(arrays, dict) else ():
        if not isinstance(array, np.ndarray):
            raise ConfigError(f"{path} cannot be read: {name!r:.80} in it is not an array")
    return arrays


def _not_an_array(first: bytes) -> str:
    if not first:
        return "it is empty"
    found = "it is a pickle, not an array" if first.startswith(_PICKLE) else "it is not an array"
    return f"{found}: numpy.save writes an .npy, numpy.savez an .npz"
