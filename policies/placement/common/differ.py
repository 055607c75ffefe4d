"""From the placement that runs to another one, in the fewest moves (design section 6).

A slice that hosts the same models with the same share on the same GPU stays as it is: its batch hints can change
while it serves. One of that share on that GPU which should host some of its models and others is *changed* in place:
what is new loads beside what it serves, what is wanted no more is let go. Everything else is a start or an end of a
worker, as neither a running worker's share nor its GPU can be changed. What may be chosen is which of several equal
GPUs takes which part of the new placement: it is the assignment that keeps the most slices, and of those the one
that keeps the most replicas of changed ones.

Starts, ends and changes that start or end replicas of the same model belong together in one *move*: all that is new
is ready before the first replica stops, so every model is served throughout. Moves of one wave fit on their GPUs side
by side, beside everything that still runs there. Where not even a single move fits, its changes are starts and ends
like any others, and its starts come after ends on their GPUs (`Start.after`), and the plan says so: for a while those
ends' models have fewer replicas, or none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from fabric.ids import ModelId, SliceId
from policies.placement.common.assignment import best_assignment
from policies.placement.common.base import WHOLE_PERCENT, GpuSlot, PlannedSlice
from policies.placement.common.gpu_kinds import gpu_classes

ASSIGNED_MAX = 64
"""Equal GPUs, or slices of one GPU, that are assigned exactly; of more that change at once the rest is taken greedily."""

MemoryOf = Callable[[PlannedSlice], int]

Hosted = frozenset[tuple[ModelId, int | None]]
"""Models with the bounds on their batches."""
Key = tuple[tuple[int, ...], float | None, Hosted]
Content = Counter[tuple[float | None, Hosted]]
"""Slices of one GPU: shares, and what is hosted."""


class SliceStart(Struct, frozen=True):
    """A slice to start. `after`: running slices that must end first, as there is no memory for both."""

    planned: PlannedSlice
    after: tuple[SliceId, ...] = ()


class SliceChange(Struct, frozen=True):
    """A running slice that serves on, and hosts what is `planned` in the end."""

    slice_id: SliceId
    planned: PlannedSlice


class Move(Struct, frozen=True):
    """What belongs together. Moves of an earlier `wave` are over before it begins."""

    starts: tuple[SliceStart, ...]
    ends: tuple[SliceId, ...]
    changes: tuple[SliceChange, ...] = ()
    wave: int = 0


class Reorganisation(Struct, frozen=True):
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
    placed = list(target)
    # A GPU of a pipeline cannot take another one's part alone.
    if may_swap and not any(planned.following for planned in (*placed, *current.values())):
        placed = _swapped(current, placed, gpus)
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
    changes = _in_place(starts, ends, current)
    for change in changes:
        starts.remove(change.planned)
        ends.remove(change.slice_id)
    moves = _together(starts, ends, changes, current)
    return Reorganisation(kept, _in_waves(moves, current, gpus, memory_of))


def started_anew(
    current: Mapping[SliceId, PlannedSlice],
    slice_id: SliceId,
    planned: PlannedSlice,
    gpus: Sequence[GpuSlot],
    memory_of: MemoryOf,
) -> Reorganisation:
    """One slice ends once it runs as `planned`; all others stay, also those that are as it was."""
    kept = {other: there for other, there in current.items() if other != slice_id}
    move = Move((SliceStart(planned),), (slice_id,))
    return Reorganisation(kept, _in_waves([move], current, gpus, memory_of))


def key_of(planned: PlannedSlice) -> Key:
    """What cannot be changed while a slice runs. No limit and a limit of 100 % are the same."""
    share = None if planned.share_percent == WHOLE_PERCENT else planned.share_percent
    return planned.gpus, share, frozenset((model.model_id, model.batch_max) for model in planned.models)


# ---------------------------------------------------------------- changes in place


def _in_place(
    starts: Sequence[PlannedSlice], ends: Sequence[SliceId], current: Mapping[SliceId, PlannedSlice]
) -> list[SliceChange]:
    """The ends that can become starts while they serve, so that the most replicas stay."""
    wanted: dict[tuple[tuple[int, ...], float | None], list[PlannedSlice]] = defaultdict(list)
    for planned in starts:
        wanted[key_of(planned)[:2]].append(planned)
    running: dict[tuple[tuple[int, ...], float | None], list[SliceId]] = defaultdict(list)
    for slice_id in ends:
        running[key_of(current[slice_id])[:2]].append(slice_id)
    changes = []
    for place, new in wanted.items():
        old = running.get(place, [])
        hosted = [key_of(current[slice_id])[2] for slice_id in old]
        for row, column in _paired([key_of(planned)[2] for planned in new], hosted):
            changes.append(SliceChange(old[column], new[row]))
    return changes


def _paired(new: Sequence[Hosted], old: Sequence[Hosted]) -> list[tuple[int, int]]:
    """Which of the new (by number) takes over which of the old; only those that have replicas in common."""
    new, old = new[:ASSIGNED_MAX], old[:ASSIGNED_MAX]
    if not new or not old:
        return []
    if len(new) == len(old) == 1:
        return [(0, 0)] if _in_common(new[0], old[0]) else []
    size = max(len(new), len(old))
    worth = [[0.0] * size for _ in range(size)]
    for row, wanted in enumerate(new):
        for column, hosted in enumerate(old):
            worth[row][column] = _in_common(wanted, hosted)
    return [(row, column) for row, column in enumerate(best_assignment(worth)) if worth[row][column]]


def _in_common(wanted: Hosted, hosted: Hosted) -> int:
    """Replicas that stay when one becomes the other; 0: it cannot, as a bound on batches holds while a model is loaded."""
    bounds = dict(hosted)
    if any(bounds.get(model_id, batch_max) != batch_max for model_id, batch_max in wanted):
        return 0
    return len(wanted & hosted)


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


def _contents(slices: Iterable[PlannedSlice]) -> dict[int, Content]:
    found: dict[int, Content] = defaultdict(Counter)
    for planned in slices:
        found[planned.gpu][key_of(planned)[1:]] += 1
    return found


class _Worth:
    """What it is worth that a GPU with one content takes another: slices first, then replicas of changed ones."""

    def __init__(self, parts: Iterable[Content]) -> None:
        self._of_slice = 1 + sum(len(hosted) * count for part in parts for (_, hosted), count in part.items())
        self._known: dict[tuple[frozenset[object], frozenset[object]], int] = {}

    def __call__(self, part: Content, there: Content) -> int:
        key = frozenset(part.items()), frozenset(there.items())
        if key not in self._known:
            self._known[key] = self._worth(part, there)
        return self._known[key]

    def _worth(self, part: Content, there: Content) -> int:
        new, old = _by_share(part - there), _by_share(there - part)
        replicas = 0
        for share, wanted in new.items():
            hosted = old.get(share, [])
            replicas += sum(
                _in_common(wanted[row], hosted[column]) for row, column in _paired(wanted, hosted)
            )
        return (part & there).total() * self._of_slice + replicas


def _by_share(content: Content) -> dict[float | None, list[Hosted]]:
    found: dict[float | None, list[Hosted]] = defaultdict(list)
    for share, hosted in content.elements():
        found[share].append(hosted)
    return found


def _renaming(
    indices: Sequence[int],
    runs: Mapping[int, Content],
    wanted: Mapping[int, Content],
) -> dict[int, int]:
    """Target GPU -> real GPU. A pair with the very same content is always part of some best assignment."""
    nothing: Content = Counter()
    parts = {index: wanted.get(index, nothing) for index in indices}
    places = {index: runs.get(index, nothing) for index in indices}
    taken_by = {index: index for index in indices if parts[index] == places[index]}
    free: dict[frozenset[object], list[int]] = defaultdict(list)
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
    worth_of = _Worth(parts.values())
    while len(rest) > ASSIGNED_MAX:
        index = rest.pop()
        room = max(rooms, key=lambda one: (worth_of(parts[index], places[one]), one == index))
        rooms.remove(room)
        taken_by[index] = room
    # Among equal worths everything stays where it is: less than one replica in all decides that.
    nudge = 1 / (len(rest) + 1)
    worth = [
        [worth_of(parts[index], places[room]) + (nudge if index == room else 0.0) for room in rooms]
        for index in rest
    ]
    taken_by.update(
        {index: rooms[column] for index, column in zip(rest, best_assignment(worth), strict=True)}
    )
    return taken_by


# ---------------------------------------------------------------- moves


@dataclass(slots=True)
class _Group:
    """What starts or ends replicas of these models."""

    models: set[ModelId] = field(default_factory=set)
    starts: list[PlannedSlice] = field(default_factory=list)
    ends: list[SliceId] = field(default_factory=list)
    changes: list[SliceChange] = field(default_factory=list)


def _together(
    starts: Sequence[PlannedSlice],
    ends: Sequence[SliceId],
    changes: Sequence[SliceChange],
    current: Mapping[SliceId, PlannedSlice],
) -> list[Move]:
    """What a model connects, each group in order; a start, an end or a change alone is a group too."""
    groups: list[_Group] = []

    def join(models: set[ModelId]) -> _Group:
        touched = [group for group in groups if group.models & models]
        first = touched[0] if touched else _Group()
        for other in touched[1:]:
            groups.remove(other)
            first.models.update(other.models)
            first.starts.extend(other.starts)
            first.ends.extend(other.ends)
            first.changes.extend(other.changes)
        if not touched:
            groups.append(first)
        first.models.update(models)
        return first

    for planned in starts:
        join(_models_on(planned)).starts.append(planned)
    for slice_id in ends:
        join(_models_on(current[slice_id])).ends.append(slice_id)
    for change in changes:
        join(_models_on(change.planned) ^ _models_on(current[change.slice_id])).changes.append(change)
    return [Move(tuple(map(SliceStart, one.starts)), tuple(one.ends), tuple(one.changes)) for one in groups]


def _models_on(planned: PlannedSlice) -> set[ModelId]:
    return {model.model_id for model in planned.models}


def _in_waves(
    moves: Sequence[Move],
    current: Mapping[SliceId, PlannedSlice],
    gpus: Sequence[GpuSlot],
    memory_of: MemoryOf,
) -> tuple[Move, ...]:
    free = {gpu.index: gpu.memory_bytes for gpu in gpus}
    for planned in current.values():
        _add(free, planned, -memory_of(planned))

    def loaded_by(change: SliceChange) -> int:
        stays = _models_on(current[change.slice_id])
        common = tuple(model for model in change.planned.models if model.model_id in stays)
        return memory_of(change.planned) - memory_of(replace(change.planned, models=common))

    waiting = list(moves)
    ordered: list[Move] = []
    wave = 0
    while waiting:
        now: list[Move] = []
        for move in waiting:
            needed: Counter[int] = Counter()
            for start in move.starts:
                needed.update(dict.fromkeys(start.planned.gpus, memory_of(start.planned)))
            for change in move.changes:
                needed.update(dict.fromkeys(change.planned.gpus, loaded_by(change)))
            if all(size <= free[gpu] for gpu, size in needed.items()):
                now.append(move)
                for gpu, size in needed.items():
                    free[gpu] -= size
        waiting = [move for move in waiting if move not in now]
        if not now:
            tight = _with_its_blockers(waiting, current, free, memory_of)
            now = [_stopping_first(tight, current, dict(free), memory_of)]
            for start in tight.starts:
                _add(free, start.planned, -memory_of(start.planned))
        for move in now:
            ordered.append(replace(move, wave=wave))
            for slice_id in move.ends:
                _add(free, current[slice_id], memory_of(current[slice_id]))
            for change in move.changes:
                freed = memory_of(current[change.slice_id]) + loaded_by(change) - memory_of(change.planned)
                _add(free, change.planned, freed)
        wave += 1
    return tuple(ordered)


def _add(free: dict[int, int], planned: PlannedSlice, size: int) -> None:
    """So much more is free on each GPU of a slice that is still there."""
    for gpu in planned.gpus:
        if gpu in free:
            free[gpu] += size


def _with_its_blockers(
    waiting: list[Move], current: Mapping[SliceId, PlannedSlice], free: Mapping[int, int], memory_of: MemoryOf
) -> Move:
    """Take the first waiting move out, joined with those whose ends have the memory that it needs."""
    tight = _without_changes(waiting.pop(0))
    while True:
        room = dict(free)
        for slice_id in tight.ends:
            _add(room, current[slice_id], memory_of(current[slice_id]))
        for start in tight.starts:
            _add(room, start.planned, -memory_of(start.planned))
        short = {gpu for start in tight.starts for gpu in start.planned.gpus if room[gpu] < 0}
        blocking = (
            one for one in waiting if any(short.intersection(current[ended].gpus) for ended in _ended(one))
        )
        found = next(blocking, None)
        if found is None:
            return tight
        waiting.remove(found)
        blocker = _without_changes(found)
        tight = Move(tight.starts + blocker.starts, tight.ends + blocker.ends)


def _without_changes(move: Move) -> Move:
    """There is no memory for old and new replicas of a slice at once: it is started anew."""
    begun = tuple(SliceStart(change.planned) for change in move.changes)
    return Move(move.starts + begun, _ended(move))


def _ended(move: Move) -> tuple[SliceId, ...]:
    return move.ends + tuple(change.slice_id for change in move.changes)


def _stopping_first(
    move: Move, current: Mapping[SliceId, PlannedSlice], free: dict[int, int], memory_of: MemoryOf
) -> Move:
    """The move with those starts that do not fit put behind ends of the same move on the same GPU.

    Starts that fit come first, so that their models are served meanwhile. A start that does not fit even then
    waits for all of the ends there: whether it is too large is for its worker to say.
    """
    ends = list(move.ends)
    starts: list[SliceStart] = []
    stopped: dict[int, list[SliceId]] = defaultdict(list)
    for start in sorted(move.starts, key=lambda one: memory_of(one.planned)):
        size = memory_of(start.planned)
        for gpu in start.planned.gpus:
            while size > free[gpu] and (there := [one for one in ends if gpu in current[one].gpus]):
                over = there[0]
                ends.remove(over)
                _add(free, current[over], memory_of(current[over]))
                for place in current[over].gpus:
                    stopped[place].append(over)
        _add(free, start.planned, -size)
        after = dict.fromkeys(over for gpu in start.planned.gpus for over in stopped[gpu])
        starts.append(replace(start, after=tuple(after)))
    return replace(move, starts=tuple(starts))
