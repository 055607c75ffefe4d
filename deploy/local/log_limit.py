"""The log of a cluster in the background, which all its processes write: bounded, however long it runs and whatever they say."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Never

from roles.runtime.loop.sources import TimedSource
from roles.runtime.process import remove_file
from roles.runtime.run_directory import LOG_FILE, OLD_LOG_FILE, is_at

LOG_BYTES_MAX: Final = 32 << 20
LOOK_EVERY_MS: Final = 10_000.0


class LogLimit(TimedSource[Never]):
    """Looks at the log's size now and then; one that is too long is copied aside, over the last copy, and begins anew.

    Its writers go on: they append, so the next line is the new beginning. What they write between copy and cut is lost.
    """

    def __init__(self, run_dir: Path, bytes_max: int = LOG_BYTES_MAX) -> None:
        self._path = run_dir / LOG_FILE
        self._old = run_dir / OLD_LOG_FILE
        self._bytes_max = bytes_max
        self._look_at_ms: float | None = 0.0 if _is_our_stderr(self._path) else None

    @property
    def wake_at_ms(self) -> float | None:
        """Never, where there is a terminal."""
        return self._look_at_ms

    def take(self, limit: int, now_ms: float) -> Sequence[Never]:
        """No events."""
        del limit
        if self._look_at_ms is not None and now_ms >= self._look_at_ms:
            self._look_at_ms = now_ms + LOOK_EVERY_MS
            with contextlib.suppress(OSError):  # somebody removed it
                if self._path.stat().st_size > self._bytes_max:
                    self._begin_anew()
        return ()

    def _begin_anew(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: all the more reason to cut
            shutil.copyfile(self._path, self._old)
        os.truncate(self._path, 0)


def forget_former_log(run_dir: Path) -> None:
    """Remove what a cluster that was killed has said there, for whoever begins the next one; what this process writes itself stays."""
    for path in (run_dir / LOG_FILE, run_dir / OLD_LOG_FILE):
        if not _is_our_stderr(path):
            remove_file(path)


def _is_our_stderr(path: Path) -> bool:
    try:
        return is_at(sys.__stderr__.fileno(), path)  # type: ignore[union-attr]
    except (OSError, AttributeError, ValueError):
        return False
