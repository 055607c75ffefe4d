"""One look at a cluster: what its roles said when they were asked, about once a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roles.observability.remembered import BatchSeen, RequestSeen
from roles.runtime.live_figures import LiveFigures
from roles.runtime.running_cluster import ClusterReport


@dataclass(frozen=True, slots=True)
class Look:
    """All moments are on the clock of whoever looked; at `at_ms` all `batches` were told, requests may have ended later.

    `batches`, `requests`: those that ended since the last look, oldest first; of the batches that ended before `from_ms` some may be missing.
    """

    at_ms: float
    report: ClusterReport
    figures: LiveFigures
    batches: Sequence[BatchSeen]
    requests: Sequence[RequestSeen]
    from_ms: float
