"""Pictures of the page for docs/operate/page.md: a cluster with every real core on a virtual clock, so the same on a busy host.

    python -m benchmarks.page_pictures docs/pictures     # needs Chromium and the extra 'browser'

Rates, batches and late requests are those of the played minutes; figures of models and the plan are as they are at their end.
"""

from __future__ import annotations

import argparse
import io
import shutil
from bisect import bisect_right
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from fabric.clock import MonotonicClock
from fabric.ids import ModelId, PeerId
from fabric.messages import FiguresAsked, FiguresListed, ModelFigures, RecordsAsked, StatusAsked
from roles.config.read_config import parse_config
from roles.frontend.events import ClientSaid, Reply
from roles.observability.remembered import BatchSeen, RequestSeen, batches_seen, requests_seen
from roles.page.feed import Feed
from roles.page.questions import Questions
from roles.page.server import PageServer
from roles.page.snapshot import Look
from roles.runtime.core import Heard
from roles.runtime.live_figures import LiveFigures, together
from roles.runtime.running_cluster import ClusterReport, ProcessReport
from roles.scheduler.build import scheduler_core
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.settings import settings_from
from roles.simulator.full_world import FullWorld
from roles.simulator.simulation import hardware_of
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import workload_of

SIZES = ((400, 1500), (1280, 1560), (2000, 1320))
PLAYED_S = 30.0
SHOWN_FROM_S = 14.0
ANSWERS = 9
OPERATOR = PeerId("operator/00000000")
NEWEST = 1 << 52
DOCUMENT: dict[str, Any] = {
    "models": [
        {
            "name": name,
            "slo_ms": slo_ms,
            "rate_rps": rate,
            "profile": {"alpha_ms": alpha, "beta_ms": beta, "max_batch": 32},
        }
        for name, slo_ms, rate, alpha, beta in (
            ("resnet50", 400, 60, 8, 50),
            ("bert-base", 600, 20, 20, 55),
            ("efficientnet", 480, 34, 7, 55),
            ("yolo-v8", 400, 12, 28, 60),
            ("whisper-tiny", 900, 4, 60, 100),
        )
    ],
    "cluster": {"gpus": 4},
    "batching": "deferred",
}


class Played(Feed):
    """Shows what was played, a second more with each answer: however slow the browser's host is."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0
        config = parse_config(DOCUMENT, Path())
        placement = config.place()
        settings = settings_from(config, placement)
        core = scheduler_core(
            settings, config.batching, controller_settings(config, DOCUMENT, ".", placement, settings)
        )
        traffic = [
            ModelTraffic(model.model_id, model.slo_ms, arrived_at_ms)
            for model, arrived_at_ms in zip(
                config.models, workload_of(config, None).arrivals(1e3 * PLAYED_S), strict=True
            )
        ]
        world = FullWorld([core], hardware_of(config, 1), traffic)
        world.run()
        self._ended_ms = now_ms = world.clock.now_ms()
        (told,) = core.handle(Heard(OPERATOR, StatusAsked()), now_ms)
        processes = [ProcessReport(one, 1, True, {}) for one in ("scheduler-0", "frontend-0")]
        self._report = ClusterReport({}, processes, told.message, {})
        figures: list[ModelFigures] = []
        self._requests: list[RequestSeen] = []
        for frontend in world._frontends:  # noqa: SLF001  a stage looks behind the curtain
            (reply,) = frontend._core.handle(ClientSaid(OPERATOR, FiguresAsked(ModelId(""))), now_ms)  # noqa: SLF001
            assert isinstance(reply, Reply)
            assert isinstance(reply.message, FiguresListed)
            figures += reply.message.models
            for model in config.models:
                asked = RecordsAsked(model.model_id, NEWEST)
                (reply,) = frontend._core.handle(ClientSaid(OPERATOR, asked), now_ms)  # noqa: SLF001
                self._requests += requests_seen(reply.message, now_ms)
        self._figures = LiveFigures({one.model_id: together([one]) for one in figures})
        self._batches = _batches(core, now_ms)
        self._requests.sort(key=lambda one: one.ended_at_ms)
        self._until_ms = now_ms - 1e3 * PLAYED_S
        self._zero_ms = self._until_ms + 1e3 * SHOWN_FROM_S

    def begin(self) -> None:
        """A picture is taken next: play from the beginning of what is shown."""
        Feed.__init__(self)
        self.answers = 0
        self._until_ms = self._zero_ms - 1e3 * SHOWN_FROM_S

    def answer(self, after: int, served: str, now_ms: float) -> bytes:
        """All seconds up to the one that is its turn."""
        del now_ms
        self.answers += 1
        played_ms = self._zero_ms + 1e3 * self.answers
        while self._until_ms + 1e3 <= played_ms and self._until_ms < self._ended_ms:
            from_ms, self._until_ms = self._until_ms, self._until_ms + 1e3
            look = Look(
                self._until_ms,
                self._report,
                self._figures,
                _between(self._batches, from_ms, self._until_ms),
                _between(self._requests, from_ms, self._until_ms),
                float("-inf"),
            )
            self.look(look)
        return super().answer(after, served, self._until_ms)


def _between(its: list[Any], from_ms: float, until_ms: float) -> list[Any]:
    ends = [one.ended_at_ms for one in its]
    return its[bisect_right(ends, from_ms) : bisect_right(ends, until_ms)]


def _batches(core: Any, now_ms: float) -> list[BatchSeen]:
    found: list[BatchSeen] = []
    before = NEWEST
    while True:
        (send,) = core.handle(Heard(OPERATOR, RecordsAsked(ModelId(""), before)), now_ms)
        if not send.message.batches:
            return sorted(found, key=lambda one: one.ended_at_ms)
        found += batches_seen(send.message, now_ms)
        before = send.message.batches[-1].number


def main() -> None:
    """Six pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    clock = MonotonicClock()
    feed = Played()
    server = PageServer(
        "127.0.0.1:0", feed, Questions(Path("/nowhere"), None, clock), frozenset, lambda: None, clock
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for width, height in SIZES:
            for scheme in ("light", "dark"):
                feed.begin()
                page = browser.new_page(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,
                    reduced_motion="reduce",  # each answer's newest moment
                )
                page.set_default_timeout(120_000)
                page.goto(server.url)
                page.wait_for_selector("#model-rows tr.figures >> nth=4")
                while feed.answers < ANSWERS:
                    page.wait_for_timeout(200)
                page.wait_for_timeout(1_000)
                picture = Image.open(io.BytesIO(page.screenshot()))
                picture.save(folder / f"page-{width}-{scheme}.webp", quality=82, method=6)
                page.close()
        browser.close()
    server.close()


if __name__ == "__main__":
    main()
