"""`tenuto top`, the part that decides: keys and facts in, a screen or a wish to have something explained out. No terminal, no clock.

Two lists have a cursor, models and late requests; Tab goes from one to the other. What is explained covers the lists until it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fabric.ids import ModelId, SliceId
from fabric.messages import ModelInfo, SliceReport
from roles.cli.cluster_tables import UNKNOWN, brief, live_cells, shortened
from roles.observability.remembered import RequestSeen
from roles.runtime.live_figures import LiveModel
from roles.runtime.running_cluster import ClusterReport

LATE_SHOWN: Final = 100
LATE_PRINTED: Final = 20
_PANELS: Final = ("models", "late")
KEYS: Final = (
    ("q", "quit"),
    ("Tab", "models or late ones"),
    ("↑ ↓ j k", "choose"),
    ("Enter e", "explain: why MODEL, or the late request"),
    ("s", "sort by the next column"),
    ("r", "reverse"),
    ("p", "pause"),
    ("? Esc", "this page, and back"),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one look at a cluster found that began at `at_ms` on the looker's clock. `late`: late and refused requests, newest first."""

    at_ms: float
    told_at: str
    """The time of day, for people."""
    report: ClusterReport
    live: dict[ModelId, LiveModel] = field(default_factory=dict)
    late: Sequence[RequestSeen] = ()
    silent: Sequence[str] = ()
    applications: Sequence[ModelInfo] = ()


@dataclass(frozen=True, slots=True)
class Explain:
    """Somebody wants to know why: of a model, or of the request with an id."""

    model_id: ModelId
    request_id: str = ""


class Quit:
    """It is over."""


Wish = Explain | Quit
_T = TypeVar("_T")
_Row = tuple[ModelInfo, LiveModel | None]


def _ranked(figure: Callable[[LiveModel], float | None]) -> Callable[[_Row], float]:
    """By a figure; what is not known is least."""

    def rank(row: _Row) -> float:
        value = None if row[1] is None else figure(row[1])
        return -1.0 if value is None else value

    return rank


SORTS: Final[dict[str, Callable[[_Row], float | str]]] = {
    "bad %": _ranked(lambda its: its.bad_rate),
    "r/s": _ranked(lambda its: its.rate_rps),
    "drops": _ranked(lambda its: its.drops),
    "p99/SLO": _ranked(lambda its: None if its.p99_ms is None else its.p99_ms / its.slo_ms),
    "model": lambda row: row[0].model_id,
}


