"""No slice gets an id that its node tells of, whatever that is."""

from __future__ import annotations

from collections.abc import Iterator

from fabric.ids import NodeId, SliceId
from fabric.messages import GpuRef, NewSlice, SliceSpec
from roles.scheduler.planning.slice_names import SliceNames

GPU = GpuRef(NodeId("here"), 0)
START = NewSlice(GPU.node_id, SliceSpec(SliceId(""), 0, "emulated", None, ()), ())


def named(names: SliceNames, taken: frozenset[SliceId]) -> str:
    return names.named(START, taken).spec.slice_id


def told(*numbers: int) -> frozenset[SliceId]:
    return frozenset(SliceId(f"{GPU.name}/{number}") for number in numbers)


def test_ids_follow_the_highest_that_the_node_tells_of() -> None:
    names = SliceNames([GPU], [])
    assert [named(names, told(0, 4)) for _ in range(2)] == ["here/gpu0/5", "here/gpu0/6"]
    assert named(names, told(5, 6, 9)) == "here/gpu0/10", "it has told anew"
    assert named(names, frozenset({SliceId("here/gpu0/x"), SliceId("here/gpu1/70")})) == "here/gpu0/11"


def test_however_high_a_node_s_ids_are_none_is_given_twice_by_the_next_scheduler() -> None:
    begun = told(999_999_999)
    for _ in range(3):
        names = SliceNames([GPU], [])
        begun |= {SliceId(named(names, begun)) for _ in range(3)}
    assert len(begun) == 10


def test_what_a_node_tells_is_read_through_once() -> None:
    looks = 0

    class Counted(frozenset[SliceId]):
        def __iter__(self) -> Iterator[SliceId]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    names, taken = SliceNames([GPU], []), Counted(told(*range(100)))
    assert [named(names, taken) for _ in range(50)] == [f"here/gpu0/{number}" for number in range(100, 150)]
    assert looks == 1
