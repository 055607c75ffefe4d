"""`tenuto explain` and `tenuto trace`: one request in sentences, and the last seconds as a picture."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from fabric.errors import FabricError
from fabric.ids import ModelId
from fabric.keys import Keyring
from roles.cli.json_output import as_plain, echo_json
from roles.cli.options import (
    FloatRange,
    OutputPath,
    chosen_run_dir,
    json_option,
    key_option,
    keyring_of,
    remark,
    run_dir_flag,
    via_option,
    writing,
)
from roles.cli.records import Remembered, newest_bad, remembered, require_model
from roles.cli.why import hosting_of, last_minute, situation_of
from roles.observability.batch_timeline import write_timeline
from roles.observability.diagnosis import Finding, measured
from roles.observability.explain import Explanation
from roles.observability.explain import explain as explained
from roles.observability.remembered import RequestSeen

LAST_S_MAX = 600.0


@click.command()
@click.argument("request_id", metavar="[ID]", default="")
@click.option(
    "--last-late", "late_model", metavar="MODEL", help="The newest request of MODEL that was late or refused."
)
@run_dir_flag
@via_option
@key_option
@json_option
def explain(
    *,
    request_id: str,
    late_model: str | None,
    run_dir_option: Path | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Say why the request ID was late, or answered when it was: where its time went, what else ran, what would have sufficed.

    ID is `request_id` in an answer's ledger. Frontends remember late and refused requests and some of the others, for as long as there is room.
    """
    if bool(request_id) == (late_model is not None):
        raise click.UsageError("give either ID or --last-late MODEL")
    models = () if late_model is None else (ModelId(late_model),)
    home = chosen_run_dir(run_dir_option)
    try:
        found = _remembered(home.path, key_file, models, request_id=request_id)
        _show(home.path, _asked(found, request_id, late_model), found, as_json=as_json)
    finally:
        home.remove()


def _asked(found: Remembered, request_id: str, late_model: str | None) -> RequestSeen:
    if late_model is not None:
        require_model(found.report, ModelId(late_model), "tenuto explain --last-late {}", found.keyring)
        request = next(newest_bad(found.requests, ModelId(late_model)), None)
        if request is None:
            raise FabricError(f"no request of {late_model} is remembered that was late or refused")
        return request
    return _first(found, request_id)


def explanation_of(run_dir: Path, keyring: Keyring | None, request_id: str) -> list[str]:
    """What `tenuto explain ID` prints. Raises FabricError where no frontend remembers it."""
    found = remembered(run_dir, request_id=request_id, keyring=keyring)
    return list(_explained(run_dir, _first(found, request_id), found).sentences)


def _first(found: Remembered, request_id: str) -> RequestSeen:
    request = next(iter(found.requests), None)
    if request is None:
        raise FabricError(
            f"no frontend remembers a request {request_id!r}: it was in time and not sampled, or is too long ago"
        )
    return request


def _explained(run_dir: Path, request: RequestSeen, found: Remembered) -> Explanation:
    model_id = request.record.model_id
    hosting = hosting_of(found.report.scheduler, model_id)
    lately: list[Finding] = []
    if request.is_bad:
        with contextlib.suppress(
            FabricError
        ):  # a model that is served no more, or roles that are busy: it goes without
            report = last_minute(run_dir, found.keyring, model_id)
            lately = measured(situation_of(report).evidence(model_id, is_played=False))
    return explained(request, found.batches, hosting, lately, found.absences)


def _show(run_dir: Path, request: RequestSeen, found: Remembered, *, as_json: bool) -> None:
    explanation = _explained(run_dir, request, found)
    if as_json:
        echo_json({"request": as_plain(request.record), **as_plain(explanation)})
    else:
        for sentence in explanation.sentences:
            click.echo(sentence)


@click.command()
@click.option(
    "--output",
    "path",
    type=OutputPath(),
    default=Path("tenuto-trace.json"),
    show_default=True,
    help="The trace, for https://ui.perfetto.dev.",
)
@click.option(
    "--last",
    "last_s",
    type=FloatRange(0, LAST_S_MAX, is_low_allowed=False),
    default=10.0,
    show_default=True,
    help="So many seconds.",
)
@run_dir_flag
@via_option
@key_option
@json_option
def trace(
    *, path: Path, last_s: float, run_dir_option: Path | None, key_file: Path | None, as_json: bool
) -> None:
    """Write the last seconds of the running cluster, batches and requests, for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    last_ms = last_s * 1e3
    home = chosen_run_dir(run_dir_option)
    try:
        found = _remembered(home.path, key_file, (), last_ms=last_ms)
    finally:
        home.remove()
    batches = [one for one in found.batches if one.entry.ended_ago_ms <= last_ms]
    requests = [one for one in found.requests if one.record.ended_ago_ms <= last_ms]
    with writing(path):
        write_timeline(path, batches, requests)
    if as_json:
        echo_json({"file": str(path), "batches": len(batches), "requests": len(requests)})
    else:
        click.echo(
            f"wrote {path}: {len(batches)} batches, {len(requests)} requests; open it at https://ui.perfetto.dev"
        )


def _remembered(
    run_dir: Path,
    key_file: Path | None,
    models: tuple[ModelId, ...],
    *,
    request_id: str = "",
    last_ms: float | None = None,
) -> Remembered:
    found = remembered(run_dir, models, request_id=request_id, last_ms=last_ms, keyring=keyring_of(key_file))
    remark(found.remarks)
    return found
