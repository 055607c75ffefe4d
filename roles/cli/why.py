"""`tenuto why`: why a model misses its SLO now, and which change would mend it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fabric.errors import PeerLost
from fabric.ids import ModelId, SliceId
from fabric.keys import Keyring
from fabric.messages import StatusListed
from policies.slo import BAD_RATE_ALLOWED
from roles.cli.json_output import as_plain, echo_json
from roles.cli.options import (
    chosen_run_dir,
    json_option,
    key_option,
    keyring_of,
    remark,
    run_dir_flag,
    via_option,
)
from roles.cli.progress import progress
from roles.cli.records import Remembered, models_beside, remembered, require_model
from roles.observability.diagnosis import Evidence, Finding, diagnose
from roles.observability.last_minute import MINUTE_MS, minute_of
from roles.observability.remedies import Remedy, remedies
from roles.observability.situation import Situation
from roles.observability.units import shown_ms
from roles.runtime.process import die_with_parent
from roles.runtime.running_cluster import look


@click.command()
@click.argument("model")
@run_dir_flag
@via_option
@key_option
@json_option
def why(*, model: str, run_dir_option: Path | None, key_file: Path | None, as_json: bool) -> None:
    """Say why MODEL misses its SLO: with evidence of the last minute, and what a simulation of that minute says would mend it."""
    die_with_parent()
    home = chosen_run_dir(run_dir_option)
    try:
        report = last_minute(home.path, keyring_of(key_file), ModelId(model))
    finally:
        home.remove()
    remark(report.remarks)
    with progress("simulations of the last minute") as on_step:
        evidence, findings, found = _examined(report, ModelId(model), on_step)
    if as_json:
        echo_json(why_document(evidence, findings, found))
        return
    for line in told(evidence, findings, found):
        click.echo(line)


def why_document(evidence: Evidence, findings: list[Finding], found: list[Remedy]) -> dict[str, Any]:
    """As `--json` prints it, and the page reads it."""
    return {
        "model": evidence.model_id,
        "slo_ms": evidence.slo_ms,
        "span_s": evidence.span_ms / 1e3,
        "offered": evidence.offered,
        "bad": evidence.bad,
        "bad_rate": evidence.bad_rate,
        "findings": as_plain(findings),
        "remedies": as_plain(found),
        "played": as_plain(evidence.played),
    }


def reasons_of(run_dir: Path, keyring: Keyring | None, model_id: ModelId) -> list[str]:
    """What `tenuto why MODEL` prints. Raises FabricError for a model that is not served."""
    report = last_minute(run_dir, keyring, model_id)
    return told(*_examined(report, model_id, lambda _: None))


def last_minute(run_dir: Path, keyring: Keyring | None, model_id: ModelId) -> Remembered:
    """What is remembered of a model, and of what stands beside it. Raises FabricError for one that is not served."""
    report = look(run_dir, keyring)
    require_model(report, model_id, "tenuto why {}", keyring)
    models = tuple(dict.fromkeys((model_id, *models_beside(model_id, report))))
    return remembered(run_dir, models, report=report, last_ms=MINUTE_MS, keyring=keyring)


def _examined(
    report: Remembered, model_id: ModelId, on_step: Callable[[float], None]
) -> tuple[Evidence, list[Finding], list[Remedy]]:
    situation = situation_of(report)
    evidence = situation.evidence(model_id)
    findings = diagnose(evidence)
    return evidence, findings, remedies(situation.like_live(), evidence, on_step) if findings else []


def situation_of(report: Remembered) -> Situation:
    """What was gathered, as the rules want it. Raises PeerLost where frontends do not answer and no other one counts anything."""
    scheduler, counts = report.report.scheduler, report.counts
    if report.silent and not counts.bin_ms:
        raise PeerLost(
            f"no frontend told what came in the last minute: no answer of {', '.join(report.silent)}"
        )
    plan = scheduler.plan
    arrivals = counts.by_model()
    minute = minute_of(report.plan, arrivals, counts.bin_ms)
    return Situation(
        minute,
        report.requests,
        report.batches,
        arrivals,
        counts.bin_ms,
        counts.counted_ms(minute.span_ms),
        counts.offered(minute.span_ms),
        counts.bad(minute.span_ms),
        {one.model_id: one.replicas for one in scheduler.models},
        report.report.late_timers_ms,
        {} if plan is None else {one.model_id: one.planned_rps for one in plan.models if one.planned_rps},
        _unhosted(scheduler),
        counts.unserved(minute.span_ms),
        {one.model_id: hosting_of(scheduler, one.model_id) for one in scheduler.models},
        report.absences,
    )


def hosting_of(scheduler: StatusListed, model_id: ModelId) -> set[SliceId]:
    """The slices that should host a model, whether they are ready or not."""
    return {one.slice_id for one in scheduler.slices if model_id in one.models}


def _unhosted(scheduler: StatusListed) -> dict[ModelId, dict[SliceId, str]]:
    """Why models have no ready slice: what the plan says, else what each slice says that should host them."""
    reasons: dict[ModelId, dict[SliceId, str]] = defaultdict(dict)
    for one in scheduler.slices:
        state = f"{one.slice_id} is {one.state}" + (f": {one.reason}" if one.reason else "")
        its = dict.fromkeys(one.models, state) | {left.model_id: left.reason for left in one.left_out}
        for model_id, reason in its.items():
            reasons[model_id][one.slice_id] = reason
    if scheduler.plan is not None:
        reasons |= {one.model_id: {SliceId(""): one.reason} for one in scheduler.plan.unplaced}
    return reasons


def told(evidence: Evidence, findings: list[Finding], found: list[Remedy]) -> list[str]:
    """The lines for people."""
    model, slo = evidence.model_id, shown_ms(evidence.slo_ms)
    span = f"the last {evidence.span_ms / 1e3:.3g} s"
    count = f"{evidence.bad} of {evidence.offered} requests of {span} were late or refused ({evidence.bad_rate:.1%})"
    if not findings:
        if not evidence.offered:
            return [f"No request for {model} came in {span}."]
        if evidence.bad_rate < BAD_RATE_ALLOWED:
            return [f"{model} keeps its SLO of {slo}: {count}."]
        return [f"{model} misses its SLO of {slo}: {count}. Nothing that is measured explains it."]
    lines = [f"{model} misses its SLO of {slo}: {count}."]
    if evidence.replicas == 0:
        nobody = f"{model} is not served, and no request for it came in {span}."
        lines = [f"{model} is not served: {count}." if evidence.offered else nobody]
    for number, finding in enumerate(findings, 1):
        lines += [f"{number}. {finding.cause.replace('_', ' ')}: {finding.sentence}.", f"   {finding.advice}"]
    enough = [remedy for remedy in found if remedy.is_enough]
    helping = [remedy for remedy in found if not remedy.is_enough]
    if enough:
        lines.append("A simulation of that minute says that each of these would have mended it:")
        lines += [_remedy(remedy) for remedy in enough]
    if helping:
        lines.append("These would have helped:")
        lines += [_remedy(remedy) for remedy in helping]
    return lines


def _remedy(remedy: Remedy) -> str:
    others = f", worst other model {remedy.worst_other:.1%}" if remedy.worst_other >= BAD_RATE_ALLOWED else ""
    return f" - {remedy.change}: {remedy.bad_rate:.1%} bad{others}"
