"""What a worker that was killed leaves in the run directory: its id is never used again, so nobody would take that over."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Final

# Of the worker, of a pipeline's stages by number, and where the ranks of a gang meet. What another name goes on with is another
# worker's: node `a-1.b` may be beside node `a`.
_LEFT: Final = re.compile(r"(sock|\d+)(\.stream|\.lock)?|ranks")


def remove_sockets(run_dir: Path, worker_id: str) -> None:
    """To be called when it has ended: sockets, their locks, and those of its later stages."""
    prefix = f"{worker_id}."
    with contextlib.suppress(OSError):  # the directory itself is gone
        for path in list(run_dir.iterdir()):
            if path.name.startswith(prefix) and _LEFT.fullmatch(path.name.removeprefix(prefix)):
                with contextlib.suppress(OSError):
                    path.unlink()
