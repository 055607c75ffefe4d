"""What a person should know at once of a cluster: rules over one look at it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fabric.messages import SliceState
from policies.slo import BAD_RATE_ALLOWED
from roles.observability.units import shown_ms
from roles.page.snapshot import Look
from roles.runtime.live_figures import LiveModel

LATE_TIMERS_MS: Final = 5.0
"""Timers that late (p99 of a process) are told: batches leave earlier for them, up to this (the guard's most)."""
BAD_MIN: Final = 2
"""Requests: one alone is no alarm, whatever part of a rare model's it is."""
BAD_RATE_OF_ONE: Final = 0.5
"""From such a part on one alone makes a model miss its SLO."""
_LEVELS: Final = {SliceState.STARTING: "warn", SliceState.FAILED: "bad", SliceState.LOST: "bad"}
ALARMS_MAX: Final = 24
NAMED_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Alarm:
    """`level`: bad (requests suffer from it) or warn. `about`: a model, slice, GPU or process."""

    level: str
    about: str
    text: str


def is_missed(model: LiveModel | None) -> bool:
    """Whether too many of a model's requests of the last seconds were late or dropped."""
    if model is None or model.bad_rate is None or model.bad_rate < BAD_RATE_ALLOWED:
        return False
    return model.late + model.drops >= BAD_MIN or model.bad_rate >= BAD_RATE_OF_ONE


def alarms_of(look: Look) -> Sequence[Alarm]:
    """Bad ones first."""
    found = [*_models(look), *_slices(look), *_gpus(look), *_processes(look), *_plan(look)]
    return sorted(found, key=lambda alarm: alarm.level != "bad")[:ALARMS_MAX]


def _models(look: Look) -> Iterator[Alarm]:
    listed = look.report.scheduler
    for info in listed.models:
        live = look.figures.models.get(info.model_id)
        if info.replicas == 0:
            yield Alarm("bad", info.model_id, "no ready slice hosts it")
        elif live is not None and is_missed(live) and live.late + live.drops >= BAD_MIN:
            drops = ", ".join(f"{count} {code}" for code, count in live.dropped.items())
            parts = [f"{live.late} late"] * (live.late > 0) + [drops] * bool(drops)
            yield Alarm(
                "bad",
                info.model_id,
                f"misses its SLO: {live.bad_rate:.1%} of the last {int(live.window_s)} s ({', '.join(parts)})",
            )
    for warning in listed.warnings:
        yield Alarm("warn", warning.model_id, warning.reason)


def _slices(look: Look) -> Iterator[Alarm]:
    for one in look.report.scheduler.slices:
        level = _LEVELS.get(SliceState(one.state))
        if level is not None:
            yield Alarm(
                level, one.slice_id, f"{one.state}: {one.reason}" if one.reason else f"is {one.state}"
            )


def _gpus(look: Look) -> Iterator[Alarm]:
    for gpu in look.report.scheduler.gpus:
        name = f"{gpu.node_id}/gpu{gpu.info.gpu}"
        if gpu.sample is not None and gpu.sample.throttle:
            yield Alarm("warn", name, f"its clocks are held down by {', '.join(gpu.sample.throttle)}")
        if gpu.sharing is not None and gpu.sharing.reason:
            yield Alarm("warn", name, gpu.sharing.reason)


def _processes(look: Look) -> Iterator[Alarm]:
    report = look.report
    for process in report.processes:
        if not process.alive:
            yield Alarm("bad", process.role_id, "its process has ended")
    for role_id in look.figures.silent:
        yield Alarm("bad", role_id, "does not answer: its requests are not counted here")
    late = {role_id: its.get("timer_late_p99_ms", 0.0) for role_id, its in report.counters.items()}
    late = {role_id: late_ms for role_id, late_ms in late.items() if late_ms >= LATE_TIMERS_MS}
    if late:
        yield Alarm(
            "warn",
            _several(sorted(late, key=lambda role_id: -late[role_id])),
            f"timers are up to {shown_ms(max(late.values()))} late (p99 since the start): the host's cores are taken",
        )
    for role_id, counters in report.counters.items():
        refused = sum(value for name, value in counters.items() if name.endswith("keys_refused"))
        if refused:
            yield Alarm("warn", role_id, f"refused {refused:.0f} connections and messages for their key")
    for shard in report.shards:
        if not shard.scheduler:
            yield Alarm("bad", f"shard {shard.shard}", "no scheduler answers")


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_MAX]) + (
        f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    )


def _plan(look: Look) -> Iterator[Alarm]:
    plan = look.report.scheduler.plan
    if plan is None:
        return
    for one in plan.unplaced:
        rate = "" if one.rate_rps is None else f"{one.rate_rps:.0f} r/s of it "
        yield Alarm("bad", one.model_id, f"{rate}found no place: {one.reason}")
    if plan.gpus_advised > plan.gpus:
        yield Alarm("warn", "GPUs", f"the load asks for {plan.gpus_advised}, there are {plan.gpus}")
