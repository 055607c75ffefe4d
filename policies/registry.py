"""Policies by their names, each imported when it is asked for: no process needs all of them, and a role that starts is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from msgspec import Struct

from fabric.policy_options import Schema

PolicyT_co = TypeVar("PolicyT_co", covariant=True)


class Registered(Struct, Generic[PolicyT_co], frozen=True):
    """A policy: the options it knows, and how it is made from checked ones."""

    options: Schema
    build: Callable[[Mapping[str, Any]], PolicyT_co]


class Registry(Mapping[str, Registered[PolicyT_co]]):
    """`places`: by name, ``module:ATTRIBUTE`` of a `Registered`. Names alone import nothing."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Registered[PolicyT_co]:
        module, _, attribute = self._places[name].partition(":")
        found: Registered[PolicyT_co] = getattr(import_module(module), attribute)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
