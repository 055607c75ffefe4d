"""When a defect of ours slips through all the same: it is written down, one line says where, and the process ends.

The file is `<run dir>/<role id>-<pid>.defect`: the traceback, then the last events of the role, newest first, with how
long before the end each of them was. It is text, for people. The process ends at once, as if it were killed: nothing
that others rely on in that case (the kept plan, the records of workers) is taken away by an end that was not in order.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from msgspec import Struct

from fabric.clock import Clock, MonotonicClock
from roles.runtime.exit_codes import EXIT_DEFECT
from roles.runtime.loop.driver import Role

SUFFIX: Final = ".defect"
HEADLINE: Final = "A defect of Tenuto"
FILES_MAX = 8  # of one run directory; the oldest go
WITHIN_MS = 50.0  # for the events: the process is to end within twice that
EVENT_CHARS_MAX = 2_000
BYTES_MAX = 8 << 20


class DefectReport(Struct, frozen=True):
    """How the process of a role ends when its loop raises.

    `journal`: what is being recorded of it. `before_end`: what must not be left out even then, in a few ms.
    """

    role_id: str
    run_dir: Path
    journal: Path | None = None
    before_end: Callable[[], None] | None = None

    def end(self, error: Exception, roles: Sequence[Role[Any, Any]]) -> NoReturn:
        """Write it down, say so, and end the process with `EXIT_DEFECT`."""
        try:
            if self.before_end is not None:
                self.before_end()
            self.tell(error, roles)
        finally:
            os._exit(EXIT_DEFECT)

    def tell(self, error: Exception, roles: Sequence[Role[Any, Any]] = ()) -> None:
        """Write it down, and say where in one line on stderr."""
        clock = MonotonicClock()
        path = self.run_dir / f"{self.role_id}-{os.getpid()}{SUFFIX}"
        text = "\n".join([*self._head(error), *_last_events(roles, clock)])
        what = f"tenuto: a defect of Tenuto ended {self.role_id} ({type(error).__name__})"
        try:
            _make_room(self.run_dir)
            with _made(path) as file:
                file.write(text)
            line = f"{what}; what is known of it is in {file.name}\n"
        except OSError as refused:  # better a traceback on stderr than none
            line = f"{''.join(traceback.format_exception(error))}{what}; {path} cannot be written: {refused.strerror}\n"
        with suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(line)
            sys.stderr.flush()

    def _head(self, error: Exception) -> Iterator[str]:
        yield f"{HEADLINE} ended {self.role_id} (process {os.getpid()}, Python {sys.version.split()[0]})."
        yield "Please send this file to those who maintain Tenuto."
        if self.journal is not None:
            yield f"To see it again, from the start: tenuto replay {self.journal}"
        else:
            yield "Only its last events are known. A scheduler started with --journal FILE keeps all of them, for"
            yield "tenuto replay FILE (docs/operate/replay.md)."
        yield ""
        yield "".join(traceback.format_exception(error))


def _last_events(roles: Sequence[Role[Any, Any]], clock: Clock) -> Iterator[str]:
    now_ms = clock.now_ms()
    size = 0
    for role in roles:
        yield f"The last {len(role.recent)} events of {role.name}, newest first (ms before the end):"
        for at_ms, event in reversed(role.recent):
            line = f"{now_ms - at_ms:12.3f}  {_shown(event)}"
            size += len(line)
            if size > BYTES_MAX or clock.now_ms() > now_ms + WITHIN_MS:
                yield "and older ones, for which there was no time"
                return
            yield line
        yield ""


def _shown(event: object) -> str:
    try:
        return repr(event)[:EVENT_CHARS_MAX]
    except Exception as error:  # noqa: BLE001  the process ends here, and the rest is worth more than this line
        return f"{type(event).__name__}, which cannot be shown: {type(error).__name__}"


def _made(path: Path) -> TextIO:
    """A new file of that name, or of another one where that is taken: whoever else may write there can foresee the name."""
    if os.path.lexists(path):
        path = path.with_stem(f"{path.stem}-{os.urandom(4).hex()}")
    return open(
        path,
        "x",
        encoding="utf-8",
        errors="backslashreplace",
        opener=lambda name, flags: os.open(name, flags, 0o600),
    )


def _make_room(run_dir: Path) -> None:
    """For one more file. Other users' stay."""
    found = []
    for path in run_dir.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # it went just now
            status = path.lstat()
            if status.st_uid == os.getuid():
                found.append((status.st_mtime_ns, path))
    for _, path in sorted(found)[: max(0, len(found) - FILES_MAX + 1)]:
        path.unlink(missing_ok=True)
