"""An open-loop run by several sender processes that start together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from fabric.clock import MonotonicClock
from fabric.errors import FabricError
from roles.benchmark.player import ANSWER_GRACE_MS, answer_grace_ms
from roles.benchmark.share import (
    READY_LIMIT_S,
    LoadPlan,
    LoadRecord,
    OtherSenderFailed,
    StartGate,
    asked_of,
    play_share,
)
from roles.benchmark.verdict import LoadRun, PlannedSlices, judge, planned_slices
from roles.runtime.process import PARENT_VARIABLE, child_environment, die_with_parent
from roles.runtime.spawned import DeafContext
from roles.workload.outcomes import Window

_POLL_S = 0.2


def run_load(
    plan: LoadPlan,
    window: Window,
    on_step: Callable[[float], None],
    planned: PlannedSlices | None = None,
) -> LoadRun:
    """Play `plan` with its processes; `on_step` hears which part of the time has passed. `planned` spares planning again.

    Raises PeerLost when there is no frontend at the target, FabricError when a sender fails.
    """
    planned = planned or planned_slices(plan.config)
    context = DeafContext()
    start = StartGate(context.Barrier(plan.processes), context.Value("d", 0.0))
    os.environ.update(child_environment())
    readers: list[Connection] = []
    senders = []
    try:
        for number in range(plan.processes):
            reader, writer = context.Pipe(duplex=False)
            sender = context.Process(target=_send, args=(plan, number, start, writer), daemon=True)
            sender.start()
            writer.close()
            readers.append(reader)
            senders.append(sender)
        longest_ms = max(slo_ms for _, slo_ms in asked_of(plan.config))
        records = _collect(readers, plan.until_ms, answer_grace_ms(longest_ms), on_step)
    finally:
        os.environ.pop(PARENT_VARIABLE, None)
        for sender in senders:
            sender.terminate()
        for sender in senders:
            sender.join(1.0)
    return judge(plan.config, records, window, planned)


def _send(plan: LoadPlan, number: int, start: StartGate, writer: Connection) -> None:
    """A sender process: its record or its error goes through the pipe."""
    die_with_parent()
    try:
        writer.send(play_share(plan, number, start))
    except FabricError as error:
        start.barrier.abort()
        writer.send(error)


def _collect(
    readers: Sequence[Connection], until_ms: float, grace_ms: float, on_step: Callable[[float], None]
) -> list[LoadRecord]:
    clock = MonotonicClock()
    began_at_ms = clock.now_ms()
    limit_ms = READY_LIMIT_S * 1000 + until_ms + grace_ms + ANSWER_GRACE_MS
    waiting = list(readers)
    records: list[LoadRecord] = []
    failures: list[FabricError] = []
    while waiting:
        passed_ms = clock.now_ms() - began_at_ms
        if passed_ms > limit_ms:
            raise FabricError("a sender does not end")
        on_step(min(1.0, passed_ms / until_ms))
        for reader in wait(waiting, _POLL_S):
            assert isinstance(reader, Connection)
            waiting.remove(reader)
            try:
                said = reader.recv()
            except EOFError as error:
                raise FabricError("a sender process ended without a word") from error
            if isinstance(said, FabricError):
                failures.append(said)
            else:
                records.append(said)
    if failures:
        raise next((one for one in failures if not isinstance(one, OtherSenderFailed)), failures[0])
    return records
