"""Two schedulers, one of which stands by: real processes, which are killed and stopped while requests come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml

from fabric.client import ask_status
from fabric.errors import ConfigError, PeerLost
from fabric.ids import PeerId
from fabric.messages import Changed, PlanCopy, StatusListed
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.config.read_config import parse_config
from roles.runtime.core import Heard, Send, Tick
from roles.runtime.process import read_run_file
from roles.runtime.running_cluster import look
from roles.scheduler.availability.replica import KeepPlan, PrepareCore
from roles.scheduler.planning.saved_plan import Begun, SavedPlan
from roles.scheduler.planning.start_config import Written
from roles.scheduler.replay_start import about_scheduler
from roles.scheduler.shell import SchedulerShell
from roles.scheduler.surroundings import Recording
from tests.integration.proc import processes_naming, until
from tests.integration.steady_load import steady_load
from tests.integration.test_cli import tenuto
from tests.scarcity import full_disk

pytestmark = pytest.mark.timeout(180)

MODEL: dict[str, object] = {
    "name": "fast",
    "slo_ms": 3_000,
    "profile": {"alpha_ms": 0.5, "beta_ms": 2, "max_batch": 32},
}
DOCUMENT: dict[str, object] = {
    "models": [MODEL],
    "cluster": {"nodes": [{"host": "one", "gpus": 2}, {"host": "two"}, {"host": "three"}], "schedulers": 2},
    "batching": "eager",
}
ONE_NODE: Mapping[str, object] = DOCUMENT | {
    "cluster": {"gpus": 2, "schedulers": [{"host": "a"}, {"host": "b", "standby": True}]}
}


@contextmanager
def cluster_of(
    tmp_path: Path, document: Mapping[str, object], flags: Sequence[str] = ()
) -> Iterator[TemporaryCluster]:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(dict(document)), encoding="utf-8")
    with temporary_cluster(path, flags) as cluster:
        until(lambda: bool(active(cluster)[1].standing.standbys), what="a standby")  # type: ignore[union-attr]  # it is told
        yield cluster
    assert not cluster.run_dir.exists()


def active(cluster: TemporaryCluster) -> tuple[str, StatusListed]:
    """The scheduler that serves, and how it is."""
    listed = look(cluster.run_dir).scheduler
    assert listed.standing is not None
    return listed.role_id, listed


def pid_of(cluster: TemporaryCluster, role_id: str) -> int:
    found = read_run_file(cluster.run_dir / f"{role_id}.json")
    assert found is not None
    return found.pid


def until_active(cluster: TemporaryCluster, role_id: str) -> StatusListed:
    def is_so() -> bool:
        try:
            return active(cluster)[0] == role_id
        except PeerLost:
            return False

    until(is_so, what=f"{role_id} is active")
    return active(cluster)[1]


def replaced(cluster: TemporaryCluster, lost: str, next_one: str) -> StatusListed:
    """One is killed, and the other has taken over. `tenuto up` sleeps until then: on a busy host it may start the lost one again first."""
    os.kill(cluster.pid, signal.SIGSTOP)
    try:
        os.kill(pid_of(cluster, lost), signal.SIGKILL)
        return until_active(cluster, next_one)
    finally:
        os.kill(cluster.pid, signal.SIGCONT)


def until_it_stands_by(cluster: TemporaryCluster, role_id: str) -> None:
    """Connected, and with the plan."""

    def is_so() -> bool:
        standing = active(cluster)[1].standing
        assert standing is not None
        return any(one.scheduler_id == role_id and one.has_plan for one in standing.standbys)

    until(is_so, what=f"{role_id} stands by")


def standing_of(cluster: TemporaryCluster, role_id: str) -> str:
    listed = ask_status([f"ipc://{cluster.run_dir}/{role_id}.control"])
    assert listed.standing is not None
    return listed.standing.state


def workers(cluster: TemporaryCluster) -> set[int]:
    return {
        pid
        for pid, command in processes_naming(str(cluster.run_dir)).items()
        if "roles.gpu_worker" in command
    }


def first_plan_of(written: Written) -> str:
    """As a copy of the plan has it."""
    settings, planning = written.first_plan()
    return about_scheduler(settings, written.config.batching, planning).decode()


def frontend_counters(cluster: TemporaryCluster) -> dict[str, float]:
    return ask_status(cluster.endpoints["client"][:1]).counters


def test_the_standby_takes_over_from_one_that_is_killed_and_every_request_is_answered(tmp_path: Path) -> None:
    with cluster_of(tmp_path, DOCUMENT) as cluster:
        first, before = active(cluster)
        assert first == "scheduler-0"
        serving = workers(cluster)
        with steady_load(cluster.endpoints["client"], {"fast": 100.0}) as fates:
            until(lambda: len(fates.of["fast"]) > 50, what="load")
            after = replaced(cluster, first, "scheduler-1")
            until_it_stands_by(cluster, "scheduler-0")
        refused = fates.refused("fast")
        assert len(refused) <= 0.1 * len(fates.of["fast"]), refused
        assert before.standing is not None
        assert after.standing is not None
        assert after.standing.epoch > before.standing.epoch
        assert workers(cluster) == serving, "what serves goes on"
        counters = frontend_counters(cluster)
        assert counters["accepted"] == counters["answers"] + counters.get("refusals", 0)
        assert counters["schedulers_changed"] == 1


def test_one_that_was_only_stopped_finds_itself_replaced_and_commands_nobody(tmp_path: Path) -> None:
    with cluster_of(tmp_path, DOCUMENT) as cluster:
        stopped = pid_of(cluster, "scheduler-0")
        with steady_load(cluster.endpoints["client"], {"fast": 100.0}) as fates:
            until(lambda: len(fates.of["fast"]) > 50, what="load")
            os.kill(stopped, signal.SIGSTOP)
            try:
                until_active(cluster, "scheduler-1")
            finally:
                os.kill(stopped, signal.SIGCONT)
            until(lambda: standing_of(cluster, "scheduler-0") == "standby", what="it stands by")
            until_it_stands_by(cluster, "scheduler-0")
            assert active(cluster)[0] == "scheduler-1"
        assert pid_of(cluster, "scheduler-0") == stopped
        assert fates.of["fast"].count("ok") >= 0.8 * len(fates.of["fast"])
        counters = frontend_counters(cluster)
        assert counters["accepted"] == counters["answers"] + counters.get("refusals", 0)


@pytest.mark.parametrize("flags", [[], ["--together"]], ids=["apart", "beside a frontend"])
def test_one_that_is_told_to_end_hands_over_and_fails_no_request(tmp_path: Path, flags: list[str]) -> None:
    with cluster_of(tmp_path, DOCUMENT, flags) as cluster:
        endpoints = cluster.endpoints["client"]
        with steady_load(endpoints, {"fast": 100.0}) as fates:
            for first, second in (("scheduler-0", "scheduler-1"), ("scheduler-1", "scheduler-0")):
                until(lambda: len(fates.of["fast"]) > 50, what="load")
                pid = pid_of(cluster, first)
                os.kill(pid, signal.SIGTERM)
                until_active(cluster, second)
                until(lambda: not Path(f"/proc/{pid}").exists(), what="its end")  # noqa: B023  it is waited for in here
                until_it_stands_by(cluster, first)
        assert [one for one in fates.refused("fast") if one != "PeerLost" or not flags] == []
        said = (cluster.run_dir / "up.err").read_text(encoding="utf-8")
        assert said.count("scheduler_handed_over") == 2, said


def test_what_was_added_while_serving_outlives_two_schedulers(tmp_path: Path) -> None:
    added = tmp_path / "added.yaml"
    added.write_text(yaml.safe_dump({"models": [MODEL | {"name": "added"}]}), encoding="utf-8")
    with cluster_of(tmp_path, ONE_NODE) as cluster:
        run_dir = ("--run-dir", str(cluster.run_dir))
        ended = tenuto("models", "add", str(added), *run_dir, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        until(lambda: len(workers(cluster)) == 1, what="the end of the slices before the change")
        serving = workers(cluster)
        for lost, next_one in (("scheduler-0", "scheduler-1"), ("scheduler-1", "scheduler-0")):
            listed = replaced(cluster, lost, next_one)
            assert {model.model_id for model in listed.models} == {"fast", "added"}
            until_it_stands_by(cluster, lost)
        with steady_load(cluster.endpoints["client"], {"added": 50.0}) as fates:
            until(lambda: len(fates.of["added"]) > 20, what="load")
        assert fates.refused("added") == []
        assert workers(cluster) == serving, "no slice was started anew"


def test_a_frontend_beside_a_scheduler_that_stands_by_goes_by_the_active_one(tmp_path: Path) -> None:
    with cluster_of(tmp_path, ONE_NODE, ["--together"]) as cluster:
        replaced(cluster, "scheduler-0", "scheduler-1")  # and the frontend beside it
        until_it_stands_by(cluster, "scheduler-0")
        with steady_load([f"ipc://{cluster.run_dir}/frontend-0.client"], {"fast": 50.0}) as fates:
            until(lambda: fates.of["fast"].count("ok") > 20, what="load")
        assert active(cluster)[0] == "scheduler-1"


def test_an_agent_that_starts_anew_knows_what_it_granted(tmp_path: Path) -> None:
    with cluster_of(tmp_path, ONE_NODE) as cluster:
        epoch = active(cluster)[1].standing.epoch  # type: ignore[union-attr]  # it is told
        os.kill(pid_of(cluster, agent_of(cluster)), signal.SIGKILL)
        until(lambda: _epoch(cluster) >= epoch and bool(workers(cluster)), what="it serves again")
        with steady_load(cluster.endpoints["client"], {"fast": 50.0}) as fates:
            until(lambda: fates.of["fast"].count("ok") > 20, what="load")


def agent_of(cluster: TemporaryCluster) -> str:
    (path,) = cluster.run_dir.glob("node-*.json")
    return path.stem


def _epoch(cluster: TemporaryCluster) -> int:
    try:
        standing = active(cluster)[1].standing
    except PeerLost:
        return -1
    return -1 if standing is None else standing.epoch


def test_a_standby_needs_a_configuration_that_has_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"models": [MODEL], "cluster": {"gpus": 1}}), encoding="utf-8")
    ended = tenuto("scheduler", "--standby", str(path), cwd=tmp_path)
    assert ended.returncode == 3
    assert "cluster.schedulers: is 1" in ended.stderr
    assert tenuto("scheduler", "--standby", "--index", "0", str(path), cwd=tmp_path).returncode == 2


def test_a_full_disk_keeps_no_standby_with_a_journal_from_taking_over(tmp_path: Path) -> None:
    """A disk that fills up when it stands by; where no journal may be at all, it does not even begin."""
    models = [MODEL | {"name": f"m{number}", "profile": {"table": {1: 2.0}}} for number in range(40)]
    document = {**DOCUMENT, "models": models}
    written = Written(parse_config(document, tmp_path), document, tmp_path)
    recording = Recording(tmp_path / "journal", 1 << 20)
    with closing(SchedulerShell(written, tmp_path, recording, number=1)) as shell:
        with full_disk():
            core = shell._make_core()
        core.handle(Tick(), 1_000.0)
        assert shell._lost()["journal_events_lost"] == 1.0
    nowhere = Recording(tmp_path / "nowhere" / "journal", 1 << 20)
    with pytest.raises(ConfigError, match="cannot write the journal"):
        SchedulerShell(written, tmp_path, nowhere, number=1)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_newer_plan_on_this_hosts_disk_counts_for_more_than_a_prepared_one(
    tmp_path: Path, *, is_prepared: bool
) -> None:
    """Its copy did not come: the standby was cut off, or it is too large for a message."""
    documents = [
        DOCUMENT | {"models": [MODEL | {"name": name} for name in names]} for names in ("a", ("a", "b"))
    ]
    older, newer = (Written(parse_config(one, tmp_path), one, tmp_path) for one in documents)
    with closing(SchedulerShell(older, tmp_path, number=1)) as shell:

        def copy(number: int, written: Written) -> PlanCopy:
            return PlanCopy(16, number, shell._kept.digest, first_plan_of(written))

        shell._perform(KeepPlan(copy(1, older)))
        if is_prepared:
            shell._perform(PrepareCore())
        SavedPlan(tmp_path, "scheduler-0", older.document).keep(copy(2, newer))
        shell._make_core()
        assert shell._made is not None
        assert {model.model_id for model in shell._made.settings().models} == {"a", "b"}


def test_a_standby_that_was_sent_no_plan_makes_one_once_and_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an election it took longer than the lease lasted, and in the next one again."""
    written = Written(parse_config(DOCUMENT, tmp_path), DOCUMENT, tmp_path)
    made = [written.first_plan()]
    monkeypatch.setattr(Written, "first_plan", lambda _: made.pop())
    with closing(SchedulerShell(written, tmp_path, number=1)) as shell:
        shell._perform(PrepareCore())
        assert made == []
        for _ in range(2):
            shell._make_core()
            assert shell._made is not None
            assert {model.model_id for model in shell._made.settings().models} == {"fast"}


