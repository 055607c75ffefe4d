"""The batching disciplines by their names, with the options that each one knows (design section 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fabric.errors import ConfigError
from fabric.policy_options import Choice, Number, Schema, checked_options, shown, suggestion
from policies.batching.base import Discipline
from policies.batching.disciplines.clockwork import Clockwork
from policies.batching.disciplines.deferred import Deferred
from policies.batching.disciplines.eager import Eager
from policies.batching.disciplines.fixed import Fixed
from policies.batching.disciplines.nexus import Nexus
from policies.batching.disciplines.shepherd import Shepherd
from policies.batching.disciplines.tenuto import Tenuto
from policies.batching.disciplines.timeout import Timeout

DEFAULT = "tenuto"


@dataclass(frozen=True, slots=True)
class Registered:
    """A discipline: the options it knows, and how it is made from checked ones."""

    options: Schema
    build: Callable[[Mapping[str, Any]], Discipline]


_PICK = Choice(("lowest_id", "longest_idle"))


def _central(options: Mapping[str, Any]) -> dict[str, bool]:
    return {
        "is_window_drop": options["drop"] == "window",
        "is_lowest_id": options["pick"] == "lowest_id",
    }


def _timeout(options: Mapping[str, Any]) -> Discipline:
    if "timeout_ms" in options:
        constant_ms: float = options["timeout_ms"]
        return Timeout(lambda _: constant_ms)
    share = options["slo_percent"] / 100.0
    return Timeout(lambda slo_ms: share * slo_ms)


DISCIPLINES: Mapping[str, Registered] = {
    "tenuto": Registered(
        {"drop": Choice(("window", "simple"), is_default_given=False), "pick": _PICK},
        lambda options: Tenuto(drop=options.get("drop"), is_lowest_id=options["pick"] == "lowest_id"),
    ),
    "deferred": Registered(
        {"drop": Choice(("window", "simple")), "pick": _PICK}, lambda options: Deferred(**_central(options))
    ),
    # Eager batches are small, so a drop rule that protects a large target gives up too much (ADR 0010).
    "eager": Registered(
        {"drop": Choice(("simple", "window")), "pick": _PICK}, lambda options: Eager(**_central(options))
    ),
    "timeout": Registered(
        {
            "timeout_ms": Number(None, is_minimum_allowed=True),
            "slo_percent": Number(None, maximum=100.0),
        },
        _timeout,
    ),
    "fixed": Registered(
        {
            "max_wait_ms": Number(100.0, is_minimum_allowed=True),
            "batch": Number(None, minimum=1, is_minimum_allowed=True, is_whole=True),
        },
        lambda options: Fixed(max_wait_ms=options["max_wait_ms"], batch=options.get("batch")),
    ),
    "nexus": Registered({"epoch_s": Number(10.0)}, lambda options: Nexus(epoch_s=options["epoch_s"])),
    "clockwork": Registered(
        {"sizes": Choice(("powers_of_two", "all"))},
        lambda options: Clockwork(has_all_sizes=options["sizes"] == "all"),
    ),
    "shepherd": Registered(
        {"preempt_ratio": Number(3.0, minimum=1)},
        lambda options: Shepherd(preempt_ratio=options["preempt_ratio"]),
    ),
}


def discipline_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a discipline with the defaults filled in; ConfigError where name or options are wrong."""
    registered = DISCIPLINES.get(name)
    if registered is None:
        raise ConfigError(f"batching: there is no discipline {shown(name)}{suggestion(name, DISCIPLINES)}")
    options = checked_options(registered.options, given, f"batching.{name}")
    if name == "timeout" and len(options) != 1:
        raise ConfigError("batching.timeout: must have exactly one of timeout_ms and slo_percent")
    return options


def make_discipline(name: str, options: Mapping[str, Any] | None = None) -> Discipline:
    """A fresh discipline of that name; ConfigError where name or options are wrong."""
    checked = discipline_options(name, options or {})
    return DISCIPLINES[name].build(checked)
