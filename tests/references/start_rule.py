"""When a worker starts a batch and with what, read from design section 4 and ADR 0020.

- Inputs without their Run wait at most 50 ms, in a pool of 64 MiB; what does not fit in is lost, and of two of one
  frontend for one part the second.
- The first in line (by start, then by number) goes once all its parts are in. One behind it goes once its own start has
  come as well. From its latest start on any goes with the parts that came, if there is a request in them. Of those that may go
  the one with the earliest start does.
- A batch that waits until its loosest deadline is lost, and 1 ms, comes back whole; without any request all that has not come.
- A batch of which every request was cancelled ends at once.
- `Done` says until when inputs were waited for, and how long the device was from then to the start. They are waited for until the last
  one has come; where one is missing no longer than to the latest start, unless what there is to run came after that.
- A batch that waits is preempted at once, one that runs when the device says so.

Nothing is kept but what was heard, and after each event everything is looked at afresh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

POOL_MS, POOL_BYTES = 50.0, 64 * 2**20
TOLERANCE_MS = 1.0
ABORT_MS = 0.25  # what the device takes to stop a batch


@dataclass(frozen=True)
class RunHeard:
    """A granted batch. `parts`: of each part, its frontend and its requests. `exec_ms`: what the device will take."""

    at_ms: float
    number: int
    slice_id: str
    start_at_ms: float
    latest_at_ms: float
    expires_at_ms: float
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    exec_ms: float
    fails: bool


@dataclass(frozen=True)
class InputsHeard:
    """Inputs for one part of a batch, perhaps wrong ones: another frontend's, or of requests that are not in it."""

    at_ms: float
    number: int
    slice_id: str
    part: int
    frontend: str
    live: tuple[int, ...]
    size_bytes: int
    is_for_another_incarnation: bool = False


@dataclass(frozen=True)
class PreemptHeard:
    """The scheduler wants the batch stopped."""

    at_ms: float
    number: int
    slice_id: str


EventHeard = RunHeard | InputsHeard | PreemptHeard


@dataclass(frozen=True)
class Started:
    """A batch went to the device with these requests, part after part."""

    at_ms: float
    number: int
    rows: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Ended:
    """A batch was answered for. `missing`: the parts that go back; times of one that ran."""

    at_ms: float
    number: int
    status: str
    ran: int
    missing: tuple[tuple[str, tuple[int, ...]], ...]
    transfer_ms: float = 0.0
    queue_ms: float = 0.0


@dataclass
class Device:
    """What runs on a slice, until when, and how it will end."""

    run: RunHeard
    started: Started
    ends_at_ms: float
    status: str


