"""A terminal that a command has to itself: keys one by one, and the whole screen. However the command ends, it is as it was before.

Ctrl-C, SIGTERM and a lost connection (SIGHUP) end the command through its `finally`; Ctrl-Z gives the terminal back while the
command is stopped.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

_SEQUENCE_S: Final = 0.05
"""The bytes of one key come together; over a slow line they may lie so far apart."""
_READ_BYTES: Final = 256
_NAMED: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b": "escape",
    b"\t": "tab",
    b"\r": "enter",
    b"\n": "enter",
}
_KEY: Final = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|\x1b|[^\x1b]")
_UNFINISHED: Final = re.compile(rb"\x1b([\[O][0-9;]*)?\Z")


def keys_of(data: bytes) -> list[str]:
    """The keys behind what a terminal sent: a letter as itself, `up`, `down`, `tab`, `enter`, `escape`; others are left out."""
    found = []
    for match in _KEY.finditer(data):
        key = match[0]
        name = _NAMED.get(key) or (key.decode("ascii") if len(key) == 1 and key.isascii() else "")
        if name.isprintable() and name:
            found.append(name)
    return found


def is_unfinished(data: bytes) -> bool:
    """Whether it may be the beginning of a key of which more is on its way."""
    return _UNFINISHED.search(data) is not None


class Suspension:
    """Stops this process when it is asked to, but never amid drawing: whoever stops it draws too, and a stream cannot be written to twice at once."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._is_put_off = False
        self._is_asked = False

    def ask(self, signum: int, frame: FrameType | None) -> None:
        """The handler of SIGTSTP."""
        del signum, frame
        self._is_asked = True
        if not self._is_put_off:
            with self.put_off():
                pass

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Until this is over."""
        self._is_put_off = True
        try:
            yield
            while self._is_asked:
                self._is_asked = False
                self._stop()
        finally:
            self._is_put_off = False


class Screen:
    """The whole of a terminal; see `whole_screen`."""

    def __init__(self, live: Live, console: Console, descriptor: int, suspension: Suspension) -> None:
        self._live = live
        self._suspension = suspension
        self._console = console
        self._descriptor = descriptor

    @property
    def height(self) -> int:
        """Lines; it may change."""
        return self._console.size.height

    def show(self, screen: RenderableType) -> None:
        """Instead of what is there."""
        with self._suspension.put_off():
            self._live.update(screen, refresh=True)

    def keys(self, wait_s: float) -> list[str] | None:
        """Those that were pressed within that time; None: there is nobody any more."""
        if not self._has_bytes(wait_s):
            return []
        data = self._read()
        while data is not None and is_unfinished(data) and self._has_bytes(_SEQUENCE_S):
            more = self._read()
            if more is None:
                return None
            data += more
        return None if data is None else keys_of(data)

    def _has_bytes(self, wait_s: float) -> bool:
        return bool(select.select([self._descriptor], [], [], wait_s)[0])

    def _read(self) -> bytes | None:
        try:
            return os.read(self._descriptor, _READ_BYTES) or None
        except OSError:
            return None


def is_terminal(console: Console) -> bool:
    """Whether both ends are one that can be drawn on."""
    return console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()


@contextlib.contextmanager
def whole_screen(console: Console) -> Iterator[Screen]:
    """Take the terminal, and give it back. Belongs to the main thread: it hears of signals."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    live = Live(
        console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )

    def take() -> None:
        tty.setcbreak(descriptor)
        live.start()

    def give_back() -> None:
        with contextlib.suppress(OSError):
            live.stop()
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        del frame
        sys.exit(128 + signum)

    def stop() -> None:
        give_back()
        os.kill(os.getpid(), signal.SIGSTOP)  # here it stops, and goes on when it is told to
        take()

    suspension = Suspension(stop)
    handlers = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGTSTP: suspension.ask}
    former = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        with suspension.put_off():
            take()
        yield Screen(live, console, descriptor, suspension)
    finally:
        give_back()
        for signum, handler in former.items():
            signal.signal(signum, handler)
