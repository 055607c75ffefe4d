"""What a request costs in CPU, of the sender and of everything that serves, at rates that all carry.

A lone request costs most: the fewer come at once, the more each of them pays for wake-ups and cold caches. The model takes so
little time that four devices carry every rate. Of a peer's settings the cheapest counts that keeps 99 % within the SLO.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.peers.cases import Case
from benchmarks.peers.measure import Contender, Effort
from benchmarks.peers.sender import Load, Sender, Target, Verdict
from benchmarks.stage import CpuMeter, children
from fabric.errors import FabricError

CASE: Final = Case(devices=4, models=1, slo_ms=50.0, alpha_ms=0.02, beta_ms=2.0)
"""`benchmarks/throughput.py`'s model, with the batches of up to 16 that all contenders have here."""


@dataclass(frozen=True, slots=True)
class CpuCost:
    """At one rate: CPU in microseconds a request, of the process that sends and of all that serve."""

    contender: str
    version: str
    setting: str
    sender_us: float
    servers_us: float
    verdict: Verdict
    load_average: float

    @property
    def all_us(self) -> float:
        """Of both."""
        return self.sender_us + self.servers_us


def cpu_costs(
    contenders: Sequence[Contender], rates_rps: Sequence[float], effort: Effort
) -> Iterator[CpuCost]:
    """Of all of them, one at a time, with the first seed; prints each as it is known."""
    print(
        f"\n{CASE.name}, {CASE.beta_ms:g} + {CASE.alpha_ms:g} b ms a batch; CPU in us a request", flush=True
    )
    with Sender() as sender:
        for contender in contenders:
            costs = list(_of_settings(contender, rates_rps, effort, sender))
            for rate_rps in rates_rps:
                good = [cost for cost in costs if cost.verdict.rate_rps == rate_rps and cost.verdict.is_good]
                if not good:
                    print(
                        f"  {contender.name:20} {rate_rps:7,.0f} r/s: 99 % in time with no setting",
                        flush=True,
                    )
                    continue
                cheapest = min(good, key=lambda cost: cost.all_us)
                print(_line(cheapest), flush=True)
                yield cheapest


def _of_settings(
    contender: Contender, rates_rps: Sequence[float], effort: Effort, sender: Sender
) -> Iterator[CpuCost]:
    for setting, start in contender.settings(CASE):
        load_average = os.getloadavg()[0]
        try:
            with start() as target:
                for rate_rps in rates_rps:
                    sender_us, servers_us, verdict = _sent(sender, target, rate_rps, effort)
                    yield CpuCost(
                        contender.name,
                        contender.version,
                        setting,
                        sender_us,
                        servers_us,
                        verdict,
                        load_average,
                    )
        except FabricError as error:
            print(f"  {contender.name}, {setting}: {error}", flush=True)


def _sent(sender: Sender, target: Target, rate_rps: float, effort: Effort) -> tuple[float, float, Verdict]:
    """The warm-up counts too: what is sent then costs as much."""
    load = Load(target, CASE.inputs, rate_rps, CASE.slo_ms, effort.seeds[0], effort.window)
    meter = CpuMeter({str(pid): pid for pid in _descendants(os.getpid())})
    meter.begin()
    verdict = sender.send(load)
    _, spent_s = meter.spent()
    requests = rate_rps * effort.window.until_ms / 1e3
    sender_us = 1e6 * spent_s.pop(str(sender.pid)) / requests
    return sender_us, 1e6 * sum(spent_s.values()) / requests, verdict


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for child in children(pid):
        found |= {child} | _descendants(child)
    return found


def _line(cost: CpuCost) -> str:
    verdict = cost.verdict
    return (
        f"  {cost.contender:20} {cost.version:7} {verdict.rate_rps:7,.0f} r/s  sender {cost.sender_us:5.0f}, "
        f"servers {cost.servers_us:5.0f}, both {cost.all_us:5.0f}  p50 {verdict.p50_ms or 0:.1f}, "
        f"p99 {verdict.p99_ms or 0:.1f} ms  load {cost.load_average:.1f}  [{cost.setting}]"
    )
