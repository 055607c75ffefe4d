"""`tenuto record` writes what it has, whoever is gone by then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fabric.clock import MonotonicClock
from fabric.errors import PeerLost
from fabric.ids import ModelId
from fabric.keys import Keyring
from fabric.messages import RequestsRemembered, StatusListed
from roles.cli import record as record_module
from roles.cli.record import record
from roles.frontend.arrival_bins import ARRIVAL_BIN_MS, MinuteBins
from roles.runtime.running_cluster import ActiveScheduler, ProcessReport
from tests.builders import model_info

CLOCK = MonotonicClock()
FRONTENDS = {"frontend-0": "one"}


class Cluster:
    """`models`: by shard, what its active scheduler lists each time that it is asked, and of no shard where none is; `pids`: of frontends, likewise.

    A request of each model comes before each time.
    """

    def __init__(self, models: list[dict[int, dict[str, float]]], frontends: list[dict[str, str]]) -> None:
        self.models = models
        self.frontends = frontends
        self.bins: dict[str, MinuteBins] = {}
        self.connected = 1
        """Frontends, to the scheduler."""

    def active_schedulers(self, run_dir: Path, keyring: Keyring | None) -> Mapping[int, ActiveScheduler]:
        del run_dir, keyring
        now = self.models.pop(0)
        if not now:
            raise PeerLost("no active scheduler answers")
        return {
            shard: ActiveScheduler(
                (),
                StatusListed(
                    "scheduler-0",
                    1,
                    (),
                    tuple(map(model_info, its, its.values())),
                    {"frontends": float(self.connected)},
                ),
            )
            for shard, its in now.items()
        }

    def processes_in(self, run_dir: Path) -> list[ProcessReport]:
        del run_dir
        return [
            ProcessReport(
                role_id, 7, alive=True, addresses={"client": (f"ipc:///run/{role_id}",)}, incarnation=its
            )
            for role_id, its in self.frontends.pop(0).items()
        ]

    def arrivals_of(
        self, process: ProcessReport, model_id: ModelId, keyring: Keyring | None
    ) -> RequestsRemembered:
        del process, keyring
        bins = self.bins.setdefault(model_id, MinuteBins(ARRIVAL_BIN_MS))
        now_ms = CLOCK.now_ms()
        bins.note(now_ms - 500.0)  # within the second that is recorded, however long the command took to ask
        return RequestsRemembered((), bins.listed(now_ms), ARRIVAL_BIN_MS, 0, bins.number(now_ms))


def recorded(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Result, dict[str, int]]:
    """Of the last second, which asks twice; and how many arrivals of each model are in the file."""
    for name in ("active_schedulers", "processes_in", "arrivals_of"):
        monkeypatch.setattr(record_module, name, getattr(cluster, name))
    path = tmp_path / "trace.csv"
    words = ["--output", str(path), "--last", "1", "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(record, words)
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    models = [row.partition(",")[2] for row in rows]
    return result, {model: models.count(model) for model in sorted(set(models))}


def test_a_moment_without_a_scheduler_costs_nothing_of_the_models_that_were_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster([{0: {"m": 50.0}}, {}], [FRONTENDS, FRONTENDS])
    result, found = recorded(cluster, tmp_path, monkeypatch)
    assert (result.exit_code, list(found)) == (0, ["m"]), result.output
    assert "the scheduler did not answer: some arrivals may be missing" in result.output
    assert "removed" not in result.output


@pytest.mark.parametrize("words", [("--last", "1e-16"), ("--duration", "1e-16")])
def test_a_while_that_is_no_time_is_a_usage_error(words: tuple[str, str]) -> None:
    result = CliRunner().invoke(record, words)
    assert (result.exit_code, "'1e-16' is not a number from 0.001 to" in result.output) == (2, True), (
        result.output
    )


def test_frontends_of_other_hosts_are_said_not_to_be_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster([{0: {"m": 50.0}}] * 2, [FRONTENDS, FRONTENDS])
    cluster.connected = 2
    result, _ = recorded(cluster, tmp_path, monkeypatch)
    said = "1 frontend of another host was not asked: with --via HOST and --key all of a deployed cluster are"
    assert said in result.output
    cluster = Cluster([{0: {"m": 50.0}}] * 2, [FRONTENDS, FRONTENDS])
    assert "not asked" not in recorded(cluster, tmp_path, monkeypatch)[0].output


def test_a_recording_outlives_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, found = recorded(Cluster([{0: {"m": 50.0}}, {}], [FRONTENDS, {}]), tmp_path, monkeypatch)
    assert (result.exit_code, list(found)) == (0, ["m"]), result.output
    assert "frontend-0 ended meanwhile: up to 20 s of its arrivals are missing" in result.output


def test_a_shard_that_does_not_answer_has_not_removed_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {0: {"m": 50.0}, 1: {"n": 50.0}}
    cluster = Cluster([both, {0: both[0]}], [FRONTENDS, FRONTENDS])
    result, found = recorded(cluster, tmp_path, monkeypatch)
    assert list(found) == ["m", "n"], result.output
    assert "the scheduler of shard 1 did not answer" in result.output
    assert "removed" not in result.output


def test_what_counts_anew_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[dict[int, dict[str, float]]] = [{0: {"m": 50.0, "n": 50.0}}, {0: {"m": 60.0}}]
    result, _ = recorded(Cluster(models, [FRONTENDS, {"frontend-0": "another"}]), tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    for line in ("frontend-0 ended", "model m got another SLO", "model n was removed"):
        assert f"{line} meanwhile: up to 20 s of its arrivals are missing" in result.output


def test_where_there_is_no_cluster_to_begin_with_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, found = recorded(Cluster([{}], [FRONTENDS]), tmp_path, monkeypatch)
    assert isinstance(result.exception, PeerLost)
    assert found == {}
