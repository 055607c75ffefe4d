"""Histories in which things go wrong: whatever does, what always holds held. `make chaos` plays more, and real processes."""

from __future__ import annotations

import pytest

from tests.chaos.virtual.monitor import Violated
from tests.chaos.virtual.script import Script, Shape, draw, read
from tests.chaos.virtual.shrink import failure_of, shrunk
from tests.chaos.virtual.world import World, play

HISTORIES, OF = 800, 40
"""About 70 ms each on one core: a minute."""


@pytest.mark.parametrize("first", range(0, HISTORIES, HISTORIES // OF))
def test_whatever_goes_wrong_what_always_holds_held(first: int) -> None:
    for seed in range(first, first + HISTORIES // OF):
        script = draw(seed)
        failure = failure_of(script)
        if failure is not None:
            small, what = shrunk(script, failure)
            replay = f"python -m tests.chaos.virtual --replay - <<< '{small.text()}'"
            pytest.fail(f"seed {seed}: {failure}\nmade small: {what}\n{replay}")


def test_one_script_is_one_history() -> None:
    script = draw(17)
    assert play(script).fates == play(script).fates


def test_a_script_is_read_as_it_was_written() -> None:
    for seed in range(50):
        assert read(draw(seed).text()) == draw(seed)


def test_without_faults_nearly_all_is_answered() -> None:
    fates = play(Script(1, Shape(gpus=2, rate_rps=20.0, slo_ms=300.0))).fates
    assert fates["answer"] >= 0.9 * fates.total()


class Silent(World):
    """Its frontends are killed and nobody hears of it."""

    def _settle(self) -> None:
        for wire in list(self.network.wires):
            if wire.far.owner.place.startswith("client") or wire.near.owner.place.startswith("client"):
                wire.is_broken = True
        self._ask(0, 0, next(iter(self.by_number[0].shell._core._shards.models)), 100.0)
        super()._settle()
        self._run_until(self.now_ms + 500.0)


def test_a_request_without_an_answer_is_found() -> None:
    with pytest.raises(Violated, match="no answer"):
        Silent(Script(1, Shape(rate_rps=1.0))).play()
