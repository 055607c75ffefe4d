"""Garbage at listening sockets, as frames and as raw bytes, for a moment; `make fuzz` does it for hundreds of thousands."""

from __future__ import annotations

import random

import pytest

from tests.malformed import requests
from tests.malformed.sockets import Keys, attack


@pytest.mark.parametrize("keys", [Keys(), Keys.drawn()], ids=["open", "with keys"])
def test_a_friend_is_answered_beside_garbage(keys: Keys) -> None:
    assert attack(keys, 6_000, random.Random(3)) == []


def test_a_gateway_answers_a_friend_beside_garbage() -> None:
    assert requests.attack(2_000, random.Random(3)) == []
