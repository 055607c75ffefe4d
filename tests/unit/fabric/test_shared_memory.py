"""Shared memory: places never overlap, come back when dropped, and a reader believes nothing it is told."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric import frames, shared_memory
from fabric.clock import VirtualClock
from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.ids import ModelId
from fabric.link import NO_EPOCH, NamedTensor, Packed
from fabric.messages import Infer, SharedAt
from fabric.shared_memory import (
    ALIGNMENT,
    ARENAS_LOOKED_AT_MAX,
    ARENAS_LOOKED_AT_TO_OPEN,
    EPOCH_PUTS,
    EPOCHS_KEPT,
    LENT_MS,
    Arena,
    Borrowed,
    Region,
    is_shared_with,
    memory_address,
)
from fabric.tensors import share

pytestmark = pytest.mark.skipif(not memory_address(), reason="this system has no memory to share")

MESSAGE = Infer(1, ModelId("resnet50"))
NAME = "tenuto-" + 32 * "0"  # such as arenas have
LARGE = np.arange(100_000, dtype=np.float32)


def as_bytes(place: Region) -> bytes:
    return bytes(Borrowed().place(place.at, len(place.data)).data)


def packed(tensor: NamedTensor, *, is_sharing: bool = True) -> Packed:
    return frames.pack(MESSAGE, [tensor], is_sharing=is_sharing)


def test_a_reader_sees_what_was_put_there() -> None:
    arena = Arena(1 << 20)
    place = arena.put(memoryview(b"abc"))
    assert place is not None
    assert as_bytes(place) == b"abc"


def test_what_does_not_fit_is_refused_and_a_dropped_place_makes_room() -> None:
    arena = Arena(2 * ALIGNMENT)
    first = arena.put(memoryview(bytes(ALIGNMENT)))
    second = arena.put(memoryview(bytes(1)))
    assert first is not None
    assert second is not None
    assert arena.put(memoryview(b"x")) is None
    del first
    again = arena.put(memoryview(b"y"))
    assert again is not None
    assert again.at.offset == 0


def test_a_lent_place_is_nobody_elses_for_a_moment_after_it_is_given_back() -> None:
    clock = VirtualClock(0.0)
    arena = Arena(ALIGNMENT, clock)
    lent = arena.put(memoryview(b"abc"))
    assert lent is not None
    lent.lend()
    at = lent.at
    clock.advance(5 * LENT_MS)  # as long as its request has it
    del lent
    assert arena.put(memoryview(b"x")) is None
    clock.advance(6 * LENT_MS - 1.0)
    assert arena.put(memoryview(b"x")) is None
    assert bytes(Borrowed().place(at, 3).data) == b"abc"
    clock.advance(6 * LENT_MS)
    assert arena.put(memoryview(b"x")) is not None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5 * ALIGNMENT), st.integers(0, 5)), max_size=60))
def test_places_in_use_never_overlap_and_all_room_comes_back(steps: list[tuple[int, int]]) -> None:
    arena = Arena(16 * ALIGNMENT)
    kept: list[tuple[Region, bytes]] = []
    for number, (size, dropped) in enumerate(steps):
        data = bytes([number % 256]) * size
        place = arena.put(memoryview(data))
        if place is not None:
            kept.append((place, data))
        if dropped < len(kept):
            del kept[dropped]
        assert all(bytes(place.data) == data for place, data in kept)
    kept.clear()
    place = None
    assert arena.put(memoryview(bytes(16 * ALIGNMENT))) is not None


def test_a_shared_tensor_has_no_frame_and_arrives_whole() -> None:
    tensor = NamedTensor("x", LARGE.copy())
    assert share(tensor, Arena(1 << 20))
    message = packed(tensor)
    assert (message.size, message.shared_size) == (0, LARGE.nbytes)
    parts = frames.join((message,), epoch=NO_EPOCH, sent_at_ms=0.0)
    assert len(parts) == 1
    _, ((came,),) = frames.split(parts, borrowed=Borrowed())
    assert np.array_equal(came.array, LARGE)
    assert not came.array.flags.writeable


def test_a_tensor_in_shared_memory_travels_to_those_who_cannot_read_it() -> None:
    tensor = NamedTensor("x", LARGE.copy())
    share(tensor, Arena(1 << 20))
    parts = frames.join((packed(tensor, is_sharing=False),), epoch=NO_EPOCH, sent_at_ms=0.0)
    _, ((came,),) = frames.split(parts)
    assert np.array_equal(came.array, LARGE)


def test_a_shared_tensor_can_be_passed_on_by_its_receiver() -> None:
    tensor = NamedTensor("x", LARGE.copy())
    share(tensor, Arena(1 << 20))
    first = frames.join((packed(tensor),), epoch=NO_EPOCH, sent_at_ms=0.0)
    _, ((came,),) = frames.split(first, borrowed=Borrowed())
    second = frames.join((packed(came),), epoch=NO_EPOCH, sent_at_ms=0.0)
    assert len(second) == 1
    _, ((at_last,),) = frames.split(second, borrowed=Borrowed())
    assert np.array_equal(at_last.array, LARGE)


def test_what_a_reader_passes_on_can_be_opened_though_its_owner_has_ended() -> None:
    """A client that ends while its request is on the way to a worker takes nothing from the others in that message."""
    tensors = [NamedTensor("x", LARGE.copy()), NamedTensor("x", LARGE + 1)]
    arenas = [Arena(1 << 20), Arena(1 << 20)]
    for tensor, arena in zip(tensors, arenas, strict=True):
        share(tensor, arena)
    reader = Borrowed()
    passed_on = [
        frames.split(frames.join((packed(tensor),), epoch=NO_EPOCH, sent_at_ms=0.0), borrowed=reader)[1][0][0]
        for tensor in tensors
    ]
    arenas[0].close()
    reader.forget_gone()
    both = frames.pack(MESSAGE, passed_on, is_sharing=True)
    parts = frames.join((both,), epoch=NO_EPOCH, sent_at_ms=0.0)
    assert len(parts) == 1
    _, (came,) = frames.split(parts, borrowed=Borrowed())
    assert [one.array[0] for one in came] == [0.0, 1.0]


def test_what_a_reader_has_done_with_can_be_opened_for_a_moment_where_somebody_may_read_it() -> None:
    clock = VirtualClock(0.0)
    for is_lent in (False, True):
        arena = Arena(ALIGNMENT)
        own = arena.put(memoryview(b"abc"))
        assert own is not None
        reader = Borrowed(clock=clock)
        place = reader.place(own.at, 3)
        at = place.at
        if is_lent:
            place.lend()
        arena.close()
        del place
        reader.forget_gone()
        assert not len(reader)
        if is_lent:
            assert reader, "it is to be looked at again"
            clock.advance(clock.now_ms() + LENT_MS - 1.0)
            reader.forget_gone()
            assert bytes(Borrowed().place(at, 3).data) == b"abc"
            clock.advance(clock.now_ms() + 1.0)
            reader.forget_gone()
        assert not reader
        with pytest.raises(RemoteProtocolError):
            Borrowed().place(at, 3)


def test_what_is_refused_leaves_no_descriptor_open() -> None:
    arena = Arena(ALIGNMENT)
    pid, fd, _, name = arena.name.split("/")
    before = descriptors()
    with pytest.raises(RemoteProtocolError, match="not sealed at its size"):
        Borrowed().place(SharedAt(f"{pid}/{fd}/{2 * ALIGNMENT}/{name}", 0), 1)
    assert descriptors() == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_shared_bytes_count_against_the_limit_on_both_sides() -> None:
    tensor = NamedTensor("x", LARGE.copy())
    share(tensor, Arena(1 << 20))
    with pytest.raises(LocalProtocolError, match="payload of 400000 bytes"):
        frames.pack(MESSAGE, [tensor], is_sharing=True, payload_bytes_max=399_999)
    parts = frames.join((packed(tensor),), epoch=NO_EPOCH, sent_at_ms=0.0)
    with pytest.raises(RemoteProtocolError, match="payload of 400000 bytes"):
        frames.split(parts, borrowed=Borrowed(), payload_bytes_max=399_999)


def test_who_does_not_take_shared_memory_says_so() -> None:
    tensor = NamedTensor("x", LARGE.copy())
    share(tensor, Arena(1 << 20))
    parts = frames.join((packed(tensor),), epoch=NO_EPOCH, sent_at_ms=0.0)
    with pytest.raises(RemoteProtocolError, match="does not take"):
        frames.split(parts)


@pytest.mark.parametrize(
    "name",
    [
        *("", "1/2/3", f"a/2/3/{NAME}", f"-1/2/3/{NAME}", "1/2/3/4/5", f"²/2/3/{NAME}", "../../etc/passwd"),
        *(
            f"1/2/3/{NAME}/x",
            f"1/2/3/{NAME}\n",
            f"01/2/3/{NAME}",
            f"1/2/{'9' * 400}/{NAME}",
            "1/2/3/tenuto-x",
        ),
    ],
)
def test_nonsense_is_no_arena(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be the name"):
        Borrowed().place(SharedAt(name, 0), 1)


def test_a_place_beyond_the_arena_is_refused() -> None:
    arena = Arena(ALIGNMENT)
    with pytest.raises(RemoteProtocolError, match="has 4096 bytes"):
        Borrowed().place(SharedAt(arena.name, 4_090), 7)


def test_an_ordinary_file_is_not_taken_for_an_arena(tmp_path: Path) -> None:
    file = tmp_path / NAME
    file.write_bytes(bytes(ALIGNMENT))
    with file.open("rb") as opened, pytest.raises(RemoteProtocolError, match="is not that memory"):
        Borrowed().place(SharedAt(f"{os.getpid()}/{opened.fileno()}/{ALIGNMENT}/{NAME}", 0), 1)


def test_what_would_block_or_act_when_it_is_opened_is_never_opened(tmp_path: Path) -> None:
    """A FIFO blocks whoever opens it until somebody writes; on the loop that is for ever."""
    os.mkfifo(tmp_path / NAME)
    fifo = os.open(tmp_path / NAME, os.O_RDONLY | os.O_NONBLOCK)
    script = f"""
