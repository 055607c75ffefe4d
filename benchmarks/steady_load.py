"""A process that sends at a steady rate, open loop, while something is done to the cluster: what became of each request."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.errors import RequestError
from roles.benchmark.player import PlannedRequest, PlayedRequest, play, run_precisely
from roles.runtime.process import PARENT_VARIABLE, child_environment, die_with_parent

CLOCK = MonotonicClock()
BEGINS_AFTER_MS = 300.0  # when its client is connected
JOIN_S = 10.0
context = multiprocessing.get_context("spawn")


@dataclass(slots=True, frozen=True)
class Load:
    """What is sent: each request to a model drawn from `models`, Poisson, or at even distances.

    `budget_ms` None: the model's SLO. `inputs`: of each request, for emulated devices anything.
    """

    rate_rps: float
    models: Sequence[str]
    budget_ms: float | None = None
    is_even: bool = False
    inputs: Mapping[str, np.ndarray] = field(default_factory=lambda: {"input": np.zeros(4, np.float32)})


@dataclass(slots=True, frozen=True)
class Fate:
    """One request: when it was to be sent (on `CLOCK`), how late it was, how long it all took from then, and how it ended.

    `code`: `ok`, or the code of the refusal.
    """

    at_ms: float
    late_ms: float
    latency_ms: float
    code: str


@contextmanager
def sending(addresses: Sequence[str], load: Load, fates: list[Fate]) -> Iterator[None]:
    """Send for as long as the block lasts; `fates` are there after it."""
    ours, theirs = context.Pipe()
    os.environ.update(child_environment())
    sender = context.Process(target=_send, args=(addresses, load, theirs), daemon=True)
    sender.start()
    os.environ.pop(PARENT_VARIABLE, None)
    try:
        ours.recv()
        yield
        ours.send(None)
        fates.extend(ours.recv())
    finally:
        sender.join(JOIN_S)
        sender.kill()


def _send(addresses: Sequence[str], load: Load, out: Connection) -> None:
    """The sender's process: until something comes through the pipe, then the fates go back through it."""
    die_with_parent()
    # Fates are kept to the end: walking all of them would stop the sender for as long as a loss takes, and count as one.
    gc.set_threshold(700, 10, 1_000_000)
    out.send(run_precisely(_play(addresses, load, out)))


async def _play(addresses: Sequence[str], load: Load, out: Connection) -> list[Fate]:
    fates: list[Fate] = []
    began_at_ms = CLOCK.now_ms() + BEGINS_AFTER_MS

    def plan() -> Iterator[PlannedRequest]:
        draw = random.Random(1)
        per_ms = load.rate_rps / 1e3
        at_ms = 0.0
        while not out.poll():
            at_ms += 1 / per_ms if load.is_even else draw.expovariate(per_ms)
            yield PlannedRequest(at_ms, draw.choice(load.models), load.inputs, load.budget_ms)

    def note(played: PlayedRequest) -> None:
        error = played.error
        code = "ok" if error is None else error.code if isinstance(error, RequestError) else "PeerLost"
        fates.append(Fate(began_at_ms + played.planned.at_ms, played.late_ms, played.latency_ms, code))

    async with Client(addresses) as client:
        out.send(None)
        await play(client, plan(), began_at_ms, CLOCK, note)
    return fates
