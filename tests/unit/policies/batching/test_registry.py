"""Disciplines by name, and what is said about wrong names and options."""

from __future__ import annotations

from typing import Any

import pytest

from fabric.errors import ConfigError
from policies.batching.registry import DEFAULT, DISCIPLINES, discipline_options, make_discipline

NEEDED: dict[str, dict[str, Any]] = {"timeout": {"timeout_ms": 5}}


@pytest.mark.parametrize("name", DISCIPLINES)
def test_every_discipline_starts_empty(name: str) -> None:
    discipline = make_discipline(name, NEEDED.get(name))
    assert discipline.wake_at_ms is None
    assert list(discipline.tick(0.0)) == []


def test_each_call_makes_a_fresh_one() -> None:
    assert make_discipline(DEFAULT) is not make_discipline(DEFAULT)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("defered", {}, "did you mean deferred"),
        ("deferred", {"dorp": "simple"}, "did you mean drop"),
        ("deferred", {"drop": "sometimes"}, "window, simple"),
        ("eager", {"pick": 3}, "lowest_id, longest_idle"),
        ("timeout", {}, "exactly one of"),
        ("timeout", {"timeout_ms": 5, "slo_percent": 50}, "exactly one of"),
        ("timeout", {"slo_percent": 101}, "at most 100"),
        ("fixed", {"batch": 0}, "at least 1"),
        ("fixed", {"batch": 2.5}, "whole number"),
        ("nexus", {"epoch_s": 1e-9}, "at least 0.01"),
        ("shepherd", {"preempt_ratio": 0.5}, "over 1"),
    ],
)
def test_a_wrong_name_or_option_is_a_config_error_that_says_what_is_right(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_discipline(name, options)


def test_defaults_are_filled_in() -> None:
    assert discipline_options("deferred", {}) == {"drop": "window", "pick": "lowest_id"}
    assert discipline_options("fixed", {"batch": 4}) == {"max_wait_ms": 100.0, "batch": 4}
