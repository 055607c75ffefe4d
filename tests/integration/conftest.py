"""What every test with processes stands on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.sockets.local_streams import SWITCH, are_allowed


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    """Every folder of a test with processes has a short name."""
    return short_path


@pytest.fixture(params=["local streams", "zeromq alone"])
def streams_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test, its cluster and its clients, with local streams and without."""
    if request.param == "zeromq alone":
        monkeypatch.setenv(SWITCH, "0")
    are_allowed.cache_clear()
    yield
    are_allowed.cache_clear()
