"""Memory that processes of one host share, so that large tensors need not travel between them.

A sender copies a tensor once into its `Arena` and sends where it lies (`Region`); a receiver reads it there through
`Borrowed`. Nothing else of a message changes, and who cannot share gets frames as ever.

An arena is a memfd of fixed size: it has no name in any folder, so nothing is left behind by a process that was
killed, and it is sealed against shrinking, so a sender cannot pull memory away under a reader. Others open it by
`/proc/PID/fd/N`, which the kernel grants to the same user in the same process namespace; both are in
`memory_address()`, and two processes share exactly if these are equal.

A place is its request's until the request has its answer. Where a worker may have it in a batch by then, as the request ended
early or was granted more than once, it is nobody else's for a second longer (`Region.lend`): the batch is others' too. A reader
that comes even later may find another request's bytes there.

A reader may pass a place on. It names the arena by its own descriptor then, which stays open as long as it keeps the place, or has
lent it: whoever comes next can open it though its owner has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import weakref
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final

from fabric.clock import Clock, MonotonicClock
from fabric.errors import RemoteProtocolError
from fabric.messages import SharedAt

SCHEME: Final = "memory://"
SWITCH: Final = "TENUTO_SHARED_MEMORY"
ARENAS_BORROWED_MAX: Final = 1_024
ARENAS_LOOKED_AT_MAX: Final = 128  # at once: each takes some 8 us
ARENAS_LOOKED_AT_TO_OPEN: Final = 4  # so clients that come and go in a moment leave little behind
ALIGNMENT: Final = 4_096  # whole pages: the bytes of two requests never share a cache line
EPOCH_PUTS: Final = 512
EPOCHS_KEPT: Final = 4  # pages that none of the last so many epochs needed go back to the system
TRIM_BYTES_MAX: Final = 1 << 20  # with one put: it takes some 0.1 ms
LENT_MS: Final = 1_000.0
_NAME_PREFIX: Final = "tenuto-"
_NAME: Final = re.compile(
    rf"([1-9][0-9]{{0,9}})/(0|[1-9][0-9]{{0,9}})/([1-9][0-9]{{0,15}})/({_NAME_PREFIX}[0-9a-f]{{32}})"
)
_SEALS: Final = (
    getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
)


@cache
def memory_address() -> str:
    """`memory://` and the boot, the user and the process namespace of this process; empty: it cannot share.

    `TENUTO_SHARED_MEMORY=0` in the environment of a process forbids it.
    """
    if not hasattr(os, "memfd_create") or not _SEALS or os.environ.get(SWITCH) == "0":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").readlink().name
        # A process that changed its user or may not be dumped is not to be looked into: its own files are root's.
        is_open = Path("/proc/self/fd").stat().st_uid == os.geteuid()
    except OSError:
        return ""
    return f"{SCHEME}{boot}/{namespace}/{os.geteuid()}" if is_open else ""


def is_shared_with(address: str) -> bool:
    """Whether a process of that memory address can read our arenas, and we its."""
    return bool(address) and address == memory_address()


class Region:
    """Where a tensor's bytes lie in an arena, of ours or somebody else's; given back with the last reference to it."""

    __slots__ = ("_arena", "_is_lent", "at", "data")

    def __init__(self, at: SharedAt, data: memoryview, arena: Arena | _BorrowedArena) -> None:
        self.at = at
        self.data = data
        self._arena = arena
        self._is_lent = False

    def lend(self) -> None:
        """Somebody may read it after it is given back: until `LENT_MS` have passed then, nothing else is put there, and it can be opened."""
        self._is_lent = True

    def __del__(self) -> None:
        self._arena.note_left(self.at.offset, len(self.data), is_lent=self._is_lent)


class Arena:
    """Our own shared memory. Pages are taken from the system as they are first used.

    Those at its end that were not needed for some thousands of puts are given back, ours and every reader's, so that a
    burst leaves nothing behind once it has been over for a while. Raises OSError where the system gives none
    (a limit on file sizes holds for it too).
    """

    def __init__(self, size: int, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        name = _NAME_PREFIX + secrets.token_hex(16)
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._fd, size)
        except OSError:
            self.close()
            raise
        self.name = f"{os.getpid()}/{self._fd}/{size}/{name}"
        self._bytes = memoryview(self._map)
        self._free: list[tuple[int, int]] = [(0, size)]  # offset and size, by offset, never adjacent
        self._left: deque[tuple[int, int]] = deque()  # a place may be dropped on any thread
        self._lent: deque[tuple[float, int, int]] = deque()  # likewise; until when nothing is put there
        self._touched = 0  # up to there pages may be ours
        self._needed = deque([0], EPOCHS_KEPT)  # how far each of the last epochs reached
        self._puts = 0

    def put(self, data: memoryview) -> Region | None:
        """Copy bytes in; None when there is no room for them."""
        size = len(data)
        taken = size + -size % ALIGNMENT
        while self._left:
            self._give_back(*self._left.popleft())
        if self._lent:
            now_ms = self._clock.now_ms()
            while self._lent and self._lent[0][0] <= now_ms:
                self._give_back(*self._lent.popleft()[1:])
        # First fit by offset: what was used last is used again, so few pages are touched and they stay warm.
        index = next((index for index, (_, free) in enumerate(self._free) if free >= taken), None)
        if index is None:
            return None
        offset, free = self._free.pop(index)
        if free > taken:
            self._free.insert(index, (offset + taken, free - taken))
        self._trim(offset + taken)
        own = self._bytes[offset : offset + size]
        own[:] = data
        return Region(SharedAt(self.name, offset), own, self)

    def _trim(self, end: int) -> None:
        """Somebody needs what is before `end`; give back some of what nobody has needed lately."""
        needed = self._needed
        needed[-1] = max(needed[-1], end)
        self._touched = max(self._touched, end)
        self._puts += 1
        if self._puts >= EPOCH_PUTS:
            self._puts = 0
            needed.append(0)
        if self._touched > max(needed) and self._free:
            offset, size = self._free[-1]
            if offset + size == len(self._bytes):
                start = max(offset, *needed, self._touched - TRIM_BYTES_MAX)
                if start < self._touched:
                    with contextlib.suppress(OSError):  # where the system cannot, they stay
                        self._map.madvise(mmap.MADV_REMOVE, start, self._touched - start)
                    self._touched = start

    def note_left(self, offset: int, size: int, *, is_lent: bool = False) -> None:
        """A place is given back, now or when nobody reads it any more; safe from any thread."""
        taken = size + -size % ALIGNMENT
        if is_lent:
            self._lent.append((self._clock.now_ms() + LENT_MS, offset, taken))
        else:
            self._left.append((offset, taken))

    def close(self) -> None:
        """Readers keep what they have open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_back(self, offset: int, size: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            self._free[index - 1] = (offset, before + size)
        else:
            self._free.insert(index, (offset, size))


class Borrowed:
    """Other processes' arenas, opened when first named and kept while their owners have them open.

    Whoever has one says `forget_gone` now and then: what is mapped is there, though its owner is not.
    """

    def __init__(self, arenas_max: int = ARENAS_BORROWED_MAX, clock: Clock | None = None) -> None:
        self._arenas_max = arenas_max
        self._clock = clock or MonotonicClock()
        self._arenas: OrderedDict[str, _BorrowedArena] = OrderedDict()  # those named longest ago first
        self._lent: dict[_BorrowedArena, float] = {}  # until when they stay open
        self._to_look_at: list[str] = []

    def place(self, at: SharedAt, size: int) -> Region:
        """The bytes that a message says are there, read-only. Raises RemoteProtocolError if they are not."""
        arena = self._arenas.get(at.arena)
        if arena is None:
            arena = self._open(at.arena)
        else:
            self._arenas.move_to_end(at.arena)
        if at.offset + size > len(arena.data):
            raise RemoteProtocolError(
                f"{size} bytes at {at.offset} of shared memory that has {len(arena.data)} bytes"
            )
        return Region(SharedAt(arena.name, at.offset), arena.data[at.offset : at.offset + size], arena)

    def __len__(self) -> int:
        return len(self._arenas)

    def __bool__(self) -> bool:
        """Whether `forget_gone` may find something."""
        return bool(self._arenas or self._lent)

    def forget_gone(self) -> None:
        """Those whose owners have closed them, or have ended, are unmapped when the last tensor in them is gone, and nobody may read one yet.

        Where there are many, some of them are looked at with each call, in turn.
        """
        now_ms = self._clock.now_ms()
        for arena, until_ms in list(self._lent.items()):
            if until_ms <= now_ms:
                del self._lent[arena]
        if not self._to_look_at:
            self._to_look_at = list(self._arenas)
        looked_at = self._to_look_at[-ARENAS_LOOKED_AT_MAX:]
        del self._to_look_at[-ARENAS_LOOKED_AT_MAX:]
        self._look_at(looked_at)

    def _look_at(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._arenas and not _is_there(name):
                del self._arenas[name]

    def _open(self, name: str) -> _BorrowedArena:
        self._look_at(list(islice(self._arenas, ARENAS_LOOKED_AT_TO_OPEN)))
        if len(self._arenas) >= self._arenas_max:  # to open it again takes 0.1 ms
            self._arenas.popitem(last=False)
        arena = self._arenas[name] = _BorrowedArena(name, self._lent, self._clock)
        return arena


class _BorrowedArena:
    """Somebody else's. `name` is that of our own descriptor, which is closed when the last view of `data` is gone.

    Raises RemoteProtocolError for what is none, or cannot be opened.
    """

    __slots__ = ("_clock", "_lent", "data", "name")

    def __init__(self, name: str, lent: dict[_BorrowedArena, float], clock: Clock) -> None:
        path, size, own_name = _parsed(name)
        with contextlib.ExitStack() as refused:
            fd = _opened(path, own_name)
            refused.callback(os.close, fd)
            try:
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                    raise RemoteProtocolError(f"shared memory {name!r:.80} is not sealed at its size")
                mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise RemoteProtocolError(f"shared memory {name!r:.80} cannot be mapped: {error}") from error
            refused.pop_all()
        weakref.finalize(mapped, os.close, fd)
        self.data = memoryview(mapped)
        self.name = f"{os.getpid()}/{fd}/{size}/{own_name}"
        self._lent = lent
        self._clock = clock

    def note_left(self, offset: int, size: int, *, is_lent: bool) -> None:
        """A place in it is not used any more; safe from any thread."""
        del offset, size
        if is_lent:
            self._lent[self] = self._clock.now_ms() + LENT_MS


def _opened(path: str, own_name: str) -> int:
    """A descriptor to read it by, opened only once it is known to be what its name says.

    The name is what somebody sent us, and to open a FIFO or a device may block, or do something.
    """
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            status = os.fstat(found)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or _named(f"/proc/self/fd/{found}") != own_name:
                raise RemoteProtocolError(f"{path} is not that memory")
            return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(found)
    except OSError as error:
        raise RemoteProtocolError(f"shared memory at {path} cannot be opened: {error.strerror}") from error


def _parsed(name: str) -> tuple[str, int, str]:
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise RemoteProtocolError(f"{name!r:.80} cannot be the name of shared memory")
    pid, fd, size, own_name = parts.groups()
    return f"/proc/{pid}/fd/{fd}", int(size), own_name


def _is_there(name: str) -> bool:
    path, _, own_name = _parsed(name)
    return _named(path) == own_name


def _named(path: str) -> str:
    """What memory a descriptor is; empty: none of ours, or closed."""
    with contextlib.suppress(OSError):
        shown = os.readlink(path)  # noqa: PTH115  a Path takes three times as long, and there may be many to look at
        if shown.startswith(f"/memfd:{_NAME_PREFIX}"):
            return shown.removeprefix("/memfd:").removesuffix(" (deleted)")
    return ""
