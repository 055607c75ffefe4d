"""What `tenuto infer` makes of its file, whatever is in it."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.errors import ConfigError
from fabric.messages import Ledger, StageLine
from roles.cli.console import plain_console
from roles.cli.infer import read_inputs, stages_table

ARRAY = np.arange(3, dtype=np.float32)
CUT = "it is damaged or cut short"
HEADERS = (
    "{'descr': (), 'fortran_order': False, 'shape': ()}",
    "  if:\n x\n   y\n",
    "\tif x:\n\t x\n        y",
    "1 if",
    "'''",
    "\\",
    "(",
    "{[]: 1}",
    "{1: 2}",
    "'\\ud800'",
    "0777L",
)
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def npy(array: object = ARRAY) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(array), allow_pickle=True)
    return out.getvalue()


def npz(pack: Callable[..., None] = np.savez, x: Any = ARRAY) -> bytes:
    out = io.BytesIO()
    pack(out, x=x, y=np.zeros(5_000))
    return out.getvalue()


def headed(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def zip_of_text() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x.txt", "text")
    return out.getvalue()


def damaged() -> bytes:
    """A zip whose directory is whole, and whose compressed data is not."""
    whole = bytearray(npz(np.savez_compressed))
    whole[60:90] = b"\xff" * 30
    return bytes(whole)


def packed(method: int, content: bytes) -> bytes:
    """A zip of one member that is packed by that method."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("x.npy", content)
    return out.getvalue()


def changed(whole: bytes, at: int = 60) -> bytes:
    """The same with four other bytes in it, which are of the first member."""
    return whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 4]) + whole[at + 4 :]


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
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"\x93NUMPY", CUT),
        (b"text", "it is not an array: numpy.save writes an .npy, numpy.savez an .npz"),
        (pickle.dumps([1]), "it is a pickle, not an array: numpy.save writes an .npy, numpy.savez an .npz"),
        (b"PK\x03\x04", CUT),
        (npy()[:-1], CUT),
        (npy()[:20], CUT),
        (npy([{}]), "it holds Python objects, not numbers"),
        (npz(x=np.array([{}])), "it holds Python objects, not numbers"),
        (npz()[:-30], CUT),
        (damaged(), CUT),
        (headed("{'descr': ("), CUT),
        *((headed(header), CUT) for header in HEADERS),
        *((packed(zipfile.ZIP_STORED, headed(header)), CUT) for header in HEADERS),
        *((changed(packed(method, npy())), CUT) for method in METHODS),
        (headed("{'descr': '<f8', 'fortran_order': False, 'shape': (1" + 30 * "0" + ",)}"), CUT),
        (zip_of_text(), "'x.txt' in it is not an array"),
        (bomb(), "there is no memory for it: "),
    ],
)
def test_a_file_that_is_no_array_is_named_in_one_line(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_inputs(path, None)
    assert str(caught.value).startswith(f"{path} cannot be read: {reason}")


def test_what_a_stage_lacks_is_said_below_its_ledger() -> None:
    line = StageLine(
        "rest", 0, 0, is_on_path=False, is_answer=True, ledger=Ledger(), reason="Internal: [x] raised"
    )
    console = plain_console()
    with console.capture() as shown:
        console.print(stages_table([line]))
    assert "rest: Internal: [x] raised" in shown.get()
