"""What roles said, with the moments of its lines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FIRST_BYTES_MAX = 4 << 20
"""Of a log that was never read, with what it said before it began anew: no more than its end."""
TURN_BYTES_MAX = 1 << 20
_MOMENT = re.compile(
    r"((?:19[7-9]|2[0-9][0-9])[0-9]-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}),([0-9]{3}) "
)


class LogReader:
    """One role's log, followed over its rotation. A line without a moment has that of the line before, but at the end of the file its last change.

    `older`: where its lines are that were there before it began anew, the newest file first.
    """

    def __init__(self, path: Path, older: Sequence[Path] = (), bytes_max: int = FIRST_BYTES_MAX) -> None:
        self._path = path
        self._older = older
        self._bytes_max = bytes_max
        self._inode = 0
        self._offset = 0
        self._at_ms = 0.0

    def read(self) -> Iterator[tuple[float, str]]:
        """What has come since the last time: whole lines, with milliseconds since 1970."""
        older, self._older = self._older, ()
        if older:
            yield from self._read_older(older)
        try:
            with self._path.open("rb") as file:
                found = self._path.stat()
                if found.st_ino != self._inode or found.st_size < self._offset:
                    is_first = self._inode == 0
                    self._inode = found.st_ino
                    self._offset = max(0, found.st_size - self._bytes_max) if is_first else 0
                file.seek(self._offset)
                while chunk := file.read(TURN_BYTES_MAX):
                    end = chunk.rfind(b"\n") + 1
                    if not end and len(chunk) == TURN_BYTES_MAX:
                        end = len(chunk)  # a bar that shows progress never ends its line
                    if not end:
                        break
                    self._offset += end
                    lines = list(map(_timed, chunk[:end].decode("utf-8", "replace").splitlines()))
                    is_last = self._offset >= found.st_size
                    yield from self._completed(lines, found.st_mtime * 1e3 if is_last else 0.0)
                    file.seek(self._offset)
        except OSError:
            return

    def _read_older(self, older: Sequence[Path]) -> Iterator[tuple[float, str]]:
        readers: list[LogReader] = []
        left = self._bytes_max - _size(self._path)
        for path in older:
            if left > 0:
                readers.append(LogReader(path, bytes_max=left))
            left -= _size(path)
        for reader in reversed(readers):
            for self._at_ms, line in reader.read():
                yield self._at_ms, line

    def _completed(
        self, lines: list[tuple[float | None, str]], changed_at_ms: float
    ) -> Iterator[tuple[float, str]]:
        """`changed_at_ms`: of the file, whose end these are; 0: more follows."""
        ends = max((at for at, (at_ms, _) in enumerate(lines) if at_ms is not None), default=-1)
        first_ms = next((at_ms for at_ms, _ in lines if at_ms is not None), changed_at_ms)
        self._at_ms = self._at_ms or first_ms
        for at, (at_ms, line) in enumerate(lines):
            if at_ms is not None:
                self._at_ms = at_ms
            elif at > ends:
                self._at_ms = max(self._at_ms, changed_at_ms)
            yield self._at_ms, line


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _timed(line: str) -> tuple[float | None, str]:
    moment = _MOMENT.match(line)
    if moment is None:
        return None, line
    try:
        at_s = time.mktime(time.strptime(moment[1], "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):  # whoever wrote that: it is none
        return None, line
    return at_s * 1e3 + float(moment[2]), line[moment.end() :]
