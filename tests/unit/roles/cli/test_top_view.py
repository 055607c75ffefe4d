"""What `tenuto top` shows, and what its keys do."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import Ledger, ModelInfo, RequestRecord, SliceReport, StatusListed
from roles.cli.terminal import is_unfinished, keys_of
from roles.cli.top_view import Explain, Facts, Quit, TopView
from roles.observability.remembered import RequestSeen
from roles.runtime.live_figures import LiveModel
from roles.runtime.running_cluster import ClusterReport


def live(name: str, rate_rps: float, bad_rate: float | None = 0.0, p99_ms: float = 20.0) -> LiveModel:
    model_id = ModelId(name)
    return LiveModel(model_id, 25.0, 10.0, rate_rps, rate_rps, 1, {"Overloaded": 2}, bad_rate, 12.0, p99_ms)


def late(name: str, model: str) -> RequestSeen:
    ledger = Ledger(total_ms=47.0, request_id=name)
    record = RequestRecord(1, name, ModelId(model), "late", "", 0.0, 25.0, ledger, BatchId(0))
    return RequestSeen(record, 953.0, 1_000.0)


def facts(at_ms: float, *models: LiveModel, lately: tuple[RequestSeen, ...] = (), batches: int = 10) -> Facts:
    infos = tuple(ModelInfo(one.model_id, one.slo_ms, replicas=1) for one in models)
    slices = (
        SliceReport(
            SliceId("here/gpu0/0"), "ready", "", tuple(i.model_id for i in infos), batches, 4 * batches
        ),
    )
    report = ClusterReport({}, (), StatusListed("scheduler-0", 1, slices, infos, {}), {})
    return Facts(at_ms, "12:00:00", report, {one.model_id: one for one in models}, lately)


THREE = (
    live("bert", 5.0),
    live("resnet50", 900.0, 0.5, 60.0),
    live("a-model-with-a-rather-long-name-v2", 70.0, None),
)


def text_of(screen: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(screen)
    return console.export_text().splitlines()


def names(view: TopView) -> list[str]:
    lines = text_of(view.screen(30))
    first = next(number for number, line in enumerate(lines) if line.startswith("model")) + 2
    return [line.split()[0] for line in lines[first : first + 3]]


def seen(*keys: str) -> tuple[TopView, object]:
    view = TopView()
    view.found(facts(1_000.0, *THREE, lately=(late("f-1", "bert"), late("f-2", "resnet50"))))
    wish: object = None
    for key in keys:
        wish = view.key(key)
    return view, wish


@pytest.mark.parametrize("height", [16, 24, 60])
@pytest.mark.parametrize("width", [80, 132])
def test_a_screen_fits_and_no_number_is_cut(width: int, height: int) -> None:
    view, _ = seen()
    lines = text_of(view.screen(height), width)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    heads = [line for line in lines if line.startswith(("model", "slice", "late or"))]
    assert len(heads) == 3
    assert all("…" not in line for line in heads)
    row = next(line for line in lines if line.startswith("resnet50"))
    assert row.split() == ["resnet50", "900", "900", "50.0", "1", "2", "12.0", "60.0", "25.0", "1"]


def test_models_are_sorted_by_what_one_asks_for() -> None:
    assert names(seen()[0])[0] == "resnet50"  # by bad rate
    by_rate = seen("s")[0]
    assert [name[:4] for name in names(by_rate)] == ["resn", "a-mo", "bert"]
    by_rate.key("r")
    assert [name[:4] for name in names(by_rate)] == ["bert", "a-mo", "resn"]
    by_name = seen("s", "s", "s", "s")[0]
    assert [name[:4] for name in names(by_name)] == ["a-mo", "bert", "resn"]


def test_the_cursor_stays_with_its_model_when_the_order_changes() -> None:
    view, _ = seen("down")  # the second by bad rate is bert: of the third one nothing is known
    assert view.key("e") == Explain(ModelId("bert"))
    view.key("escape")
    view.found(facts(2_000.0, live("bert", 5.0, 0.9), *THREE[1:]))
    assert names(view)[0] == "bert"
    assert view.key("e") == Explain(ModelId("bert"))


def test_a_late_request_is_explained_and_the_page_closes() -> None:
    view, wish = seen("tab", "j", "enter")
    assert wish == Explain(ModelId("resnet50"), "f-2")
    view.told("explain f-2", ["It waited."])
    assert "It waited." in text_of(view.screen(24))[1]
    view.key("escape")
    view.told("explain f-2", ["nobody asked any more"])
    assert not any("nobody" in line for line in text_of(view.screen(24)))


def test_rates_of_slices_are_of_the_time_between_two_looks() -> None:
    view, _ = seen()
    view.found(facts(3_000.0, *THREE, batches=30))
    row = next(line for line in text_of(view.screen(24)) if line.startswith("here/gpu0/0"))
    assert row.split()[-3:] == ["10.0", "40.0", "4.00"]


def test_the_first_lines_sum_up_what_clients_asked() -> None:
    """A request of an application is asked of each of its stages too."""
    application = live("app", 10.0)
    stage = replace(live("bert", 30.0), stage_rate_rps=20.0, stage_goodput_rps=15.0)
    view = TopView()
    view.found(facts(1_000.0, application, stage))
    assert text_of(view.screen(24))[1].startswith("20.0 r/s, 25.0 good")


def test_keys_end_pause_and_help() -> None:
    assert isinstance(seen("q")[1], Quit)
    view, _ = seen("p")
    assert view.is_paused
    view.key("?")
    assert any("quit" in line for line in text_of(view.screen(24)))


def test_without_models_nothing_can_be_explained() -> None:
    view = TopView()
    view.lost("no cluster runs in /x")
    assert text_of(view.screen(24)) == ["no cluster runs in /x"]
    view.found(facts(1_000.0))
    assert view.key("e") is None


def test_what_a_terminal_sends_is_read_as_keys() -> None:
    assert keys_of(b"q\x1b[A\x1bOB\t\r\x1b[5~j\xff\x00") == ["q", "up", "down", "tab", "enter", "j"]
    assert keys_of(b"\x1b") == ["escape"]
    assert [is_unfinished(data) for data in (b"\x1b", b"\x1b[", b"\x1b[1;", b"\x1b[A", b"q")] == [
        True,
        True,
        True,
        False,
        False,
    ]