from fabric.errors import RemoteProtocolError
from fabric.messages import SharedAt
from fabric.shared_memory import Borrowed
try:
    Borrowed().place(SharedAt("{os.getpid()}/{fifo}/{ALIGNMENT}/{NAME}", 0), 1)
except RemoteProtocolError as error:
    print(error)
"""
    try:
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=20, check=True)
    finally:
        os.close(fifo)
    assert b"is not that memory" in told.stdout


def test_memory_that_could_shrink_under_a_reader_is_not_mapped() -> None:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, ALIGNMENT)
    try:
        with pytest.raises(RemoteProtocolError, match="not sealed"):
            Borrowed().place(SharedAt(f"{os.getpid()}/{fd}/{ALIGNMENT}/{NAME}", 0), 1)
    finally:
        os.close(fd)


def test_a_wrong_size_is_refused() -> None:
    arena = Arena(ALIGNMENT)
    pid, fd, _, name = arena.name.split("/")
    with pytest.raises(RemoteProtocolError, match="not sealed at its size"):
        Borrowed().place(SharedAt(f"{pid}/{fd}/{2 * ALIGNMENT}/{name}", 0), 1)


def test_a_closed_arena_is_gone_for_new_readers_and_stays_for_those_who_have_it() -> None:
    arena, other = Arena(ALIGNMENT), Arena(ALIGNMENT)
    place = arena.put(memoryview(b"abc"))
    assert place is not None
    reader = Borrowed()
    before = reader.place(place.at, 3)
    arena.close()
    with pytest.raises(RemoteProtocolError):
        Borrowed().place(place.at, 3)
    reader.place(SharedAt(other.name, 0), 1)
    reader.forget_gone()
    assert len(reader) == 1
    assert bytes(before.data) == b"abc"
    with pytest.raises(RemoteProtocolError):
        reader.place(place.at, 3)


def test_of_more_arenas_than_are_kept_open_those_go_that_were_not_used_for_longest() -> None:
    arenas = [Arena(ALIGNMENT) for _ in range(4)]
    first, second, third, fourth = (SharedAt(arena.name, 0) for arena in arenas)
    reader = Borrowed(arenas_max=3)
    for at in (first, second, third, first, fourth):
        reader.place(at, 1)
    for arena in arenas:
        arena.close()
    for at in (first, third, fourth):  # which are open
        reader.place(at, 1)
    with pytest.raises(RemoteProtocolError):
        reader.place(second, 1)


def test_of_many_arenas_that_are_gone_some_are_found_with_each_look_and_few_by_opening_another() -> None:
    arenas = [Arena(ALIGNMENT) for _ in range(ARENAS_LOOKED_AT_MAX + 10)]
    reader = Borrowed()
    for arena in arenas:
        reader.place(SharedAt(arena.name, 0), 1)
    for arena in arenas:
        arena.close()
    other = Arena(ALIGNMENT)
    reader.place(SharedAt(other.name, 0), 1)
    left = [len(reader)]
    for _ in range(3):
        reader.forget_gone()
        left.append(len(reader))
    first = len(arenas) + 1 - ARENAS_LOOKED_AT_TO_OPEN
    assert left == [first, first - (ARENAS_LOOKED_AT_MAX - 1), 1, 1]  # the newest is looked at and stays


def test_arenas_that_come_and_go_leave_nothing_behind() -> None:
    reader = Borrowed()
    for _ in range(3 * ARENAS_LOOKED_AT_MAX):
        arena = Arena(ALIGNMENT)
        reader.place(SharedAt(arena.name, 0), 1)
        arena.close()
        assert len(reader) == 1


def test_only_the_same_boot_user_and_namespace_share() -> None:
    assert is_shared_with(memory_address())
    assert not is_shared_with("")
    assert not is_shared_with(memory_address() + "1")


def test_another_process_reads_it_and_keeps_it_when_the_owner_was_killed() -> None:
    script = (
        "import sys, time; from fabric.shared_memory import Arena; arena = Arena(4096);"
        "place = arena.put(memoryview(b'abc')); print(arena.name, place.at.offset, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        name, offset = owner.stdout.readline().split()
        place = Borrowed().place(SharedAt(name, int(offset)), 3)
        owner.kill()
        owner.wait(10)
    assert bytes(place.data) == b"abc"
    assert as_bytes(place) == b"abc"


def test_it_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_memory.SWITCH, "0")
    memory_address.cache_clear()
    try:
        assert memory_address() == ""
        assert not is_shared_with(memory_address())
    finally:
        memory_address.cache_clear()


def test_readers_cannot_write() -> None:
    arena = Arena(mmap.PAGESIZE)
    with pytest.raises(TypeError):
        Borrowed().place(SharedAt(arena.name, 0), 1).data[0] = 1


def bytes_taken(arena: Arena) -> int:
    """What the system has given it."""
    process, descriptor, *_ = arena.name.split("/")
    return Path(f"/proc/{process}/fd/{descriptor}").stat().st_blocks * 512


def test_what_a_burst_needed_goes_back_once_it_was_not_needed_for_a_while() -> None:
    arena = Arena(64 << 20)
    reader = Borrowed()
    burst = [arena.put(memoryview(bytes([7]) * (1 << 20))) for _ in range(40)]
    late = burst[-1]
    assert late is not None
    seen = reader.place(late.at, 8)
    assert bytes(seen.data) == bytes([7]) * 8
    late = None
    burst.clear()
    kept = arena.put(memoryview(b"x" * ALIGNMENT))
    for _ in range((EPOCHS_KEPT - 1) * EPOCH_PUTS - 41):
        arena.put(memoryview(b"y" * ALIGNMENT))
    assert bytes_taken(arena) == 40 << 20
    for _ in range(EPOCH_PUTS + 41):
        arena.put(memoryview(b"y" * ALIGNMENT))
    assert bytes_taken(arena) == 2 * ALIGNMENT
    assert bytes(seen.data) == bytes(8)  # who reads that late computes for nobody
    assert kept is not None
    assert bytes(kept.data) == b"x" * ALIGNMENT


def test_a_place_in_use_at_the_end_is_never_taken_away() -> None:
    arena = Arena(8 << 20)
    first = arena.put(memoryview(bytes(4 << 20)))
    last = arena.put(memoryview(b"z" * ALIGNMENT))
    del first
    for _ in range((EPOCHS_KEPT + 1) * EPOCH_PUTS):
        arena.put(memoryview(b"y" * ALIGNMENT))
    assert last is not None
    assert bytes(last.data) == b"z" * ALIGNMENT
