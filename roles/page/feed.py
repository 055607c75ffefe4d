"""What readers of the page get: made once for all of them, each time the cluster was looked at. No socket, no clock.

An answer has the newest state, and the frames of batches that its reader does not have yet. A frame is written once, as the
bytes that every reader gets; `FRAMES_MAX` of them are kept, and a reader that was away for longer has missed the others.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fabric.ids import ModelId
from roles.observability.explain import explain
from roles.observability.remembered import BatchSeen, RequestSeen
from roles.page.json_view import Shown
from roles.page.recent_history import Lately
from roles.page.snapshot import Look

FRAMES_MAX: Final = 60
FRAME_BATCHES_MAX: Final = 2_048
"""In one frame, the newest; how many were left out is told."""
ANSWER_BYTES_MAX: Final = 1 << 20
"""Of frames in one answer, the newest."""
EXPLAINED_MAX: Final = 24
"""The newest of each of so many models, those that had one last."""
EXPLAINED_AT_ONCE: Final = 4
"""Of one look: to explain a request takes a walk over all batches of the last half minute."""
_FINE, _ODD = 0, 1


class Feed:
    """Of one page. `look` and `fail` are called by whoever looks, `answer` by whoever serves it: on any thread."""

    def __init__(self) -> None:
        self._lately = Lately()
        self._shown = Shown()
        self._explained: dict[ModelId, dict[str, Any]] = {}
        """Newest first."""
        self._frames: tuple[tuple[int, bytes], ...] = ()
        self._newest = 0
        self._served = secrets.token_hex(8)
        """Another one for each page that is served: what readers have of a former one has other numbers."""
        self._state = b"null"
        self._trouble = ""
        self._at_ms: float | None = None

    def look(self, look: Look) -> None:
        """The cluster was looked at."""
        self._lately.add(look.batches, look.requests, look.from_ms, look.at_ms)
        state = self._shown.state(look, self._lately)
        self._explain(look)
        state["late"] = [
            {**one, "ago_ms": max(0, round(look.at_ms - one["ended_at_ms"]))}
            for one in self._explained.values()
        ]
        self._newest += 1
        frame = json.dumps(self._frame(look), separators=(",", ":")).encode()
        self._state = _json(state)
        self._frames = (*self._frames, (self._newest, frame))[-FRAMES_MAX:]
        self._trouble, self._at_ms = "", look.at_ms

    def fail(self, reason: str) -> None:
        """It could not be looked at."""
        self._trouble = reason

    def answer(self, after: int, served: str, now_ms: float) -> bytes:
        """For a reader that has the frames up to `after` of the page that called itself `served`; JSON.

        `served` is empty where the reader does not say: it has none yet, or its script is of a version that did not know it.
        """
        frames, state = self._frames, self._state
        is_of_this_page = served == self._served if served else after <= self._newest
        if not is_of_this_page:
            after = 0
        wanted: list[bytes] = []
        size = 0
        for number, frame in reversed(frames):
            size += len(frame)
            if number <= after or size > ANSWER_BYTES_MAX:
                break
            wanted.append(frame)
        age_ms = None if self._at_ms is None else max(0.0, round(now_ms - self._at_ms))
        about = {
            "at_ms": round(now_ms, 1),
            "age_ms": age_ms,
            "trouble": self._trouble,
            "served": self._served,
        }
        head = json.dumps(about)[:-1].encode()
        return b"".join((head, b', "state": ', state, b', "frames": [', b",".join(reversed(wanted)), b"]}"))

    # ------------------------------------------------------------ batches

    def _frame(self, look: Look) -> dict[str, Any]:
        """`batches`: slice and model (their numbers), when it began and how long it ran (ms), its size, and 1 where it failed."""
        rows = [row for row in map(self._row, look.batches) if row is not None]
        return {
            "seq": self._newest,
            "until_ms": round(look.at_ms, 1),
            "left_out": max(0, len(rows) - FRAME_BATCHES_MAX),
            "batches": rows[-FRAME_BATCHES_MAX:],
        }

    def _row(self, batch: BatchSeen) -> Sequence[float] | None:
        slice_number = self._shown.slices.get(batch.slice_id)
        model_number = self._shown.models.get(batch.model_id)
        if slice_number is None or model_number is None or batch.ended_at_ms <= batch.started_at_ms:
            return None
        return (
            slice_number,
            model_number,
            round(batch.started_at_ms, 2),
            round(batch.entry.exec_ms, 2),
            batch.entry.batch_size,
            _FINE if batch.has_run else _ODD,
        )

    # ------------------------------------------------------------ late requests

    def _explain(self, look: Look) -> None:
        newest = {request.record.model_id: request for request in look.requests if request.is_bad}
        if not newest:
            return
        batches = self._lately.batches
        for request in sorted(newest.values(), key=self._explained_at_ms)[:EXPLAINED_AT_ONCE]:
            record = request.record
            hosting = {one.slice_id for one in look.report.scheduler.slices if record.model_id in one.models}
            self._explained[record.model_id] = {
                "request_id": record.request_id,
                "model": record.model_id,
                "outcome": record.outcome,
                "total_ms": round(request.ledger.total_ms, 1),
                "budget_ms": round(record.budget_ms, 1),
                "ended_at_ms": round(request.ended_at_ms, 1),
                "sentences": list(explain(request, batches, hosting).sentences),
            }
        newest_first = sorted(self._explained.items(), key=lambda one: -one[1]["ended_at_ms"])
        self._explained = dict(newest_first[:EXPLAINED_MAX])

    def _explained_at_ms(self, request: RequestSeen) -> float:
        """When the one of its model ended that is explained now: those of which none is, or an old one, come first."""
        former = self._explained.get(request.record.model_id)
        return -math.inf if former is None else former["ended_at_ms"]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """JSON has no words for what is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
