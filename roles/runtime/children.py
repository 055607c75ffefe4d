"""Child processes by handle: spawned, watched, listened to, and always reaped.

Each child is watched through a pidfd, which becomes readable the moment it ends (however it ends) and can
never name somebody else's process. What it prints comes through a pipe, goes on to our stderr, and its tail is
kept: the last words of a process are the best explanation of its end.

Children get a process group of their own. A Ctrl-C at the terminal then reaches the one process that the
person started, which ends the others in order, instead of reaching all of them at once.

Spawn from the main thread only: children ask to be killed when the *thread* that spawned them ends.

A process that somebody else started can be adopted: it is watched and ended just so, but how it ended and what it
said is not ours to know.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roles.runtime.exit_codes import EXIT_NOT_STARTED, EXIT_UNKNOWN
from roles.runtime.identities import ProcessIdentity, is_over, open_handle
from roles.runtime.process import child_environment, takes_more
from roles.runtime.process_events import ProcessExited

LAST_WORDS_BYTES_MAX = 4_096
_READ_BYTES = 65_536
_PAGE_BYTES = 4_096  # what a pipe with any room takes at once

log = logging.getLogger("tenuto")


@dataclass(slots=True)
class _Child:
    name: str
    pid: int
    pid_fd: int
    process: subprocess.Popen[bytes] | None = None  # None: adopted
    said_fd: int = -1
    last_words: bytes = b""

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # ended just now
            signal.pidfd_send_signal(self.pid_fd, number)


class Processes:
    """The children of this process, as a source of the driver: each gives one `ProcessExited`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._by_fd: dict[int, _Child] = {}
        self._by_name: dict[str, _Child] = {}
        self._stillborn: list[ProcessExited] = []

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        """Start a child of a name that no living child has. It dies with this process.

        `environment` is added to what is `inherited`, else to all of our own.
        A command that cannot be started gives a `ProcessExited` like one that ended at once.
        """
        assert name not in self._by_name, f"{name} runs already"
        try:
            process = subprocess.Popen(  # noqa: S603  the command line is ours, and no shell reads it
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # what a user's model prints is worth reading too
                env=child_environment(inherited) | dict(environment or {}),
                process_group=0,
            )
        except OSError as error:
            self.refuse(name, error)
            return
        assert process.stdout is not None, "asked for a pipe"
        child = _Child(name, process.pid, os.pidfd_open(process.pid), process, process.stdout.fileno())
        os.set_blocking(child.said_fd, False)
        self._watch(child)
        log.info("child_started name=%s pid=%d", name, process.pid)

    def refuse(self, name: str, error: OSError) -> None:
        """A child that the host does not let us start: it counts as one that ended at once."""
        self._stillborn.append(ProcessExited(name, EXIT_NOT_STARTED, f"could not be started: {error}"))

    def adopt(self, name: str, identity: ProcessIdentity) -> bool:
        """Watch a process that somebody else started; False when it is gone."""
        assert name not in self._by_name, f"{name} runs already"
        handle = open_handle(identity)
        if handle is None:
            return False
        self._watch(_Child(name, identity.pid, handle))
        log.info("process_adopted name=%s pid=%d", name, identity.pid)
        return True

    def release(self, name: str) -> None:
        """Watch it no longer and let it live; nothing if it is gone."""
        child = self._by_name.get(name)
        if child is not None:
            if child.process is not None:
                child.process.returncode = 0  # nothing to warn of when this handle goes
            self._forget(child)

    def release_all(self) -> None:
        """Watch nobody any longer."""
        for name in list(self._by_name):
            self.release(name)

    def terminate(self, name: str) -> None:
        """SIGTERM; nothing if it is gone."""
        if name in self._by_name:
            self._by_name[name].signal(signal.SIGTERM)

    def kill(self, name: str) -> None:
        """SIGKILL; nothing if it is gone."""
        if name in self._by_name:
            self._by_name[name].signal(signal.SIGKILL)

    def pid(self, name: str) -> int | None:
        """The pid of a living child."""
        child = self._by_name.get(name)
        return None if child is None else child.pid

    def close(self) -> None:
        """Kill whatever is left, adopted processes too, wait for each at most a second, and give the descriptors back."""
        for child in list(self._by_name.values()):
            child.signal(signal.SIGKILL)
        for child in list(self._by_name.values()):
            if not is_over(child.pid_fd, 1.0):
                log.warning("child_stuck name=%s pid=%d", child.name, child.pid)
            elif child.process is not None:
                child.process.wait()
            self._forget(child)
        self._epoll.close()

    # The driver's side.

    def fileno(self) -> int:
        """Readable when a child ended or said something."""
        return self._epoll.fileno()

    @property
    def has_more(self) -> bool:
        """Whether a child ended or said something."""
        return bool(self._stillborn)

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[ProcessExited]:  # noqa: ARG002  a Source's signature
        """Those that ended; what the others said is passed on."""
        exited, self._stillborn = self._stillborn, []
        for descriptor, _ in self._epoll.poll(0, limit):
            child = self._by_fd.get(descriptor)
            if child is None:
                continue  # its other descriptor came first and it is gone
            if descriptor == child.said_fd:
                self._listen(child)
            else:
                exited.append(self._bury(child))
        return exited

    def _listen(self, child: _Child) -> bool:
        """Take what it wrote; False when there was nothing."""
        try:
            said = os.read(child.said_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not said:  # closed: the pidfd will say the rest
            self._epoll.unregister(child.said_fd)
            del self._by_fd[child.said_fd]
            return False
        child.last_words = (child.last_words + said)[-LAST_WORDS_BYTES_MAX:]
        _pass_on(said)
        return True

    def _bury(self, child: _Child) -> ProcessExited:
        # All it wrote is in the pipe by now. A grandchild may hold the pipe open and write on, so this does
        # not read to the end, but what a pipe can hold at most: 1 MiB, the kernel's limit.
        for _ in range(16):
            if child.said_fd not in self._by_fd or not self._listen(child):
                break
        # At once: the pidfd said so.
        code = EXIT_UNKNOWN if child.process is None else child.process.wait()
        log.info("child_ended name=%s pid=%d code=%d", child.name, child.pid, code)
        self._forget(child)
        return ProcessExited(child.name, code, child.last_words.decode("utf-8", "replace"))

    def _watch(self, child: _Child) -> None:
        self._by_name[child.name] = child
        for descriptor in (child.pid_fd, child.said_fd):
            if descriptor >= 0:
                self._by_fd[descriptor] = child
                self._epoll.register(descriptor, select.EPOLLIN)

    def _forget(self, child: _Child) -> None:
        del self._by_name[child.name]
        for descriptor in (child.pid_fd, child.said_fd):
            if self._by_fd.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)
        os.close(child.pid_fd)
        if child.process is not None:
            assert child.process.stdout is not None, "asked for a pipe"
            child.process.stdout.close()


def _pass_on(said: bytes) -> None:
    if sys.stderr is None:
        return  # it was closed before we started
    try:
        for start in range(0, len(said), _PAGE_BYTES):
            if not takes_more(sys.stderr.fileno()):
                return  # nobody reads it, and whoever waited for that would serve nobody
            sys.stderr.buffer.write(said[start : start + _PAGE_BYTES])
            sys.stderr.flush()
    except (OSError, ValueError):
        pass  # our own stderr is closed; that must not end anybody
