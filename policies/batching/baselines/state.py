"""What the baseline disciplines keep about models and slices (see `baseline.py`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from fabric.ids import ModelId, SliceId
from policies.batching.base import NEVER_MS, BatchDecision, BatchModel, BatchSlice, HostedModel
from policies.batching.batch_moments import Table, delay_ms
from policies.batching.preparing import Preparing
from policies.batching.run_queue import RunQueue

Act = Callable[[float, list[BatchDecision]], None]


class Timer:
    """Does `act(now_ms, decisions)` at the moment it was last armed for."""

    __slots__ = ("act", "armed_at_ms")

    def __init__(self, act: Act) -> None:
        self.act = act
        self.armed_at_ms = NEVER_MS


class Line:
    """Requests of one model that wait together: for any slice, or for the one at `home`."""

    __slots__ = ("expiry", "home", "model", "queue")

    def __init__(self, model: BaselineModel, home: BaselineSlice | None, expiry: Act) -> None:
        self.model = model
        self.home = home
        self.queue = RunQueue()
        self.expiry = Timer(expiry)


class BaselineModel:
    """A model, the slices that host it, and everything of it that waits."""

    __slots__ = ("hosts", "lines", "model", "preparing")

    def __init__(self, model: BatchModel) -> None:
        self.model = model
        self.hosts: dict[SliceId, BaselineSlice] = {}
        self.lines: list[Line] = []
        self.preparing = Preparing()

    @property
    def model_id(self) -> ModelId:
        """Its name."""
        return self.model.model_id

    def lead_ms(self, batch_size: int) -> float:
        """delay(b) of the model."""
        return delay_ms(self.model.delay, batch_size)

    def alone_ms(self, home: BaselineSlice | None) -> float:
        """What one request needs at least, there or on the best of its slices; 0 without one."""
        hosts = [home] if home is not None else self.hosts.values()
        times_ms = [host.tables[self.model_id][1] for host in hosts]
        return self.lead_ms(1) + min(times_ms) if times_ms else 0.0


class BaselineSlice:
    """A slice and what is known of it."""

    __slots__ = ("free", "free_at_ms", "hosted", "order", "slice_id", "tables")

    def __init__(self, given: BatchSlice, free: Act) -> None:
        self.slice_id = given.slice_id
        self.order = given.order
        self.free_at_ms = given.free_at_ms
        self.hosted: dict[ModelId, HostedModel] = {}
        self.tables: dict[ModelId, Table] = {}
        self.free = Timer(free)

    def fit(
        self, line: Line, now_ms: float, free_at_ms: float | None = None, count_max: int | None = None
    ) -> int:
        """The largest batch from the head of a line that can be sent here now and finish in time; 0: none."""
        model = line.model
        table = self.tables[model.model_id]
        deadline_at_ms = line.queue.runs[0].deadline_at_ms
        free_ms = self.free_at_ms if free_at_ms is None else free_at_ms

        def end_at_ms(size: int) -> float:
            return max(now_ms + model.lead_ms(size), free_ms) + table[size]

        whole = min(line.queue.count, len(table) - 2)
        if count_max is not None:
            whole = min(whole, count_max)
        if end_at_ms(whole) <= deadline_at_ms:
            return whole
        return bisect_right(range(1, whole), deadline_at_ms, key=end_at_ms)
