"""What became of requests in the last seconds, held against a list of all of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import ModelId, PeerId
from fabric.messages import FiguresAsked, FiguresListed
from roles.frontend.core import FrontendCore
from roles.frontend.events import ClientSaid, Reply, TurnEnded
from roles.frontend.last_seconds import WINDOW_S, LastSeconds
from roles.frontend.recorder import FIGURES_MAX, RequestRecorder
from roles.runtime.core import Tick
from tests.builders import CLIENT, DIGITS, asked, computed, directory, frontend_settings, grant, model_info

OPERATOR = PeerId("operator/00000000")


@given(st.lists(st.tuples(st.floats(0, 4_000), st.sampled_from(["good", "late", "Overloaded"])), max_size=40))
def test_exactly_the_events_since_a_whole_second_are_told(gaps: list[tuple[float, str]]) -> None:
    own, outcomes, counts = LastSeconds(), Counter[str](), [0]
    seen: list[tuple[float, str]] = []
    now_ms = 0.0
    for gap_ms, outcome in gaps:
        now_ms += gap_ms
        if now_ms >= own.next_at_ms:
            own.copy(now_ms, len(seen), outcomes, counts)
        seen.append((now_ms, outcome))
        outcomes[outcome] += 1
        counts[0] += 1
        lately = own.until(now_ms, len(seen), outcomes, counts)
        from_ms = (now_ms // 1e3 - WINDOW_S) * 1e3
        inside = Counter(outcome for at_ms, outcome in seen if at_ms >= from_ms)
        assert dict(lately.outcomes) == dict(inside)
        assert (lately.asked, lately.latencies) == (inside.total(), (inside.total(),))
        assert 1e3 <= lately.window_ms <= 1e3 * (WINDOW_S + 1)
    later = own.until(now_ms + 1e3 * (WINDOW_S + 1), len(seen), outcomes, counts)
    assert (later.asked, dict(later.outcomes), later.latencies) == (0, {}, (0,))


def figures(core: FrontendCore, now_ms: float, after: str = "") -> FiguresListed:
    (reply,) = core.handle(ClientSaid(OPERATOR, FiguresAsked(ModelId(after))), now_ms)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, FiguresListed)
    return reply.message


def linked() -> FrontendCore:
    core = FrontendCore(frontend_settings())
    core.handle(Tick(), 0.0)
    core.handle(directory((model_info(slo_ms=100.0),)), 0.0)
    return core


def test_a_frontend_tells_an_operator_how_its_models_fare_now() -> None:
    core = linked()
    for number in (1, 2):
        core.handle(asked(number), 0.0)
    core.handle(asked(3, budget_ms=10.0, late_ms=20.0), 0.0)  # turned away: nothing is left of its budget
    core.handle(TurnEnded(), 0.0)
    core.handle(grant((0, 2)), 5.0)
    core.handle(computed(0, 1), 60.0)
    (one,) = figures(core, 500.0).models
    assert (one.model_id, one.slo_ms, one.window_ms) == (DIGITS, 100.0, 1_000.0)
    assert (one.asked, one.good, one.late, one.refused) == (3, 2, 0, {"DeadlineExceeded": 1.0})
    assert one.answered[one.bounds_ms.index(62.5)] == sum(one.answered) == 2
    (idle,) = figures(core, 12_000.0).models
    assert (idle.asked, idle.good, idle.refused, sum(idle.answered)) == (0, 0, {}, 0)


def test_nobody_but_an_operator_is_told() -> None:
    assert linked().handle(ClientSaid(CLIENT, FiguresAsked(ModelId(""))), 0.0) == []


def test_many_models_are_told_part_by_part() -> None:
    recorder = RequestRecorder()
    recorder.know([model_info(f"m{number:03}") for number in range(FIGURES_MAX + 5)])
    first = recorder.figures(ModelId(""), 0.0)
    assert (len(first.models), first.has_more) == (FIGURES_MAX, True)
    rest = recorder.figures(first.models[-1].model_id, 0.0)
    assert (len(rest.models), rest.has_more) == (5, False)
