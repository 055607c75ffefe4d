"""What `tenuto up` says of itself in `up.json`, tried until it is written: a disk may be full at the moment at which it is news."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Never

from roles.runtime.loop.sources import TimedSource
from roles.runtime.run_directory import UpFile, write_up_file

TRY_EVERY_MS: Final = 1_000.0

log = logging.getLogger("tenuto")


class KeptUpFile(TimedSource[Never]):
    """Says at first that this process is a cluster that starts: OSError where not even that can be written."""

    def __init__(self, run_dir: Path) -> None:
        self.said = UpFile(os.getpid(), is_ready=False, endpoints={})
        self._run_dir = run_dir
        self._try_at_ms: float | None = None
        write_up_file(run_dir, self.said)

    def say(self, up_file: UpFile) -> None:
        """From now on, or as soon as it can be written: who waits for it, or reads it later, has nowhere else to look."""
        if up_file != self.said:
            self.said = up_file
            self._write(0.0)

    @property
    def wake_at_ms(self) -> float | None:
        """The next try; None: it is written."""
        return self._try_at_ms

    def take(self, limit: int, now_ms: float) -> Sequence[Never]:
        """No events."""
        del limit
        if self._try_at_ms is not None and now_ms >= self._try_at_ms:
            self._write(now_ms + TRY_EVERY_MS)
        return ()

    def _write(self, again_at_ms: float) -> None:
        try:
            write_up_file(self._run_dir, self.said)
        except OSError as error:
            if self._try_at_ms is None:  # else it has been said
                log.warning("up_file_not_written path=%s reason=%r", self._run_dir, error.strerror)
            self._try_at_ms = again_at_ms
        else:
            self._try_at_ms = None
