"""Flight recorder: what entered a core and what left it, in one append-only file, and the same again.

A core reads no clock and draws no lots, so its events with their moments are all there is to a run: played into a
fresh core they give the same actions, or a bug. Each event is one MessagePack value,

    [now_ms, kind, peer, late_ms, message or reason, [[peer, message], …]]

with messages as the wire has them (`fabric/codec.py`), empty where one cannot be sent: a history goes as far as the first event with one
that was heard and would be too long. The first value of a file says what core it was. A file that
reaches half of what the journal may take becomes `FILE.1`, in place of the one before it: a history can be replayed
as long as its beginning is there.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import msgpack
from msgspec import Struct

from fabric.codec import checked, decode, encode
from fabric.errors import ConfigError, FabricError, LocalProtocolError
from fabric.ids import Epoch, PeerId
from fabric.messages import WIRE_VERSION, AnyMessage, Envelope, Parcel
from roles.runtime.core import Core, Heard, Lost, Send, Tick

VERSION = 1
BYTES_MAX = 256 << 20  # about a million events of a busy scheduler
# At most so often, and with an event. Who is killed takes along what came since: what an idle core did last is written with the
# next heartbeat of a peer.
FLUSH_EVERY_MS = 100.0
VALUE_BYTES_MAX = 64 << 20
ITEMS_MAX = 1 << 20  # actions of one event

log = logging.getLogger("tenuto")

Event = Heard | Lost | Tick
MessageCore = Core[Event, Send]

_HEARD, _LOST, _TICK = 0, 1, 2


def packed(message: AnyMessage) -> bytes:
    """A message as the wire has it. Raises LocalProtocolError out of bounds."""
    return encode(Envelope(WIRE_VERSION, Epoch(0), 0.0, (checked(Parcel((), message)),)))


def packed_or_empty(message: AnyMessage) -> bytes:
    """The same; empty where it cannot be sent.

    Of our own a shell says so, and goes on. One that was heard may be longer as we would write it than it was: a peer may
    write whole numbers for floats, and leave out what has a default.
    """
    try:
        return packed(message)
    except LocalProtocolError:
        return b""


def unpacked(header: bytes) -> AnyMessage:
    """The message in it. Raises RemoteProtocolError for anything else."""
    return decode(header).parcels[0].body


class Entry(Struct, frozen=True):
    """One event as it was recorded. `sent`: peer and packed message of each action, empty where it could not be sent."""

    now_ms: float
    event: Event
    sent: tuple[tuple[PeerId, bytes], ...]


class Journal:
    """Writes one. `about` says whose core it is; an earlier journal of that name is replaced.

    Where it cannot be begun or written on, as on a full disk, it ends there: `events_lost` counts what came later, and events of
    messages that cannot be written. Whether
    it may be written at all `require_journal` says before.
    """

    def __init__(self, path: Path, about: bytes, bytes_max: int = BYTES_MAX) -> None:
        self.events_lost = 0
        self._path = path
        self._about = about
        self._bytes_max = bytes_max
        self._written = 0
        self._entries = 0
        self._flush_at_ms = 0.0
        self._file: BinaryIO | None = None
        self._has_begun = False
        try:
            _rotated(path).unlink(missing_ok=True)
            self._begin()
        except OSError as error:
            self._give_up(error)

    def note(self, event: Event, now_ms: float, actions: Sequence[Send]) -> None:
        """Record one event and what came of it."""
        if self._file is None:
            self.events_lost += 1
            return
        sent: list[tuple[str, bytes]] = []
        last: AnyMessage | None = None
        header = b""
        for action in actions:
            if action.message is not last:  # a directory goes to many
                last, header = action.message, packed_or_empty(action.message)
            sent.append((action.peer, header))
        match event:
            case Heard(peer, message, late_ms):
                content = packed_or_empty(message)
                self.events_lost += not content
                fields: tuple[object, ...] = (_HEARD, peer, float(late_ms), content)
            case Lost(peer, reason):
                fields = (_LOST, peer, 0.0, reason.encode())
            case Tick():
                fields = (_TICK, "", 0.0, b"")
        try:
            self._write(self._file, (float(now_ms), *fields, sent))
            self._entries += 1
            if self._written >= self._bytes_max // 2:
                self._file.close()
                self._path.replace(_rotated(self._path))
                self._begin()
            elif now_ms >= self._flush_at_ms:
                self._flush_at_ms = now_ms + FLUSH_EVERY_MS
                self._file.flush()
        except OSError as error:
            self.events_lost += 1
            self._give_up(error)

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.events_lost += 1
                self._give_up(error)

    def set_aside(self) -> None:
        """After its end: give it the name `kept_aside` says, so that the next journal does not replace it.

        What has that name, of an earlier process of this pid, is given up: a part of that is none of this history.
        """
        if not self._has_begun:  # what is there is another one's
            return
        aside = kept_aside(self._path)
        for path, new in ((_rotated(self._path), _rotated(aside)), (self._path, aside)):
            with suppress(OSError):  # the journal ended early, or had one part
                new.unlink(missing_ok=True)
                path.replace(new)

    def _give_up(self, error: OSError) -> None:
        log.error("journal_ends path=%s events=%d reason=%r", self._path, self._entries, error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # it tries once more to write what it has
                file.close()

    def _begin(self) -> None:
        self._file = self._path.open("wb")
        self._has_begun = True
        self._written = 0
        self._write(self._file, (VERSION, WIRE_VERSION, self._entries, self._about))

    def _write(self, file: BinaryIO, value: object) -> None:
        data: bytes = msgpack.packb(value)
        self._written += len(data)
        file.write(data)


class Recorded:
    """A core that is recorded; in all else the core itself."""

    def __init__(self, core: MessageCore, journal: Journal) -> None:
        self._core = core
        self._journal = journal

    @property
    def wake_at_ms(self) -> float | None:
        """See `roles.runtime.core.Core`."""
        return self._core.wake_at_ms

    def handle(self, event: Event, now_ms: float) -> Sequence[Send]:
        """See `roles.runtime.core.Core`."""
        actions: Sequence[Send] = ()
        try:
            actions = self._core.handle(event, now_ms)
        finally:  # an event that raises is the one that a replay is for
            self._journal.note(event, now_ms, actions)
        return actions


# ---------------------------------------------------------------- reading and playing


class Difference(Struct, frozen=True):
    """Where a replay went another way: the event's number (from 0), and the first action that differs."""

    number: int
    now_ms: float
    event: str
    recorded: str | None
    replayed: str | None


