"""The page in headless Chromium: what is shown, by keyboard, at any width, dark and light, and to a screen reader (axe-core).

Needs Chromium and the extra `browser`; without them these tests are skipped and say so. The cluster is made up: a feed with
five models on four GPUs, served by the page's own server, so that nothing here waits for a busy host.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fabric.clock import Clock, MonotonicClock
from fabric.messages import PlanReport
from roles.page.feed import Feed
from roles.page.questions import Question, Questions
from roles.page.server import PageServer
from tests.page_stage import Stage, batch, gpu, live, request, slice_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytest.importorskip("playwright", reason="the extra 'browser' is not installed")
pytest.importorskip("axe_playwright_python", reason="the extra 'browser' is not installed")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed on this host"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
NAMES = ("bert", "efficientnet", "resnet50", "whisper", "yolo")
HOSTILE = "<img src=x onerror=alert(1)>"
WIDTHS = (400, 1280, 2000)
REFUSED_BY_TEST = "ERR_FAILED"


class PlayedFeed(Feed):
    """Looks at a made-up cluster each time it is asked, a second or more after the last time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._last_ms = clock.now_ms() - 8_000.0
        self.stage = Stage(
            models=NAMES,
            slices=[
                *(slice_of(f"here/gpu{number}/0", *NAMES, share=60.0) for number in range(3)),
                *(slice_of(f"here/gpu{number}/1", "yolo", share=40.0) for number in range(3)),
                slice_of("here/gpu3/0", "bert", state="failed"),
            ],
            gpus=[gpu(number) for number in range(4)],
            figures={
                **{name: live(name) for name in NAMES},
                "yolo": live("yolo", late=9, dropped={"Overloaded": 31}, bad_rate=0.2, p99_ms=61.0),
            },
            plan=PlanReport("steady", "", 4, 6, (), 3, 1, (), (f"moved yolo {HOSTILE}",)),
            queued=dict.fromkeys(NAMES, 2.0),
        )

    def answer(self, after: int, served: str, now_ms: float) -> bytes:
        if now_ms - self._last_ms >= 500.0:
            begin_ms, self._last_ms = self._last_ms, now_ms
            its = []
            for row, own in enumerate(self.stage.slices[:6]):
                at_ms, turn = begin_ms + 7.0 * row, row
                while at_ms < now_ms - 30.0:
                    model = own.models[turn % len(own.models)]
                    its.append(batch(model, own.slice_id, at_ms, 20.0 + 3.0 * row, 1 + turn % 8))
                    at_ms, turn = at_ms + 40.0, turn + 1
            late = request(
                "yolo", "late", now_ms - 5.0, int(now_ms), held_ms=20.0, waited_ms=25.0, gpu_ms=20.0
            )
            good = [request(name, "good", now_ms - 5.0, held_ms=10.0, gpu_ms=8.0) for name in NAMES]
            self.look(self.stage.look(now_ms, its, [late, *good]))
        return super().answer(after, served, now_ms)


class AnsweredQuestions(Questions):
    """Knows the answer at once."""

    def ask(self, question: Question) -> int:
        self.asked = question
        return 1

    def answer(self, number: int) -> bytes | None:
        del number
        one = {"rate_rps": 10, "goodput_rps": 9, "bad_rate": 0.1, "p50_ms": 5, "p99_ms": 50}
        told: dict[str, Any]
        if self.asked.arguments[0] == "why":
            finding = {"cause": "slow_slice", "sentence": HOSTILE, "advice": "drain it"}
            remedy = {"change": "1 GPU more", "bad_rate": 0.001, "is_enough": True}
            told = {
                "slo_ms": 50,
                "offered": 90,
                "bad": 9,
                "bad_rate": 0.1,
                "findings": [finding],
                "remedies": [remedy],
            }
        else:
            told = {"sentence": HOSTILE, "doubt": "", "models": {"yolo": {"today": one, "then": one}}}
        import json

        return json.dumps({"answer": told, "remarks": ["it was not asked"]}).encode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    clock = MonotonicClock()
    questions = AnsweredQuestions(Path("/nowhere"), None, clock)
    server = PageServer(
        "127.0.0.1:0", PlayedFeed(clock), questions, lambda: frozenset(NAMES), lambda: None, clock
    )
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Browser]:  # the server first: a loop of playwright's runs from here on
    assert url
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def page(url: str, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    told: Any = getattr(request, "param", (1280, "light", "reduce"))
    width, scheme, motion = told
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion
    )
    found = context.new_page()
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on(
        "console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None
    )
    asked: list[str] = []
    found.on("request", lambda one: asked.append(one.url))
    found.goto(url)
    found.wait_for_selector("#model-rows tr.figures >> nth=4", timeout=60_000)
    yield found
    assert [one for one in problems if REFUSED_BY_TEST not in one] == []
    assert all(one.startswith(url) for one in asked), "it asked somebody else"
    context.close()


