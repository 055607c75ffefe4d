"""From the placement that runs to another one, in the fewest moves (design section 6).

A slice that hosts the same models with the same share on the same GPU stays as it is: its batch hints can change
while it serves. Everything else is a start or an end of a worker, as neither a running worker's share nor its GPU
can be changed. What may be chosen is which of several equal GPUs takes which part of the new placement: it is the
assignment that keeps the most slices.

Starts and ends that have a model in common belong together in one *move*: all of its starts are ready before
the first of its ends stops, so every model is served throughout. Moves of one wave fit on their GPUs side by side,
beside everything that still runs there. Where not even a single move fits, its starts come after ends on their
GPUs (`Start.after`), and the plan says so: for a while those ends' models have fewer replicas, or none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fabric.ids import ModelId, SliceId
from policies.placement.common.assignment import best_assignment
from policies.placement.common.base import WHOLE_PERCENT, GpuSlot, PlannedSlice
from policies.placement.common.gpu_kinds import gpu_classes

ASSIGNED_MAX = 64
"""Equal GPUs that are assigned exactly; of more that change at once the rest is taken greedily."""

MemoryOf = Callable[[PlannedSlice], int]

Key = tuple[int, float | None, frozenset[tuple[ModelId, int | None]]]


@dataclass(frozen=True, slots=True)
class SliceStart:
    """A slice to start. `after`: running slices that must end first, as there is no memory for both."""

    planned: PlannedSlice
    after: tuple[SliceId, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Starts and ends that belong together. Moves of an earlier `wave` are over before it begins."""

    starts: tuple[SliceStart, ...]
    ends: tuple[SliceId, ...]
    wave: int = 0


@dataclass(frozen=True, slots=True)
class Reorganisation:
    """`kept` are running slices with what the new placement says of them; nothing of them is in a move."""

    kept: Mapping[SliceId, PlannedSlice]
    moves: tuple[Move, ...]

    @property
    def starts(self) -> int:
        """How many slices are started."""
        return sum(len(move.starts) for move in self.moves)


def reorganised(
    current: Mapping[SliceId, PlannedSlice],
    target: Iterable[PlannedSlice],
    gpus: Sequence[GpuSlot],
    memory_of: MemoryOf,
    *,
    may_swap: bool = True,
) -> Reorganisation:
    """The fewest moves from `current` to `target`; `may_swap`: equal GPUs may take each other's part.

    `memory_of` a planned slice in bytes. A GPU of `current` that is not in `gpus` is gone: its slices end.
    """
    placed = _swapped(current, list(target), gpus) if may_swap else list(target)
    left: dict[Key, list[SliceId]] = defaultdict(list)
    for slice_id, planned in current.items():
        left[key_of(planned)].append(slice_id)
    kept: dict[SliceId, PlannedSlice] = {}
    starts: list[PlannedSlice] = []
    for planned in placed:
        same = left.get(key_of(planned))
        if same:
            kept[same.pop(0)] = planned
        else:
            starts.append(planned)
    ends = [slice_id for slice_id in current if slice_id not in kept]
    moves = _together(starts, ends, current)
    return Reorganisation(kept, _in_waves(moves, current, gpus, memory_of))


def key_of(planned: PlannedSlice) -> Key:
    """What cannot be changed while a slice runs. No limit and a limit of 100 % are the same."""
    share = None if planned.share_percent == WHOLE_PERCENT else planned.share_percent
    return planned.gpu, share, frozenset((model.model_id, model.batch_max) for model in planned.models)


# ---------------------------------------------------------------- equal GPUs


def _swapped(
    current: Mapping[SliceId, PlannedSlice], target: Sequence[PlannedSlice], gpus: Sequence[GpuSlot]
) -> list[PlannedSlice]:
    """The target with its GPUs renamed among equal ones so that the most slices stay."""
    runs, wanted = _contents(current.values()), _contents(target)
    taken_by: dict[int, int] = {}
    for equal in gpu_classes(gpus):
        taken_by.update(_renaming([gpu.index for gpu in equal.gpus], runs, wanted))
    return [replace(planned, gpu=taken_by.get(planned.gpu, planned.gpu)) for planned in target]


def _contents(slices: Iterable[PlannedSlice]) -> dict[int, Counter[tuple[object, ...]]]:
    found: dict[int, Counter[tuple[object, ...]]] = defaultdict(Counter)
    for planned in slices:
        found[planned.gpu][key_of(planned)[1:]] += 1
    return found


def _renaming(
    indices: Sequence[int],
    runs: Mapping[int, Counter[tuple[object, ...]]],
    wanted: Mapping[int, Counter[tuple[object, ...]]],
) -> dict[int, int]:
    """Target GPU -> real GPU. A pair with the very same content is always part of some best assignment."""
    nothing: Counter[tuple[object, ...]] = Counter()
    parts = {index: wanted.get(index, nothing) for index in indices}
    places = {index: runs.get(index, nothing) for index in indices}
    taken_by = {index: index for index in indices if parts[index] == places[index]}
    free: dict[frozenset[tuple[tuple[object, ...], int]], list[int]] = defaultdict(list)
    for index in indices:
        if index not in taken_by:
            free[frozenset(places[index].items())].append(index)
    for index in indices:
        if index not in taken_by:
            same = free[frozenset(parts[index].items())]
            if same:
                taken_by[index] = same.pop(0)
    rest = [index for index in indices if index not in taken_by]
    rooms = sorted(set(indices) - set(taken_by.values()))
    while len(rest) > ASSIGNED_MAX:
        index = rest.pop()
        room = max(rooms, key=lambda one: ((parts[index] & places[one]).total(), one == index))
        rooms.remove(room)
        taken_by[index] = room
    # Among equal worths everything stays where it is: less than one slice in all decides that.
    nudge = 1 / (len(rest) + 1)
    worth = [
        [(parts[index] & places[room]).total() + (nudge if index == room else 0.0) for room in rooms]
        for index in rest
    ]
    taken_by.update(
        {index: rooms[column] for index, column in zip(rest, best_assignment(worth), strict=True)}
    )
    return taken_by