class Replay(Struct, frozen=True):
    """What a replay found. `is_cut`: the file ends within an event, as after a crash, or the next one could not be written.

    `defect`: the traceback of what the event after those raised.
    """

    events: int
    actions: int
    difference: Difference | None
    is_cut: bool
    defect: str = ""


def replay(path: Path, core_from: Callable[[bytes], MessageCore]) -> Replay:
    """Play a journal into a fresh core made from what it says of itself, up to the first difference or defect.

    Raises ConfigError for a file that is no journal, or whose beginning is gone.
    """
    reader = JournalReader(path)
    core = core_from(reader.about)
    events = actions = 0
    for entry in reader.entries():
        try:
            sent = core.handle(entry.event, entry.now_ms)
        except Exception:  # noqa: BLE001  what a core raises is a defect, and this is how it is looked at
            return Replay(events, actions, None, is_cut=False, defect=traceback.format_exc())
        played = [(send.peer, packed_or_empty(send.message)) for send in sent]
        for recorded, replayed in zip_longest(entry.sent, played):
            if recorded != replayed:
                found = Difference(events, entry.now_ms, str(entry.event), _shown(recorded), _shown(replayed))
                return Replay(events, actions, found, is_cut=False)
        events += 1
        actions += len(played)
    return Replay(events, actions, None, reader.is_cut)