@pytest.mark.parametrize("page", [(w, s, "reduce") for w in WIDTHS for s in ("light", "dark")], indirect=True)
def test_it_fits_and_axe_has_no_serious_finding(page: Page) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.click("#timeline summary")
    page.click("#late-list summary >> nth=0")
    page.wait_for_selector("#timeline-rows tr", timeout=30_000)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing is cut off at the side"
    )
    found = Axe().run(page).response
    assert len(found["passes"]) > 30
    serious = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in serious] == []


def test_each_panel_shows_what_the_feed_says(page: Page) -> None:
    assert page.inner_text("#verdict") == "yolo misses its SLO"
    assert "yolo" in page.title() or "1" in page.title()
    rows = page.locator("#model-rows tr.figures")
    assert [
        row.locator("th").inner_text().strip("✓✗ \n").split(",")[0].strip() for row in rows.all()
    ] == list(NAMES)
    assert page.locator("#model-rows tr.is-missed").count() == 1
    assert page.locator(".gpu").count() == 4
    assert page.locator(".gpu-bar .slice").count() == 7
    assert "here/gpu3/0" in page.inner_text("#alarm-list")
    assert "asks for 6 GPUs; there are 4" in page.inner_text("#plan-advice")
    assert page.locator("#late-list li").count() >= 1
    assert "answered after 65 ms of 50 ms" in page.inner_text("#late-list")


def test_a_model_has_one_colour_in_every_panel(page: Page) -> None:
    def colours(selector: str) -> dict[str, str]:
        script = f"""[...document.querySelectorAll("{selector}")].map((node) =>
            [node.parentElement.textContent.trim().replace(/^[✓✗]/, "").split(/[ ,]/)[0], getComputedStyle(node).backgroundColor])"""
        return {name: colour for name, colour in page.evaluate(script) if name in NAMES}

    legend = colours("#legend .swatch")
    assert len(set(legend.values())) == len(NAMES)
    assert colours("#model-rows .swatch") == legend
    assert colours("#plan-rows .swatch") == legend
    assert colours(".gpu-slices .swatch") == legend


@pytest.mark.parametrize("page", [(1280, "dark", "no-preference")], indirect=True)
def test_the_timeline_moves_and_stops_by_keyboard(page: Page) -> None:
    page.wait_for_timeout(2_500)
    picture = "document.getElementById('canvas').toDataURL()"
    first = page.evaluate(picture)
    page.wait_for_timeout(400)
    assert page.evaluate(picture) != first, "it goes on by itself"
    page.focus("#stage")
    page.keyboard.press(" ")
    stopped = page.evaluate(picture)
    page.wait_for_timeout(1_500)
    assert page.evaluate(picture) == stopped
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    assert "paused" in page.inner_text("#timeline-now")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(picture) != stopped
    page.keyboard.press("+")
    assert page.input_value("#window") == "2000"
    page.keyboard.press("End")
    assert page.get_attribute("#pause", "aria-pressed") == "false"


def test_it_answers_why_and_what_if_and_nothing_said_becomes_html(page: Page) -> None:
    page.click("#model-rows button >> nth=4")
    page.wait_for_selector("#why-findings li", timeout=30_000)
    assert HOSTILE in page.inner_text("#why-findings")
    assert "It misses its SLO of 50 ms: 9 of 90 requests" in page.inner_text("#why-state")
    assert page.inner_text("#why-state").endswith(". It was not asked.")
    assert page.inner_text("#why-command") == "tenuto why --json -- yolo"
    page.keyboard.press("Escape")
    page.select_option("#wi-model", "yolo")
    page.fill("#wi-rate", "2")
    page.click("#what-if-form button")
    page.wait_for_selector("#wi-rows tr.then", timeout=30_000)
    assert page.inner_text("#wi-state") == f"{HOSTILE} It was not asked."
    assert page.inner_text("#wi-command") == "tenuto what-if --json --rate=yolo=2"
    assert HOSTILE in page.inner_text("#plan-lately")
    assert page.locator("main img").count() == 0


def test_it_says_at_once_when_nobody_answers_and_goes_on_when_somebody_does(page: Page) -> None:
    page.route("**/feed*", lambda route: route.abort())
    page.wait_for_selector("#connection[data-state=lost]", timeout=30_000)
    assert page.inner_text("#connection-text").startswith("the page is not served any more")
    page.unroute("**/feed*")
    page.wait_for_selector("#connection[data-state=live]", timeout=30_000)
