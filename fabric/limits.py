"""What a message may hold: bounds by the kind and name of each field, the same for sender and receiver.

msgspec has checked the types by the time a value comes here. What is left is what a core could choke on: NaN,
negative or endless durations, counts nobody could have meant, texts without end. The rules are made once per
struct from its annotations, so a new message is covered without being listed: a float ending in `_ms` is a
duration, an int is a size or a number, and the few fields that mean something else are in the tables below.

A rule is an expression, and all rules of a struct are compiled into one function, as `dataclasses` does for
its methods: every message passes here twice, and a call per field would cost more than the decoding itself.
"""

from __future__ import annotations

import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import add
from typing import Annotated, Any, Final

from fabric.messages import (
    ITEMS_MAX,
    LEAVING_TERM,
    PRIORITY_MAX,
    RUN_REQUESTS_MAX,
    TOLD_REQUESTS_MAX,
    Changed,
    Done,
    Envelope,
    GpuSharing,
    Ledger,
    Message,
    ModelInfo,
    ModelSpec,
    Parcel,
    PlanReport,
    ReplicaInfo,
    SchedulerStanding,
    SeqRun,
    SliceState,
    SliceStatus,
    TensorInfo,
    Value,
)

NAME_CHARS_MAX: Final = 512
REASON_CHARS_MAX: Final = 2_000  # an exception's text: clipped by the sender, see `clipped`
PATH_CHARS_MAX: Final = 4_096
DOCUMENT_CHARS_MAX: Final = 8 << 20  # a configuration with a table for each of thousands of models
DURATION_MAX_MS: Final = 1e9  # eleven days; nobody serves at such an SLO
RATE_MAX_RPS: Final = 1e9
SMALLEST_MS: Final = sys.float_info.min  # of what is divided by
INTEGER_MAX: Final = 1 << 53  # what a double still counts exactly, should a peer be written in JavaScript

Struct = Message | Value | Envelope

INTEGER_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "count": (1, RUN_REQUESTS_MAX),
    "batch_size_max": (1, RUN_REQUESTS_MAX),
    "batch_size": (0, RUN_REQUESTS_MAX),
    "ran": (0, RUN_REQUESTS_MAX),
    "part": (0, RUN_REQUESTS_MAX),
    "gpu": (0, RUN_REQUESTS_MAX),
    "priority": (0, PRIORITY_MAX),
}
FLOAT_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "span_ms": (0.0, 1.001),  # 1 ms, and the rounding of a sender that split exactly there
    "share_percent": (0.0, 100.0),
    "sent_at_ms": (-1e18, 1e18),  # a moment on a foreign clock
    "rate_rps": (0.0, RATE_MAX_RPS),
    "planned_rps": (0.0, RATE_MAX_RPS),
    "heartbeat_interval_ms": (1.0, DURATION_MAX_MS),
    "heartbeat_patience_ms": (1.0, DURATION_MAX_MS),
}
DIVISORS: Final[frozenset[tuple[type, str]]] = frozenset(
    {
        (ReplicaInfo, "exec_ms"),
        (ReplicaInfo, "interval_ms"),
        (ModelSpec, "exec_ms"),
        (ModelSpec, "stages_ms"),
    }
)
"""Durations that are divided by, so that they may not be 0."""
CHOICES: Final[Mapping[tuple[type, str], tuple[str, ...]]] = {
    (GpuSharing, "mode"): ("starting", "mps", "time-sharing", "mig"),
    (Done, "status"): ("ok", "failed", "expired", "preempted"),
    (Changed, "status"): ("ok", "partial", "failed", "refused"),
    (PlanReport, "state"): ("steady", "planning", "moving"),
    (SchedulerStanding, "state"): ("standby", "candidate", "active"),
    (SliceStatus, "state"): tuple(state.value for state in SliceState),
}


class OutOfBounds(ValueError):
    """A field holds what no core should have to think about; says which and what."""


def is_fine(struct: Struct) -> bool:
    """Whether a message, or a part of one, is within its bounds; `check` says what is not."""
    return _RULES[type(struct)](struct)


def check(struct: Struct) -> None:
    """Hold a message, or a part of one, against its bounds. Raises OutOfBounds naming the field."""
    if is_fine(struct):
        return
    for name, is_field_fine in _field_rules(type(struct)).items():
        if not is_field_fine(struct):
            value = getattr(struct, name)
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Struct):
                    check(inner)  # knows better which field it is
            raise OutOfBounds(f"{type(struct).__name__}.{name} is out of bounds: {_shown(value)}")


def _shown(value: object) -> str:
    """Its beginning: the text of all of it may take longer than all the rest of a message."""
    if isinstance(value, tuple | str):
        value = value[:10]
    return f"{value!r:.80}"


def clipped(parcel: Parcel) -> Parcel:
    """The same with every `reason` cut to its limit, half characters written out: an exception's text must never hold up its message."""
    cut: Parcel = _clip(parcel)
    return cut


def _clip(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_clip, value))
    if not isinstance(value, Struct):
        return value
    fields = {name: _clip(getattr(value, name)) for name in value.__struct_fields__}
    reason = fields.get("reason")
    if isinstance(reason, str):
        reason = written_out(reason)
        is_long = len(reason) > REASON_CHARS_MAX
        fields["reason"] = reason[: REASON_CHARS_MAX - 1] + "…" if is_long else reason
    return type(value)(**fields)


def written_out(text: str) -> str:
    """With half characters (U+D800 and on, as Python has them for a path's odd bytes) as Python writes them: no protocol takes them."""
    return text.encode(errors="backslashreplace").decode()


def ago_ms(now_ms: float, at_ms: float) -> float:
    """How long ago that was, as a message may say it: what is longer ago than the limit is that long ago."""
    return min(max(0.0, now_ms - at_ms), DURATION_MAX_MS)