# ---------------------------------------------------------------- moves


def _together(
    starts: Sequence[PlannedSlice], ends: Sequence[SliceId], current: Mapping[SliceId, PlannedSlice]
) -> list[Move]:
    """Starts and ends that a model connects, each group in order; a start or an end alone is a group too."""
    groups: list[tuple[set[ModelId], list[PlannedSlice], list[SliceId]]] = []

    def join(models: set[ModelId]) -> tuple[set[ModelId], list[PlannedSlice], list[SliceId]]:
        touched = [group for group in groups if group[0] & models]
        first = touched[0] if touched else (set[ModelId](), [], [])
        for other in touched[1:]:
            groups.remove(other)
            first[0].update(other[0])
            first[1].extend(other[1])
            first[2].extend(other[2])
        if not touched:
            groups.append(first)
        first[0].update(models)
        return first

    for planned in starts:
        join({model.model_id for model in planned.models})[1].append(planned)
    for slice_id in ends:
        join({model.model_id for model in current[slice_id].models})[2].append(slice_id)
    return [Move(tuple(map(SliceStart, begun)), tuple(over)) for _, begun, over in groups]


def _in_waves(
    moves: Sequence[Move],
    current: Mapping[SliceId, PlannedSlice],
    gpus: Sequence[GpuSlot],
    memory_of: MemoryOf,
) -> tuple[Move, ...]:
    free = {gpu.index: gpu.memory_bytes for gpu in gpus}
    for planned in current.values():
        if planned.gpu in free:
            free[planned.gpu] -= memory_of(planned)
    waiting = list(moves)
    ordered: list[Move] = []
    wave = 0
    while waiting:
        now: list[Move] = []
        for move in waiting:
            needed: Counter[int] = Counter()
            for start in move.starts:
                needed[start.planned.gpu] += memory_of(start.planned)
            if all(size <= free[gpu] for gpu, size in needed.items()):
                now.append(move)
                for gpu, size in needed.items():
                    free[gpu] -= size
        waiting = [move for move in waiting if move not in now]
        if not now:
            tight = _with_its_blockers(waiting, current, free, memory_of)
            now = [_stopping_first(tight, current, dict(free), memory_of)]
            for start in tight.starts:
                free[start.planned.gpu] -= memory_of(start.planned)
        for move in now:
            ordered.append(replace(move, wave=wave))
            for slice_id in move.ends:
                if current[slice_id].gpu in free:
                    free[current[slice_id].gpu] += memory_of(current[slice_id])
        wave += 1
    return tuple(ordered)


def _with_its_blockers(
    waiting: list[Move], current: Mapping[SliceId, PlannedSlice], free: Mapping[int, int], memory_of: MemoryOf
) -> Move:
    """Take the first waiting move out, joined with those whose ends have the memory that it needs."""
    tight = waiting.pop(0)
    while True:
        room = Counter(dict(free))
        for slice_id in tight.ends:
            room[current[slice_id].gpu] += memory_of(current[slice_id])
        for start in tight.starts:
            room[start.planned.gpu] -= memory_of(start.planned)
        short = {start.planned.gpu for start in tight.starts if room[start.planned.gpu] < 0}
        blocker = next(
            (one for one in waiting if any(current[slice_id].gpu in short for slice_id in one.ends)), None
        )
        if blocker is None:
            return tight
        waiting.remove(blocker)
        tight = Move(tight.starts + blocker.starts, tight.ends + blocker.ends)


def _stopping_first(
    move: Move, current: Mapping[SliceId, PlannedSlice], free: dict[int, int], memory_of: MemoryOf
) -> Move:
    """The move with those starts that do not fit put behind ends of the same move on the same GPU.

    Starts that fit come first, so that their models are served meanwhile. A start that does not fit even then
    waits for all of the ends there: whether it is too large is for its worker to say.
    """
    ends = {gpu: [one for one in move.ends if current[one].gpu == gpu] for gpu in free}
    starts: list[SliceStart] = []
    stopped: dict[int, list[SliceId]] = defaultdict(list)
    for start in sorted(move.starts, key=lambda one: memory_of(one.planned)):
        gpu, size = start.planned.gpu, memory_of(start.planned)
        while size > free[gpu] and ends[gpu]:
            over = ends[gpu].pop(0)
            stopped[gpu].append(over)
            free[gpu] += memory_of(current[over])
        free[gpu] -= size
        starts.append(replace(start, after=tuple(stopped[gpu])))
    return replace(move, starts=tuple(starts))
