"""What every test with processes stands on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of the test's own, with a name so short that paths of sockets in it keep to their 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="t-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