@dataclass
class StartRule:
    """Plays what was heard, in order of time. `log`: what the worker did."""

    tolerance_ms: float = TOLERANCE_MS
    abort_ms: float = ABORT_MS
    log: list[Started | Ended] = field(default_factory=list)
    _waiting: list[RunHeard] = field(default_factory=list)
    _inputs: dict[int, dict[int, InputsHeard]] = field(default_factory=dict)
    _pool: list[InputsHeard] = field(default_factory=list)
    _device: dict[str, Device] = field(default_factory=dict)

    def play(self, heard: Sequence[EventHeard]) -> None:
        """All of it, and then until nothing is left to happen."""
        left = sorted(heard, key=lambda event: event.at_ms)
        now_ms = -math.inf
        while True:
            own_at_ms = min((moment for moment in self._moments() if moment > now_ms), default=math.inf)
            if left and left[0].at_ms <= own_at_ms:
                event = left.pop(0)
                now_ms = event.at_ms
                self._pool = [one for one in self._pool if one.at_ms + POOL_MS > now_ms]
                self._hear(event)
            elif own_at_ms == math.inf:
                return
            else:
                now_ms = own_at_ms
            while self._look(now_ms):
                pass

    def _moments(self) -> list[float]:
        ends = [device.ends_at_ms for device in self._device.values()]
        for run in self._waiting:
            ends += [run.start_at_ms, run.latest_at_ms, run.expires_at_ms + self.tolerance_ms]
        return ends

    def _hear(self, event: EventHeard) -> None:
        if isinstance(event, RunHeard):
            self._waiting.append(event)
            self._inputs[event.number] = {}
            for early in [one for one in self._pool if self._is_for(one, event)]:
                # Where there is no such part, or it is another frontend's, it stays for its 50 ms.
                if early.part < len(event.parts) and event.parts[early.part][0] == early.frontend:
                    self._pool.remove(early)
                    self._accept(event, early)
        elif isinstance(event, PreemptHeard):
            device, stopped_at_ms = self._device.get(event.slice_id), event.at_ms + self.abort_ms
            if device is not None and device.run.number == event.number and stopped_at_ms < device.ends_at_ms:
                device.ends_at_ms, device.status = stopped_at_ms, "preempted"
            for run in [one for one in self._waiting if one.number == event.number]:
                self._waiting.remove(run)
                self.log.append(Ended(event.at_ms, run.number, "preempted", 0, ()))
        elif not event.is_for_another_incarnation:
            self._take(event)

    def _take(self, inputs: InputsHeard) -> None:
        runs = [run for run in self._waiting if self._is_for(inputs, run)]
        device = self._device.get(inputs.slice_id)
        if runs:
            self._accept(runs[0], inputs)
        elif device is None or device.run.number != inputs.number:
            place = (inputs.number, inputs.part, inputs.frontend)
            is_new = all((one.number, one.part, one.frontend) != place for one in self._pool)
            if is_new and sum(one.size_bytes for one in self._pool) + inputs.size_bytes <= POOL_BYTES:
                self._pool.append(inputs)

    @staticmethod
    def _is_for(inputs: InputsHeard, run: RunHeard) -> bool:
        return (inputs.number, inputs.slice_id) == (run.number, run.slice_id)

    def _accept(self, run: RunHeard, inputs: InputsHeard) -> None:
        came = self._inputs[run.number]
        if inputs.part >= len(run.parts) or inputs.part in came:
            return
        frontend, seqs = run.parts[inputs.part]
        is_distinct = len(set(inputs.live)) == len(inputs.live)
        if inputs.frontend == frontend and is_distinct and set(inputs.live) <= set(seqs):
            came[inputs.part] = inputs

    # ------------------------------------------------------------ what is to be done now

    def _look(self, now_ms: float) -> bool:
        """Do one thing; whether there was one."""
        for slice_id, device in self._device.items():
            if device.ends_at_ms <= now_ms:
                del self._device[slice_id]
                self.log.append(self._end_of(device, now_ms))
                return True
        for run in self._waiting:
            came = self._inputs[run.number]
            if len(came) == len(run.parts) and not self._is_live(run):
                self._end(run, Ended(now_ms, run.number, "ok", 0, ()))
                return True
            if now_ms >= run.expires_at_ms + self.tolerance_ms:
                back = run.parts if self._is_live(run) else self._missing(run)
                self._end(run, Ended(now_ms, run.number, "expired", 0, back))
                return True
        for slice_id in {run.slice_id for run in self._waiting} - set(self._device):
            line = sorted(
                (run for run in self._waiting if run.slice_id == slice_id),
                key=lambda run: (run.start_at_ms, run.number),
            )
            able = [run for run in line if self._may_go(run, now_ms, is_first=run is line[0])]
            if able:
                self._go(able[0], now_ms)
                return True
        return False

    def _may_go(self, run: RunHeard, now_ms: float, *, is_first: bool) -> bool:
        came = self._inputs[run.number]
        if len(came) == len(run.parts):
            return is_first or now_ms >= run.start_at_ms
        return self._is_live(run) and now_ms >= run.latest_at_ms

    def _is_live(self, run: RunHeard) -> bool:
        return any(one.live for one in self._inputs[run.number].values())

    def _go(self, run: RunHeard, now_ms: float) -> None:
        came = self._inputs[run.number]
        rows = tuple((came[part].frontend, came[part].live) for part in sorted(came) if came[part].live)
        self._waiting.remove(run)
        started = Started(now_ms, run.number, rows)
        self.log.append(started)
        status = "failed" if run.fails else "ok"
        self._device[run.slice_id] = Device(run, started, now_ms + self._exec_ms(started, run), status)

    def _exec_ms(self, started: Started, run: RunHeard) -> float:
        return run.exec_ms

    def _end(self, run: RunHeard, ended: Ended) -> None:
        self._waiting.remove(run)
        self.log.append(ended)

    def _end_of(self, device: Device, now_ms: float) -> Ended:
        run = device.run
        if device.status == "preempted":
            return Ended(now_ms, run.number, "preempted", 0, ())
        ran = sum(len(live) for _, live in device.started.rows) if device.status == "ok" else 0
        in_at_ms = max(run.at_ms, *(one.at_ms for one in self._inputs[run.number].values()))
        if self._missing(run):
            in_at_ms = max(in_at_ms, run.latest_at_ms)
        return Ended(
            now_ms,
            run.number,
            device.status,
            ran,
            self._missing(run),
            in_at_ms - run.at_ms,
            device.started.at_ms - in_at_ms,
        )

    def _missing(self, run: RunHeard) -> tuple[tuple[str, tuple[int, ...]], ...]:
        came = self._inputs[run.number]
        return tuple(part for place, part in enumerate(run.parts) if place not in came)
