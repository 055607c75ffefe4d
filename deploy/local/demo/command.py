"""`tenuto demo`: a whole cluster, a trained model, real inputs, and an honest account of what happened."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fabric.client import Client
from fabric.clock import MonotonicClock
from fabric.errors import DeadlineExceeded, FabricError
from roles.benchmark.player import PlannedRequest, PlayedRequest, play, run_precisely
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.cli.infer import ledger_of, ledger_table
from roles.cli.json_output import echo_json
from roles.config.cluster import ClusterConfig
from roles.config.read_config import load_config
from roles.workload.arrivals import workload_of

DIGITS = "digits"
CONFIG = Path(__file__).with_name("demo.yaml")
HELD_OUT = Path(__file__).with_name("digits_test.npz")
ACCURACY_MIN = 0.97
IN_TIME_MIN = 0.99  # of all requests: what goodput asks of each model
EMULATED_INPUT = np.zeros((1, 8, 8), np.float32)


@dataclass(frozen=True, slots=True)
class Account:
    """What became of one model's requests. `late` ran and came after the SLO.

    Latencies and batch sizes are over the answered ones, None where there are none.
    """

    answered: int
    late: int
    expired: int
    refused: int
    p50_ms: float | None
    p99_ms: float | None
    batch_mean: float | None
    batch_max: int | None


@click.command()
@click.option("--json", "is_json", is_flag=True, help="The summary as JSON on stdout.")
def demo(is_json: bool) -> None:  # noqa: FBT001  click's flag
    """Start a cluster on this machine, serve real scanned digits, print what happened, stop.

    Exit 1 when the accuracy of the answers is below 97 %.
    """
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # whoever ends the demo, its cluster ends in order
    console = Console(stderr=is_json)
    config = load_config(CONFIG)
    with np.load(HELD_OUT, allow_pickle=False) as held_out:
        images, labels = held_out["images"], held_out["labels"]
    plan = _plan(config, images)
    starting = console.status("starting a scheduler, a frontend, two node agents and their workers")
    with starting as status, temporary_cluster(CONFIG) as cluster:
        status.stop()
        played = _play(plan, cluster.endpoints["client"], console)
        status.update("stopping everything")
        status.start()
    _report(console, config, played, labels, is_json=is_json)


def _plan(
    config: ClusterConfig, images: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
) -> list[PlannedRequest]:
    """Poisson arrivals: every held-out digit once, and the other model's for as long."""
    digits_rps = config.models[0].rate_rps
    assert config.models[0].name == DIGITS
    assert digits_rps is not None
    until_ms = 1_000.0 * 2 * len(images) / digits_rps  # more than enough moments: the digits run out first
    moments = dict(
        zip((model.name for model in config.models), workload_of(config).arrivals(until_ms), strict=True)
    )
    plan = [
        PlannedRequest(float(at_ms), DIGITS, {"image": image})
        for at_ms, image in zip(moments.pop(DIGITS), images, strict=False)
    ]
    last_at_ms = plan[-1].at_ms
    for name, others in moments.items():
        plan += [
            PlannedRequest(float(at_ms), name, {"input": EMULATED_INPUT})
            for at_ms in others
            if at_ms < last_at_ms
        ]
    return sorted(plan, key=lambda planned: planned.at_ms)


def _play(plan: Sequence[PlannedRequest], addresses: Sequence[str], console: Console) -> list[PlayedRequest]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=len(plan))
        return run_precisely(_connected(plan, addresses, lambda: progress.advance(task)))


async def _connected(
    plan: Sequence[PlannedRequest], addresses: Sequence[str], on_done: Callable[[], None]
) -> list[PlayedRequest]:
    """Every request's fate, in the order of the plan."""
    played: dict[int, PlayedRequest] = {}

    def keep(one: PlayedRequest) -> None:
        played[id(one.planned)] = one
        on_done()

    clock = MonotonicClock()
    async with Client(addresses) as client:
        await play(client, plan, clock.now_ms(), clock, keep)
    return [played[id(planned)] for planned in plan]