class TopView:
    """The state of the screen."""

    def __init__(self) -> None:
        self._facts: Facts | None = None
        self._former: Facts | None = None
        self._trouble = ""
        self._panel = _PANELS[0]
        self._cursor = dict.fromkeys(_PANELS, 0)
        self._chosen: dict[str, str] = {}
        self._sort = 0
        self._is_reversed = False
        self._page: tuple[str, list[str]] | None = None
        self._page_top = 0
        self.is_paused = False

    # ------------------------------------------------------------ in

    def found(self, facts: Facts) -> None:
        """Another look. The cursors stay with what they were on."""
        if self._facts is None or facts.at_ms > self._facts.at_ms:
            self._former, self._facts = self._facts, facts
        self._trouble = ""
        for panel in _PANELS:
            names = self._names(panel)
            if self._chosen.get(panel) in names:
                self._cursor[panel] = names.index(self._chosen[panel])
            self._move(panel, 0)

    def lost(self, trouble: str) -> None:
        """The look failed: what is on the screen is of before."""
        self._trouble = trouble

    def told(self, title: str, lines: Sequence[str]) -> None:
        """What was to be explained, or why it cannot be; unless nobody waits for it any more."""
        if self._page is not None and self._page[0] == title:
            self._open(title, lines)

    def _open(self, title: str, lines: Sequence[str]) -> None:
        self._page, self._page_top = (title, list(lines)), 0

    def key(self, key: str) -> Wish | None:
        """One key."""
        if key == "q":
            return Quit()
        if self._page is not None:
            self._turn(key)
            return None
        match key:
            case "tab":
                self._panel = _PANELS[1 - _PANELS.index(self._panel)]
            case "up" | "k":
                self._move(self._panel, -1)
            case "down" | "j":
                self._move(self._panel, 1)
            case "s":
                self._sort = (self._sort + 1) % len(SORTS)
                self._resorted()
            case "r":
                self._is_reversed = not self._is_reversed
                self._resorted()
            case "p":
                self.is_paused = not self.is_paused
            case "?" | "h":
                self._open("keys", [f"{keys:<9} {what}" for keys, what in KEYS])
            case "enter" | "e":
                return self._wish()
        return None

    def _turn(self, key: str) -> None:
        assert self._page is not None, "there is a page"
        match key:
            case "up" | "k":
                self._page_top = max(0, self._page_top - 1)
            case "down" | "j":
                self._page_top = min(max(0, len(self._page[1]) - 1), self._page_top + 1)
            case "escape" | "enter" | "e" | "?" | "h":
                self._page = None

    def _wish(self) -> Wish | None:
        names = self._names(self._panel)
        if not names:
            return None
        name = names[self._cursor[self._panel]]
        if self._panel == "models":
            self._open(f"why {name}", ["asking …"])
            return Explain(ModelId(name))
        self._open(f"explain {name}", ["asking …"])
        return Explain(self._late[self._cursor["late"]].record.model_id, name)

    def _resorted(self) -> None:
        names = self._names("models")
        if self._chosen.get("models") in names:
            self._cursor["models"] = names.index(self._chosen["models"])

    def _move(self, panel: str, by: int) -> None:
        names = self._names(panel)
        self._cursor[panel] = max(0, min(len(names) - 1, self._cursor[panel] + by))
        if names:
            self._chosen[panel] = names[self._cursor[panel]]

    # ------------------------------------------------------------ what there is

    @property
    def _rows(self) -> list[_Row]:
        if self._facts is None:
            return []
        live = self._facts.live
        rows: list[_Row] = [
            (model, live.get(model.model_id))
            for model in (*self._facts.report.scheduler.models, *self._facts.applications)
        ]
        name = list(SORTS)[self._sort]
        by_name = sorted(rows, key=lambda row: row[0].model_id)
        # Numbers largest first, names from a on; equal ones by name.
        return sorted(by_name, key=SORTS[name], reverse=(name != "model") != self._is_reversed)

    @property
    def _late(self) -> Sequence[RequestSeen]:
        return () if self._facts is None else self._facts.late[:LATE_SHOWN]

    def _names(self, panel: str) -> list[str]:
        if panel == "models":
            return [str(model.model_id) for model, _ in self._rows]
        return [one.record.request_id for one in self._late]

    # ------------------------------------------------------------ out

    def screen(self, height: int) -> RenderableType:
        """All of it, in so many lines."""
        if self._page is not None:
            title, lines = self._page
            head = Text(f"{title}   (↑ ↓, Esc: back)", style="bold")
            return Group(head, *(Text(line) for line in lines[self._page_top :][: max(1, height - 1)]))
        if self._facts is None:
            return Text(self._trouble or "looking …")
        # Two lines above, two below, and each table has three of its own.
        rows = max(3, height - 4 - 3 * 3)
        late_rows = max(1, min(len(self._late), rows // 3))
        slice_rows = max(1, min(len(self._facts.report.scheduler.slices), (rows - late_rows) // 2))
        model_rows = max(1, rows - late_rows - slice_rows)
        parts: list[RenderableType] = [*self._head(self._facts)]
        parts += [Text(), self._model_table(model_rows), Text(), self._slice_table(slice_rows)]
        parts += [Text(), self._late_table(late_rows), Text()]
        parts.append(Text("q quit  ? keys  Tab list  Enter explain  s sort  r reverse  p pause", style="dim"))
        return Group(*parts)

    def whole(self) -> RenderableType:
        """All rows, without a cursor."""
        if self._facts is None:
            return Text(self._trouble)
        self._cursor = dict.fromkeys(_PANELS, -1)
        scheduler = self._facts.report.scheduler
        tables = [
            self._model_table(len(self._rows)),
            self._slice_table(len(scheduler.slices)),
            self._late_table(LATE_PRINTED),
        ]
        return Group(*self._head(self._facts), *(part for table in tables for part in (Text(), table)))

    def _head(self, facts: Facts) -> list[Text]:
        scheduler = facts.report.scheduler
        words = [f"tenuto top {facts.told_at}", scheduler.role_id]
        if scheduler.standing is not None:
            words.append(f"epoch {scheduler.standing.epoch}")
        if scheduler.plan is not None:
            plan = scheduler.plan
            words += [f"{plan.gpus_advised} of {plan.gpus} GPUs asked for", plan.state]
        if self.is_paused:
            words.append("PAUSED")
        trouble = self._trouble or ", ".join(f"{role_id} does not answer" for role_id in facts.silent)
        # What stages ask is in their applications' own requests.
        rates = [one.rate_rps - one.stage_rate_rps for one in facts.live.values()]
        good = [one.goodput_rps - one.stage_goodput_rps for one in facts.live.values()]
        second = Text(
            f"{brief(sum(rates))} r/s, {brief(sum(good))} good; sorted by {list(SORTS)[self._sort]}"
        )
        if trouble:
            second = Text(trouble, style="red")
        lines = [Text("  ".join(words), style="bold"), second]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines

    def _model_table(self, rows: int) -> Table:
        table = _table(
            "model", "r/s", "good/s", "bad %", "late", "drops", "p50 ms", "p99 ms", "SLO ms", "repl."
        )
        shown, first = _around(self._rows, self._cursor["models"], rows)
        for place, (model, its) in enumerate(shown, first):
            style = self._style("models", place)
            table.add_row(model.model_id, *live_cells(its, model.slo_ms), str(model.replicas), style=style)
        return table

    def _slice_table(self, rows: int) -> Table:
        assert self._facts is not None, "there was a look"
        table = _table("slice", "state", "models", "batches/s", "r/s", "batch", names=3)
        for one in self._facts.report.scheduler.slices[:rows]:
            table.add_row(one.slice_id, one.state, shortened(one.models), *self._slice_rates(one))
        return table

    def _slice_rates(self, one: SliceReport) -> list[str]:
        """Since the look before; unknown at the first one, and of a slice that began anew."""
        assert self._facts is not None, "there was a look"
        former = {} if self._former is None else _slices_of(self._former)
        before = former.get(one.slice_id)
        if before is None or self._former is None or one.batches < before.batches:
            return [UNKNOWN] * 3
        span_s = (self._facts.at_ms - self._former.at_ms) / 1e3
        batches, requests = one.batches - before.batches, one.requests - before.requests
        return [
            brief(batches / span_s),
            brief(requests / span_s),
            brief(requests / batches if batches else None),
        ]

    def _late_table(self, rows: int) -> Table:
        assert self._facts is not None, "there was a look"
        table = _table("late or refused", "model", "outcome", "ms", "of", "ago s", names=3)
        shown, first = _around(self._late, self._cursor["late"], rows)
        for place, one in enumerate(shown, first):
            record = one.record
            took, ago_s = record.ledger.total_ms, (self._facts.at_ms - one.ended_at_ms) / 1e3
            cells = (brief(took), brief(record.budget_ms), brief(max(0.0, ago_s)))
            style = self._style("late", place)
            table.add_row(record.request_id, record.model_id, record.outcome, *cells, style=style)
        return table

    def _style(self, panel: str, place: int) -> str:
        if place != self._cursor[panel]:
            return ""
        return "reverse" if panel == self._panel else "underline"


def _slices_of(facts: Facts) -> dict[SliceId, SliceReport]:
    return {one.slice_id: one for one in facts.report.scheduler.slices}


def _around(rows: Sequence[_T], cursor: int, count: int) -> tuple[Sequence[_T], int]:
    """So many rows with the cursor among them, and the place of the first."""
    first = max(0, min(cursor - count // 2, len(rows) - count))
    return rows[first : first + count], first


def _table(*columns: str, names: int = 1) -> Table:
    """Each row is one line, so that a screen is filled and no more: texts share what the numbers leave, and are cut."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, expand=True)
    for number, column in enumerate(columns):
        if number < names:
            table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table
