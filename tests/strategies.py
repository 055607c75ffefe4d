"""Hypothesis strategies for everything that crosses the wire, made from the structs' own annotations."""

from __future__ import annotations

import types
import typing
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fabric.limits import (
    CHOICES,
    DURATION_MAX_MS,
    INTEGER_BOUNDS,
    INTEGER_MAX,
    NAME_CHARS_MAX,
    float_bounds,
)
from fabric.link import NamedTensor
from fabric.messages import RUN_REQUESTS_MAX, AnyMessage, Ledger
from fabric.tensors import DTYPES

names = st.text(max_size=NAME_CHARS_MAX)


def message_types() -> list[type]:
    return list(typing.get_args(AnyMessage))


def messages() -> st.SearchStrategy[Any]:
    return st.sampled_from(message_types()).flatmap(structs)


def structs(struct: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(struct)
    fields = {name: _values(struct, name, hints[name]) for name in hints}
    return st.builds(struct, **fields)


@st.composite
def tensors(draw: st.DrawFn) -> NamedTensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    size = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype == "bool":
        content = bytes(byte & 1 for byte in content)
    return NamedTensor(draw(names), np.frombuffer(content, DTYPES[dtype]).reshape(shape))


def _values(owner: type, name: str, hint: Any) -> st.SearchStrategy[Any]:
    hint = getattr(hint, "__supertype__", hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return st.booleans()
    if hint is str:
        choices = CHOICES.get((owner, name))
        return names if choices is None else st.sampled_from(choices)
    if hint is int:
        low, high = INTEGER_BOUNDS.get(name, (0, INTEGER_MAX))
        return st.integers(low, high - RUN_REQUESTS_MAX if name == "first_seq" else high)  # with any count
    if hint is float:
        return _floats(owner, name)
    if origin is tuple and inner[-1] is not ...:
        return st.tuples(*(_values(owner, name, item) for item in inner))
    if origin is tuple:
        return st.lists(_values(owner, name, inner[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(names, st.floats(-1e18, 1e18), max_size=3)
    if origin is types.UnionType:
        return st.none() | _values(owner, name, inner[0])
    return structs(hint)


def _floats(owner: type, name: str) -> st.SearchStrategy[float]:
    if owner is Ledger:
        return st.floats(-DURATION_MAX_MS, DURATION_MAX_MS)
    return st.floats(*float_bounds(owner, name))