# ---------------------------------------------------------------- rules


def _rules(struct: type[Struct]) -> Iterator[tuple[str, str]]:
    """Each field that needs one, with its expression over `m`, the message."""
    hints = typing.get_type_hints(struct, include_extras=True)
    for name in struct.__struct_fields__:
        expression = _rule(struct, name, hints[name], f"m.{name}")
        if expression:
            yield name, expression


def _rule(owner: type, name: str, hint: Any, value: str) -> str:
    """What must hold for a field of that type; empty: its type says everything."""
    length_max = ITEMS_MAX
    if typing.get_origin(hint) is Annotated:
        hint, meta = typing.get_args(hint)
        length_max = meta.max_length
    hint = getattr(hint, "__supertype__", hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return ""
    if hint is str:
        return _text_rule(owner, name, value)
    if hint is int and name == "first_seq":  # what is left of a run that was cut is a run too
        return f"0 <= {value} <= {INTEGER_MAX} - m.count"
    if hint is int:
        low, high = _integer_bounds(owner, name)
        return f"{low} <= {value} <= {high}"
    if hint is float:
        return _float_rule(owner, name, value)
    if origin is tuple:
        return _tuple_rule(owner, name, inner[0], value, length_max)
    if origin is dict:
        return f"are_counters({value})"
    if origin is types.UnionType and type(None) in inner:
        return f"({value} is None or {_rule(owner, name, inner[0], value) or True})"
    return f"rules[type({value})]({value})"  # a struct, or the union of all messages


def _integer_bounds(owner: type, name: str) -> tuple[int, int]:
    if owner is TensorInfo and name == "shape":
        return (-1, INTEGER_MAX)  # -1 is any length
    if owner in (ModelInfo, ModelSpec) and name == "term":
        return (LEAVING_TERM, INTEGER_MAX)
    return INTEGER_BOUNDS.get(name, (0, INTEGER_MAX))


def _float_rule(owner: type, name: str, value: str) -> str:
    if owner is Ledger:  # differences, for people; a rounding below 0 hurts nobody
        return f"{-DURATION_MAX_MS} <= {value} <= {DURATION_MAX_MS}"
    if name in FLOAT_BOUNDS or name.endswith("_ms"):
        low, high = float_bounds(owner, name)
        return f"{low} <= {value} <= {high}"  # false for NaN
    return f"isfinite({value})"


def float_bounds(owner: type, name: str) -> tuple[float, float]:
    """From where to where a duration may go, or another float that has bounds of its own."""
    if (owner, name) in DIVISORS:
        return SMALLEST_MS, DURATION_MAX_MS
    return FLOAT_BOUNDS.get(name, (0.0, DURATION_MAX_MS))


def _text_rule(owner: type, name: str, value: str) -> str:
    choices = CHOICES.get((owner, name))
    if choices is not None:
        return f"{value} in {choices!r}"
    limit = {"reason": REASON_CHARS_MAX, "document": DOCUMENT_CHARS_MAX, "base_dir": PATH_CHARS_MAX}
    return f"len({value}) <= {limit.get(name, NAME_CHARS_MAX)}"


def _tuple_rule(owner: type, name: str, hint: Any, value: str, length_max: int) -> str:
    hint = getattr(hint, "__supertype__", hint)
    if hint is SeqRun:
        each = f"are_runs({value})"
    elif hint is int:
        low, high = _integer_bounds(owner, name)
        each = f"min({value}) >= {low} and max({value}) <= {high}"
    elif isinstance(hint, type) and issubclass(hint, Struct):
        each = f"all(map(is_fine, {value}))"
    else:
        each = f"all({_rule(owner, name, hint, 'item')} for item in {value})"
    return f"(not {value} or (len({value}) <= {length_max} and {each}))"


def _are_runs(runs: tuple[SeqRun, ...]) -> bool:
    """Column by column: there may be thousands of them, and a call for each would hold up the loop."""
    if len(runs) == 1:  # mostly
        run = runs[0]
        return 0 <= run.first_seq <= INTEGER_MAX - run.count and 1 <= run.count <= RUN_REQUESTS_MAX
    firsts, counts = [run.first_seq for run in runs], [run.count for run in runs]
    return (
        min(firsts) >= 0
        and max(map(add, firsts, counts)) <= INTEGER_MAX
        and min(counts) >= 1
        and max(counts) <= RUN_REQUESTS_MAX
        and sum(counts) <= TOLD_REQUESTS_MAX
    )


def _are_counters(counters: dict[str, float]) -> bool:
    return len(counters) <= ITEMS_MAX and all(
        len(name) <= NAME_CHARS_MAX and math.isfinite(value) for name, value in counters.items()
    )


class _Rules(dict[type, Callable[[Any], bool]]):
    """Of each struct, made when it is met first: a look into a dictionary, where a cached function would be a call more."""

    def __missing__(self, struct: type) -> Callable[[Any], bool]:
        made = self[struct] = _compiled(
            " and ".join(expression for _, expression in _rules(struct)) or "True"
        )
        return made


@cache
def _field_rules(struct: type[Struct]) -> Mapping[str, Callable[[Struct], bool]]:
    return {name: _compiled(expression) for name, expression in _rules(struct)}


def _compiled(expression: str) -> Callable[[Struct], bool]:
    made: Callable[[Struct], bool] = eval(f"lambda m: {expression}", dict(_NAMES))  # noqa: S307  our annotations and bounds, nothing received
    return made


_RULES: Final = _Rules()
_NAMES: Final[Mapping[str, object]] = {
    "are_runs": _are_runs,
    "are_counters": _are_counters,
    "is_fine": is_fine,
    "rules": _RULES,
    "isfinite": math.isfinite,
}