class JournalReader:
    """Reads one, rotated part first. `about` is what was given to `Journal`."""

    def __init__(self, path: Path) -> None:
        self._paths = [one for one in (_rotated(path), path) if one.exists()] or [path]
        self.is_cut = False
        first, self.about = _head(self._paths[0], next(self._values(self._paths[0]), None))
        if first:
            raise ConfigError(
                f"{path}: the first {first} events were given up for newer ones, so there is nothing to start from;"
                " record with a larger limit"
            )

    def entries(self) -> Iterator[Entry]:
        """Every event, in order. Raises ConfigError for what is none, and for a second part of another history."""
        events = 0
        for path in self._paths:
            values = self._values(path)
            if (head := next(values, None)) is None:  # it was begun, and the disk was full
                return
            first, about = _head(path, head)
            if (first, about) != (events, self.about):
                raise ConfigError(
                    f"{path}: goes on behind {first} events, and {self._paths[0]} has {events}: they are parts of two histories;"
                    " move one of them away to play the other"
                )
            for value in values:
                try:
                    entry = _entry(value)
                except (FabricError, TypeError, ValueError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{path}: not a journal's event: {error}") from error
                if entry is None:
                    self.is_cut = True
                    return
                yield entry
                events += 1

    def _values(self, path: Path) -> Iterator[object]:
        try:
            with path.open("rb") as file:
                unpacker = msgpack.Unpacker(
                    file,
                    max_buffer_size=VALUE_BYTES_MAX,
                    # Room for as many items as a header promises is made before the first one is read.
                    max_array_len=ITEMS_MAX,
                    max_map_len=ITEMS_MAX,
                )
                yield from unpacker
                self.is_cut = unpacker.tell() < path.stat().st_size
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (msgpack.UnpackException, ValueError) as error:
            raise ConfigError(f"{path}: not a journal: {error}") from error


def _head(path: Path, value: object) -> tuple[int, bytes]:
    """How many events came before this part, and whose core it is of."""
    match value:
        case [int(version), int(wire), int(first), bytes(about)]:
            if (version, wire) != (VERSION, WIRE_VERSION):
                raise ConfigError(
                    f"{path}: a journal of version {version}.{wire}, not {VERSION}.{WIRE_VERSION}"
                )
            return first, about
        case _:
            raise ConfigError(f"{path}: not a journal")


def _entry(value: object) -> Entry | None:
    """None: its message could not be written."""
    match value:
        case [float(now_ms), int(kind), str(peer), float(late_ms), bytes(content), list(sent)]:
            actions = tuple(map(_action, sent))
            if kind == _HEARD:
                if not content:
                    return None
                return Entry(now_ms, Heard(PeerId(peer), unpacked(content), late_ms), actions)
            if kind == _LOST:
                return Entry(now_ms, Lost(PeerId(peer), content.decode()), actions)
            return Entry(now_ms, Tick(), actions)
        case _:
            raise ValueError("six fields were expected")


def _action(value: object) -> tuple[PeerId, bytes]:
    match value:
        case [str(to), bytes(header)]:
            return PeerId(to), header
        case _:
            raise ValueError("an action is a peer and a message")


def _shown(sent: tuple[PeerId, bytes] | None) -> str | None:
    if sent is None:
        return None
    peer, header = sent
    return f"to {peer}: {unpacked(header) if header else 'a message that could not be sent'}"


def require_journal(path: Path) -> None:
    """Raise ConfigError where no journal may be written. What is there stays, until one begins."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"cannot write the journal {path}: {error.strerror}") from error


def kept_aside(path: Path) -> Path:
    """What becomes of this process's journal when a defect ends it."""
    return path.with_name(f"{path.name}-{os.getpid()}")


def _rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
