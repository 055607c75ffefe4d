"""What a worker that was killed leaves in the run directory: its agent gives its id to nobody again, so nobody would take that over."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

# Of the worker, of a pipeline's stages by number, and where the ranks of a gang meet. What another name goes on with is another
# worker's: node `a-1.b` may be beside node `a`.
_LEFT: Final = re.compile(r"(sock|\d+)(\.stream|\.lock)?|ranks")


class WorkerSockets:
    """The files in the run directory of an agent's own workers."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._shared: set[str] = set()

    def share(self, worker_id: str) -> None:
        """A former agent's worker, which was not written down, lives under that id too: the files may be its own."""
        self._shared.add(worker_id)

    def remove(self, worker_id: str) -> None:
        """To be called when it has ended: sockets, their locks, and those of its later stages, where they can be no other's."""
        if worker_id in self._shared:
            self._shared.remove(worker_id)
            return
        prefix = f"{worker_id}."
        with contextlib.suppress(OSError):  # the directory itself is gone
            for path in list(self._run_dir.iterdir()):
                if path.name.startswith(prefix) and _LEFT.fullmatch(path.name.removeprefix(prefix)):
                    with contextlib.suppress(OSError):
                        path.unlink()
