"""What `tenuto infer` makes of its file, whatever is in it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fabric.errors import ConfigError
from roles.cli.infer import read_inputs

ARRAY = np.arange(3, dtype=np.float32)


def npy(array: object = ARRAY) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(array), allow_pickle=True)
    return out.getvalue()


def npz(pack: Callable[..., None] = np.savez) -> bytes:
    out = io.BytesIO()
    pack(out, x=ARRAY, y=np.zeros(5_000))
    return out.getvalue()


def damaged() -> bytes:
    """A zip whose directory is whole, and whose compressed data is not."""
    whole = bytearray(npz(np.savez_compressed))
    whole[60:90] = b"\xff" * 30
    return bytes(whole)


def bomb() -> bytes:
    out = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**13,)}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue()


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_the_first_bytes_say_what_a_file_is_not_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(npy())
    (read,) = read_inputs(path, None).values()
    assert np.array_equal(np.asarray(read), ARRAY)
    path.write_bytes(npz())
    assert set(read_inputs(path, None)) == {"x", "y"}


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\x93NUMPY", b"text", b"PK\x03\x04", npy()[:-1], npy([{}]), npz()[:-30], damaged(), bomb()],
    ids=["empty", "cut head", "text", "cut zip", "cut", "pickle", "cut directory", "damaged", "bomb"],
)
def test_a_file_that_is_no_array_is_named_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} cannot be read: ."):
        read_inputs(path, None)
