"""From one placement to another: applied, the moves give it; and there are never fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import ModelId, NodeId, SliceId
from policies.placement.common.assignment import best_assignment
from policies.placement.common.base import GpuSlot, PlannedModel, PlannedSlice
from policies.placement.common.differ import Reorganisation, key_of, reorganised

GPUS = 4
ROOMY = 1_000


def gpus(memory_bytes: Sequence[int] = (ROOMY,) * GPUS) -> list[GpuSlot]:
    return [GpuSlot(k, "v100", size, NodeId("n"), k) for k, size in enumerate(memory_bytes)]


def memory_of(planned: PlannedSlice) -> int:
    return len(planned.models)


@st.composite
def slices(draw: st.DrawFn, size_max: int = 6, stages_max: int = 1) -> list[PlannedSlice]:
    names = st.sampled_from("abc").map(ModelId)
    one = st.builds(
        PlannedSlice,
        st.integers(0, GPUS - 1),
        st.sampled_from((None, 25.0, 50.0)),
        st.sets(names, min_size=1, max_size=2).map(lambda of: tuple(map(PlannedModel, sorted(of)))),
    )
    drawn = draw(st.lists(one, max_size=size_max))
    if stages_max == 1:
        return drawn
    stages = st.lists(st.integers(0, GPUS - 1), max_size=stages_max - 1, unique=True)
    return [
        replace(planned, following=tuple(gpu for gpu in draw(stages) if gpu != planned.gpu))
        for planned in drawn
    ]


def any_slices() -> st.SearchStrategy[list[PlannedSlice]]:
    """Slices of one GPU, and some over several."""
    return st.one_of(slices(), slices(stages_max=3))


def named(placed: Sequence[PlannedSlice]) -> dict[SliceId, PlannedSlice]:
    return {SliceId(f"old/{number}"): planned for number, planned in enumerate(placed)}


def after(found: Reorganisation, current: Mapping[SliceId, PlannedSlice]) -> list[PlannedSlice]:
    """What runs when all moves are over."""
    ended = {slice_id for move in found.moves for slice_id in move.ends}
    changed = {change.slice_id: change.planned for move in found.moves for change in move.changes}
    started = [start.planned for move in found.moves for start in move.starts]
    serving = {slice_id: planned for slice_id, planned in current.items() if slice_id not in ended}
    return [*(serving | changed).values(), *started]


def replicas_begun(found: Reorganisation, current: Mapping[SliceId, PlannedSlice]) -> int:
    """Models that are loaded."""
    begun = sum(len(start.planned.models) for move in found.moves for start in move.starts)
    for change in (change for move in found.moves for change in move.changes):
        there = {model.model_id for model in current[change.slice_id].models}
        begun += sum(model.model_id not in there for model in change.planned.models)
    return begun


def shape(placed: Sequence[PlannedSlice]) -> Counter[object]:
    return Counter(map(key_of, placed))


def by_gpu(placed: Sequence[PlannedSlice]) -> Counter[object]:
    """What GPUs host, whichever they are."""
    contents: dict[int, Counter[object]] = {}
    for planned in placed:
        contents.setdefault(planned.gpu, Counter())[key_of(planned)[1:]] += 1
    return Counter(frozenset(content.items()) for content in contents.values())


def renamed(placed: Sequence[PlannedSlice], names: Sequence[int]) -> list[PlannedSlice]:
    return [PlannedSlice(names[one.gpu], one.share_percent, one.models) for one in placed]


@given(any_slices(), any_slices())
def test_the_moves_give_the_new_placement(old: list[PlannedSlice], new: list[PlannedSlice]) -> None:
    current = named(old)
    if any(planned.following for planned in (*old, *new)):
        assert shape(after(reorganised(current, new, gpus(), memory_of), current)) == shape(new)
        return
    assert shape(after(reorganised(current, new, gpus(), memory_of, may_swap=False), current)) == shape(new)
    assert by_gpu(after(reorganised(current, new, gpus(), memory_of), current)) == by_gpu(new)


@given(any_slices(), any_slices())
def test_what_stays_is_in_no_move(old: list[PlannedSlice], new: list[PlannedSlice]) -> None:
    current = named(old)
    found = reorganised(current, new, gpus(), memory_of)
    touched = [slice_id for move in found.moves for slice_id in move.ends]
    touched += [change.slice_id for move in found.moves for change in move.changes]
    assert len(touched) == len(set(touched))
    assert set(touched) | set(found.kept) == set(current)
    assert not set(touched) & set(found.kept)
    for slice_id, planned in found.kept.items():
        assert key_of(planned) == key_of(current[slice_id])


@given(slices(), slices())
def test_no_naming_of_equal_gpus_would_need_fewer_starts(
    old: list[PlannedSlice], new: list[PlannedSlice]
) -> None:
    found = reorganised(named(old), new, gpus(), memory_of)
    fewest = min((shape(renamed(new, names)) - shape(old)).total() for names in permutations(range(GPUS)))
    assert found.starts + sum(len(move.changes) for move in found.moves) == fewest


@given(slices())
def test_where_there_is_memory_a_model_more_or_less_loads_no_neighbour(old: list[PlannedSlice]) -> None:
    current = named(old)
    added = PlannedModel(ModelId("new"))
    more = [PlannedSlice(one.gpu, one.share_percent, (*one.models, added)) for one in old]
    found = reorganised(current, more, gpus(), memory_of)
    assert replicas_begun(found, current) == len(old)
    assert found.starts == 0
    back = reorganised(named(more), old, gpus(), memory_of)
    assert (replicas_begun(back, named(more)), back.starts) == (0, 0)


@given(slices(), slices())
def test_a_slice_is_changed_only_where_no_worker_has_to_start_anew(
    old: list[PlannedSlice], new: list[PlannedSlice]
) -> None:
    current = named(old)
    for move in reorganised(current, new, gpus(), memory_of).moves:
        for change in move.changes:
            there = current[change.slice_id]
            assert key_of(change.planned)[:2] == key_of(there)[:2]
            assert key_of(change.planned)[2] & key_of(there)[2]


def test_a_bound_on_batches_holds_for_as_long_as_its_model_is_loaded() -> None:
    def bounded(batch_max: int, *more: str) -> PlannedSlice:
        models = [PlannedModel(ModelId("a"), batch_max=batch_max), *(PlannedModel(ModelId(m)) for m in more)]
        return PlannedSlice(0, None, tuple(models))

    (move,) = reorganised(named([bounded(4)]), [bounded(8, "b")], gpus(), memory_of).moves
    assert (len(move.starts), len(move.ends), move.changes) == (1, 1, ())
    (move,) = reorganised(named([bounded(4)]), [bounded(4, "b")], gpus(), memory_of).moves
    assert (move.starts, move.ends, len(move.changes)) == ((), (), 1)


def test_what_moves_from_one_slice_to_another_is_one_move() -> None:
    def hosting(gpu: int, *names: str) -> PlannedSlice:
        return PlannedSlice(gpu, None, tuple(PlannedModel(ModelId(name)) for name in names))

    old, new = [hosting(0, "a", "m"), hosting(1, "b")], [hosting(0, "a"), hosting(1, "b", "m")]
    (move,) = reorganised(named(old), new, gpus(), memory_of, may_swap=False).moves
    assert {change.slice_id for change in move.changes} == {"old/0", "old/1"}


def test_where_old_and_new_do_not_fit_together_the_slice_is_started_anew() -> None:
    old, new = PlannedSlice(0, None, planned_models("ab")), PlannedSlice(0, None, planned_models("ac"))
    (move,) = reorganised(named([old]), [new], gpus([3, 0, 0, 0]), memory_of, may_swap=False).moves
    assert len(move.changes) == 1
    (move,) = reorganised(named([old]), [new], gpus([2, 0, 0, 0]), memory_of, may_swap=False).moves
    assert (move.changes, move.ends, move.starts[0].after) == ((), ("old/0",), ("old/0",))


def planned_models(names: str) -> tuple[PlannedModel, ...]:
    return tuple(PlannedModel(ModelId(name)) for name in names)


@given(slices())
def test_the_same_placement_needs_nothing(old: list[PlannedSlice]) -> None:
    assert reorganised(named(old), old, gpus(), memory_of).moves == ()


@given(any_slices(), any_slices(), st.lists(st.integers(1, 6), min_size=GPUS, max_size=GPUS))
def test_moves_in_their_waves_never_need_more_memory_than_there_is(
    old: list[PlannedSlice], new: list[PlannedSlice], sizes: list[int]
) -> None:
    """Where old and new fit by themselves: starts of a wave beside all that still runs, but for `after`."""

    def fits(placed: Sequence[PlannedSlice]) -> bool:
        used: Counter[int] = Counter()
        for planned in placed:
            used.update(dict.fromkeys(planned.gpus, memory_of(planned)))
        return all(used[gpu] <= size for gpu, size in enumerate(sizes))

    if not fits(old) or not fits(new):
        return
    current = named(old)
    found = reorganised(current, new, gpus(sizes), memory_of)
    running: dict[object, PlannedSlice] = {}
    running.update((slice_id, planned) for slice_id, planned in current.items())
    for wave in sorted({move.wave for move in found.moves}):
        moves = [move for move in found.moves if move.wave == wave]
        first = [start for move in moves for start in move.starts if not start.after]
        late = [start for move in moves for start in move.starts if start.after]
        running.update({id(start): start.planned for start in first})
        for change in (change for move in moves for change in move.changes):
            both = {*change.planned.models, *running[change.slice_id].models}
            running[change.slice_id] = replace(change.planned, models=tuple(both))
        assert fits(list(running.values()))
        for start in late:
            for slice_id in start.after:
                running.pop(slice_id, None)
        running.update({id(start): start.planned for start in late})
        assert fits(list(running.values()))
        for move in moves:
            for slice_id in move.ends:
                running.pop(slice_id, None)
            running.update({change.slice_id: change.planned for change in move.changes})
    assert shape(list(running.values())) == shape(after(found, current))


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_an_assignment_is_worth_as_much_as_the_best_of_all(worth: list[list[int]]) -> None:
    columns = best_assignment(worth)
    assert sorted(columns) == list(range(len(worth)))
    best = max(
        sum(worth[row][column] for row, column in enumerate(order))
        for order in permutations(range(len(worth)))
    )
    assert sum(worth[row][column] for row, column in enumerate(columns)) == best
