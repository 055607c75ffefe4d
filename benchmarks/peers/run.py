"""Measures Tenuto and its peers in turn, prints the table and writes the JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.bound import foreseen_rps
from benchmarks.peers.cases import Case, RealCase
from benchmarks.peers.closed_loop import Closed
from benchmarks.peers.cpu_cost import CpuCost
from benchmarks.peers.measure import OURS, Contender, Effort, Measured, Measurement
from benchmarks.peers.sender import Sender
from benchmarks.peers.simulated import Simulated, simulated

DEFAULT = f"ours ({OURS[0]})"

Tuned = Mapping[tuple[str, str], str]
"""By contender and case the setting that an earlier run found best."""


def compare(
    contenders: Sequence[Contender], cases: Sequence[Case], effort: Effort, tuned: Tuned
) -> Iterator[Measured | Simulated]:
    """All of them in every case, one at a time; prints each as it is known."""
    with Sender() as sender:
        for case in cases:
            print(f"\n{case.name} ({case.bound_text})", flush=True)
            if not isinstance(case, RealCase):
                foreseen = foreseen_rps(case, effort.seeds)
                print(f"  nobody, even if every arrival were known, over {foreseen:.0f} r/s", flush=True)
            done: list[Measured] = []
            for contender in contenders:
                if not contender.settings(case):
                    continue
                measurement = Measurement(contender, case, effort, sender)
                measured = measurement.run(tuned.get((contender.name, case.name)))
                done.append(measured)
                for line in _lines(measured, done[0]):
                    print(line, flush=True)
                yield measured
            if conclusion := _conclusion(done):
                print(conclusion, flush=True)
            if isinstance(case, RealCase) and done and done[0].contender == DEFAULT:
                beside = simulated(done[0], case, effort)
                print(beside, flush=True)
                yield beside


def _lines(measured: Measured, first: Measured) -> Iterator[str]:
    """The row, and where the time went, if the contender tells."""
    ratio = ""
    if is_ours(first) and first.goodput_rps and measured.goodput_rps:
        ratio = f"ours / it {first.goodput_rps / measured.goodput_rps:5.2f}"
    spread = f"({min(measured.per_seed_rps):.0f} to {max(measured.per_seed_rps):.0f})"
    late_ms = max((verdict.late_p99_ms for verdict in measured.at_goodput), default=0.0)
    doubt = f", too late at {len(measured.doubtful_rps)} rates" if measured.doubtful_rps else ""
    yield (
        f"  {measured.contender:14} {measured.version:7} {measured.goodput_rps:5.0f} r/s {spread:14} {ratio:15}"
        f"  load {measured.load_average:.1f}, sender late p99 {late_ms:.2f} ms{doubt}  [{measured.setting}]"
    )
    for verdict in measured.at_goodput[:1]:
        if verdict.stages_ms:
            stages = ", ".join(
                f"{stage.removesuffix('_ms')} {spent_ms:.2f}" for stage, spent_ms in verdict.stages_ms.items()
            )
            yield (
                f"      at {verdict.rate_rps:.0f} r/s p50 {verdict.p50_ms or 0:.1f}, p99 {verdict.p99_ms or 0:.1f} ms, "
                f"batches of {verdict.batch_mean or 0:.1f}; mean ms: {stages}"
            )


def _conclusion(done: Sequence[Measured]) -> str:
    peers = [measured for measured in done if not is_ours(measured)]
    if not peers or not is_ours(done[0]):
        return ""
    best = max(peers, key=lambda measured: measured.goodput_rps)
    if not best.goodput_rps:
        return "  no peer carried anything"
    return f"  best peer: {best.contender}, {best.goodput_rps:.0f} r/s; ours / best {_of_best(done):.2f}"


def _of_best(done: Sequence[Measured]) -> float | None:
    """The goodput of the first of ours, of the best peer's; None where one of the two is missing or carried nothing."""
    ours = [measured.goodput_rps for measured in done if is_ours(measured)]
    peers_rps = max((measured.goodput_rps for measured in done if not is_ours(measured)), default=0.0)
    return ours[0] / peers_rps if ours and peers_rps else None


def is_ours(measured: Measured) -> bool:
    """Whether it is a row of Tenuto."""
    return measured.contender.startswith("ours")


Found = Measured | Simulated | Closed | CpuCost


def as_json(found: Sequence[Found], effort: Effort, machine: Mapping[str, str]) -> str:
    """Everything, for the record, and for `read_tuned`. `machine`: of real models, what they ran on."""
    of_case: dict[str, list[Measured]] = {}
    for one in found:
        if isinstance(one, Measured):
            of_case.setdefault(one.case.name, []).append(one)
    return json.dumps(
        {
            "cores": os.cpu_count(),
            "machine": machine,
            "effort": asdict(effort),
            "results": [
                {**asdict(one), "case_name": one.case.name, "goodput_rps": one.goodput_rps}
                for one in found
                if isinstance(one, Measured)
            ],
            "ours_of_best_peer": {name: _of_best(done) for name, done in of_case.items()},
            "simulated": [{**asdict(one), "apart": one.apart} for one in found if isinstance(one, Simulated)],
            "closed": [asdict(one) for one in found if isinstance(one, Closed)],
            "cpu": [asdict(one) for one in found if isinstance(one, CpuCost)],
        },
        indent=1,
        default=lambda tensor: f"{tensor.dtype} {tensor.shape}",  # a request's inputs, of a real model
    )


def read_tuned(file: Path) -> Tuned:
    """The settings that an earlier run's JSON found best; those that carried nothing are searched again."""
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    return {
        (result["contender"], result["case_name"]): result["setting"]
        for result in results
        if result["goodput_rps"]
    }