def test_what_a_standby_has_to_say_goes_before_it_makes_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(parse_config(DOCUMENT, tmp_path), DOCUMENT, tmp_path)
    begun, done = written.first_plan(), []

    def first_plan(_: Written) -> Begun:
        done.append("planned")
        return begun

    monkeypatch.setattr(Written, "first_plan", first_plan)
    with closing(SchedulerShell(written, tmp_path, number=1)) as shell:
        monkeypatch.setattr(shell._outbox, "put", lambda _, message: done.append(message.reason))
        monkeypatch.setattr(shell._outbox, "flush", lambda: done.append("flushed"))
        shell._perform(Send(PeerId("operator/1"), Changed(1, "refused", reason="stands by")))
        shell._perform(PrepareCore())
    assert done == ["stands by", "flushed", "planned"]


@pytest.mark.parametrize(("digest", "epoch"), [("", 16), ("of another file", 0)])
def test_a_standby_counts_a_plan_that_its_host_kept_if_it_is_of_use(
    tmp_path: Path, digest: str, epoch: int
) -> None:
    written = Written(parse_config(DOCUMENT, tmp_path), DOCUMENT, tmp_path)
    kept = SavedPlan(tmp_path, "scheduler-1", DOCUMENT)
    kept.keep(PlanCopy(16, 1, digest or kept.digest, first_plan_of(written)))
    with closing(SchedulerShell(written, tmp_path, number=1)) as shell:
        assert shell._replica._election.plan_epoch == epoch