def _report(
    console: Console,
    config: ClusterConfig,
    played: Sequence[PlayedRequest],
    labels: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    *,
    is_json: bool,
) -> None:
    of_model = {model.name: [p for p in played if p.planned.model == model.name] for model in config.models}
    accounts = {model.name: _account(of_model[model.name], model.slo_ms) for model in config.models}
    answers = [
        (int(one.result.outputs["digit"]), int(label))
        for one, label in zip(of_model[DIGITS], labels, strict=True)
        if one.result is not None
    ]
    right = sum(answer == label for answer, label in answers)
    accuracy = right / len(answers) if answers else 0.0
    example = next((one.result for one in of_model[DIGITS] if one.result is not None), None)
    verdict = verdict_of(accounts, {name: len(several) for name, several in of_model.items()}, accuracy)
    if is_json:
        summary = {
            "verdict": verdict,
            "accuracy": accuracy,
            "digits": len(of_model[DIGITS]),
            "models": {
                name: {field: getattr(account, field) for field in Account.__slots__}
                for name, account in accounts.items()
            },
            "ledger": ledger_of(example.ledger) if example else None,
        }
        echo_json(summary)
    else:
        _print(console, accounts, of_model, answers)
        if example is not None:
            console.print(ledger_table(example))
        console.print(f"accuracy {100 * accuracy:.1f} %")
        console.print(f"verdict: {verdict}")
    unknown = Counter(type(one.error).__name__ for one in played if one.error is not None)
    if accuracy < ACCURACY_MIN:
        raise FabricError(
            f"accuracy {100 * accuracy:.1f} % over {len(answers)} answers; refusals: {dict(unknown)}"
        )


def verdict_of(accounts: Mapping[str, Account], sent: Mapping[str, int], accuracy: float) -> str:
    """What a newcomer should take from it, in one line: whether it works here, and whether it keeps its SLOs."""
    total, in_time = sum(sent.values()), sum(one.answered - one.late for one in accounts.values())
    figures = f"{in_time} of {total} requests were answered within their SLO"
    if accuracy < ACCURACY_MIN:
        return f"it does not work here: too few answers are right; {figures}"
    if in_time < IN_TIME_MIN * total:
        return f"it works, but this host is too slow or too busy for these SLOs: only {figures}"
    return f"it works: {figures}, and the answers are right"


def _account(played: Sequence[PlayedRequest], slo_ms: float) -> Account:
    ran = [one for one in played if one.result is not None]
    latency_ms = [one.latency_ms for one in ran]
    batches = [one.result.ledger.batch_size for one in ran if one.result is not None]
    expired = sum(isinstance(one.error, DeadlineExceeded) for one in played)
    return Account(
        answered=len(ran),
        late=sum(one.latency_ms > slo_ms for one in ran),
        expired=expired,
        refused=len(played) - len(ran) - expired,
        p50_ms=round(float(np.percentile(latency_ms, 50)), 2) if ran else None,
        p99_ms=round(float(np.percentile(latency_ms, 99)), 2) if ran else None,
        batch_mean=round(float(np.mean(batches)), 2) if ran else None,
        batch_max=max(batches, default=None),
    )


def _print(
    console: Console,
    accounts: dict[str, Account],
    of_model: dict[str, list[PlayedRequest]],
    answers: Sequence[tuple[int, int]],
) -> None:
    console.print(accounts_table(accounts, {name: len(played) for name, played in of_model.items()}))
    shown = " ".join(
        f"{answer}" if answer == label else f"[red]{answer}[/]({label})" for answer, label in answers[:40]
    )
    console.print(f"first answers (wrong ones in red, with the label): {shown}")


def accounts_table(accounts: Mapping[str, Account], sent: Mapping[str, int]) -> Table:
    """A row a model, within 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("sent", "answered", "late", "expired", "refused", "p50 ms", "p99 ms", "batch", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, account in accounts.items():
        measured = (account.p50_ms, account.p99_ms, account.batch_mean)
        table.add_row(
            name,
            *map(str, (sent[name], account.answered, account.late, account.expired, account.refused)),
            *("-" if value is None else f"{value:.1f}" for value in measured),
            "-" if account.batch_max is None else str(account.batch_max),
        )
    return table
