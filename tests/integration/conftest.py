"""What every test with processes stands on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.sockets.local_streams import SWITCH, are_allowed


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of the test's own, with a name so short that paths of sockets in it keep to their 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="t-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["local streams", "zeromq alone"])
def streams_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test, its cluster and its clients, with local streams and without."""
    if request.param == "zeromq alone":
        monkeypatch.setenv(SWITCH, "0")
    are_allowed.cache_clear()
    yield
    are_allowed.cache_clear()