@pytest.mark.parametrize(("digest", "epoch"), [("", 33), ("of another file", 0)])
def test_a_standby_counts_the_plan_that_it_was_sent_if_it_is_of_use(
    tmp_path: Path, digest: str, epoch: int
) -> None:
    written = Written(parse_config(DOCUMENT, tmp_path), DOCUMENT, tmp_path)
    with closing(SchedulerShell(written, tmp_path, number=1)) as shell:
        copy = PlanCopy(33, 1, digest or shell._kept.digest, first_plan_of(written))
        for action in shell._replica.handle(Heard(PeerId("scheduler-0"), copy), 0.0):
            shell._perform(action)
        assert shell._replica._election.plan_epoch == 33
        shell._perform(PrepareCore())
        assert shell._replica._election.plan_epoch == epoch


def test_a_plan_of_which_no_core_can_be_made_keeps_nobody_from_standing_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = Written(parse_config(DOCUMENT, tmp_path), DOCUMENT, tmp_path)
    with closing(SchedulerShell(written, tmp_path, number=1)) as shell:
        shell._perform(KeepPlan(PlanCopy(16, 1, shell._kept.digest, first_plan_of(written))))
        with monkeypatch.context() as broken:
            broken.setattr("roles.scheduler.shell.scheduler_core", lambda *_: int("zz"))
            shell._perform(PrepareCore())
        assert "plan_not_prepared" in caplog.text
        shell._make_core()
        assert shell._made is not None
