"""Requests a second with so many under way all the time: what a server carries where nobody waits for a deadline.

Each contender with the setting that carries most. Senders of HTTP are raw sockets, so that no client of a peer is in the figures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.gateway import play
from benchmarks.peers.cases import Case
from benchmarks.peers.measure import Contender, Effort
from benchmarks.peers.sender import Load, Target, calm, client_of
from fabric.errors import FabricError

RATE_OF_NOBODY: Final = 1.0
"""A load has one; a closed loop does not follow it."""
SLO_MS: Final = 2_000.0
"""Instead of the case's: no request is refused for its deadline, by whoever has one."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A contender's requests per second in a case, with its best setting. `tried`: what each setting carried."""

    contender: str
    version: str
    case_name: str
    in_flight: int
    setting: str
    rps: float
    tried: tuple[tuple[str, float], ...]
    load_average: float


def closed_loops(
    contenders: Sequence[Contender], cases: Sequence[Case], effort: Effort, in_flight: int
) -> Iterator[Closed]:
    """All of them in every case, one at a time; prints each as it is known."""
    for case in dict.fromkeys(replace(case, slo_ms=SLO_MS) for case in cases):
        print(f"\n{case.name}, {in_flight} under way ({case.bound_text})", flush=True)
        for contender in contenders:
            load_average, tried = os.getloadavg()[0], []
            for setting, start in contender.settings(case):
                try:
                    with start() as target:
                        tried.append((setting, asyncio.run(_carried_rps(target, case, effort, in_flight))))
                except FabricError as error:
                    print(f"  {contender.name}, {setting}: {error}", flush=True)
            setting, rps = max(tried, key=lambda one: one[1], default=("", 0.0))
            print(
                f"  {contender.name:20} {contender.version:7} {rps:6.0f} r/s  load {load_average:.1f}  [{setting}]",
                flush=True,
            )
            yield Closed(
                contender.name,
                contender.version,
                case.name,
                in_flight,
                setting,
                rps,
                tuple(tried),
                load_average,
            )


async def _carried_rps(target: Target, case: Case, effort: Effort, in_flight: int) -> float:
    load = Load(target, case.inputs, RATE_OF_NOBODY, SLO_MS, 1, effort.window)
    async with client_of(target) as client:
        await calm(client, load)
        turn = 0

        def ask() -> Awaitable[Any]:
            nonlocal turn
            turn += 1
            model = load.models[turn % len(load.models)]
            return client.submit(model, load.inputs[model], SLO_MS)

        await play(ask, in_flight, effort.warmup_s)
        answered = await play(ask, in_flight, effort.window_s)
    return answered / effort.window_s
