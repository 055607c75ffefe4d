"""What of a host's folders is in use: by what is written there, and by what runs."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import pytest

from deploy.ssh.on_host import requests
from deploy.ssh.on_host.folders import Place
from deploy.ssh.on_host.looking import COMPLETE, facts
from deploy.ssh.on_host.requests import alone, environment, note, remove, start, write_state
from deploy.ssh.on_host.system import MARK, Refused

ROLES = ("node-a", "frontend-0")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Place({"host": "a", "directory": ".t", "units": "systemd"})
    for folder in ("roles", "wheels", "versions", "configs"):
        (made.base / folder).mkdir(parents=True)
    made.run_dir.mkdir(mode=0o700)
    return made


def put(place: Place, role_id: str, version: str, *, serves: bool) -> None:
    """A role's script; its process wrote its stamp as it began, and its run file where it serves."""
    place.script(role_id).write_text(
        f"echo stamp-{version}\ncd {place.base}/configs/c{version} && exec {place.base}/versions/{version}/bin/tenuto x\n"
    )
    (place.run_dir / f"{role_id}.stamp").write_text(f"stamp-{version}\n")
    (place.run_dir / f"{role_id}.json").write_text(json.dumps({"pid": os.getpid() if serves else 0}))


def told_to_run(place: Place, version: str) -> None:
    state = {"version": version, "config": f"c{version}", "before": {}, "addresses": {}, "roles": ROLES}
    write_state(place, state)


def test_a_version_has_served_when_all_roles_of_the_host_do_with_it(place: Place) -> None:
    told_to_run(place, "1")
    put(place, "node-a", "1", serves=True)
    told_to_run(place, "1")
    assert place.served == {"version": "", "config": ""}, "a frontend is to come"
    put(place, "frontend-0", "1", serves=True)
    told_to_run(place, "1")
    for failed in ("2", "3"):
        told_to_run(place, failed)
        put(place, "node-a", failed, serves=failed == "3")
        assert place.served == {"version": "1", "config": "c1"}
    put(place, "frontend-0", "3", serves=False)
    assert place.served["version"] == "1"
    put(place, "frontend-0", "3", serves=True)  # it took longer than its start was waited for
    assert place.served["version"] == "3"


def test_a_gateway_that_does_not_start_leaves_its_host_in_step_with_the_others(place: Place) -> None:
    put(place, "node-a", "1", serves=True)
    put(place, "frontend-0", "1", serves=True)
    put(place, "gateway-a", "1", serves=False)
    write_state(
        place,
        {"version": "1", "config": "c1", "before": {}, "addresses": {}, "roles": [*ROLES, "gateway-a"]},
    )
    assert place.served == {"version": "1", "config": "c1"}


def test_a_state_of_before_is_of_what_served(place: Place) -> None:
    (place.base / "state.json").write_text(json.dumps({"version": "1", "config": "c1"}))
    assert place.served == {"version": "1", "config": "c1"}


def test_nothing_goes_that_a_role_is_started_with(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1", "2", "3", "4"):
        (place.version(version) / "bin").mkdir(parents=True)
        (place.base / f"wheels/tenuto-{version}-py3-none-any.whl").touch()
    put(place, "frontend-0", "1", serves=True)
    put(place, "node-a", "3", serves=False)
    request = {"version": "4", "extras": [], "is_offline": True, "kept": ["4"]}
    monkeypatch.setattr(
        requests, "run", lambda *_, **__: (place.version("4") / "bin").mkdir(parents=True, exist_ok=True)
    )
    environment(place, request)
    assert {path.name for path in (place.base / "versions").iterdir()} == {"1", "3", "4"}
    assert {path.name.split("-")[1] for path in (place.base / "wheels").iterdir()} == {"1", "3", "4"}
    assert (place.version("4") / COMPLETE).exists()
    assert place.in_use("configs") >= {"c1", "c3"}


def installing(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is run from now on, as far as it says what it makes or installs."""
    ran: list[str] = []

    def run(command: Sequence[str], *_: object, **__: object) -> None:
        if "venv" in command:
            (place.version("4") / "bin").mkdir(parents=True)
        if "--target" in command:
            Path(command[command.index("--target") + 1], "supervisor").mkdir(parents=True)
        ran.append("venv" if "venv" in command else command[-1])

    monkeypatch.setattr(requests, "run", run)
    return ran


def test_an_environment_gets_the_extras_that_it_lacks_and_keeps_those_it_has(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = installing(place, monkeypatch)
    request = {"version": "4", "is_offline": True, "kept": ["4"]}
    for extras in (["worker"], ["worker"], ["metrics"], ["metrics", "worker"], []):
        environment(place, {**request, "extras": extras})
    assert ran == ["venv", "tenuto[worker]==4", "tenuto[metrics]==4"]
    told = facts(place, {"ports": {}})
    assert told["versions"] == {"4": ["metrics", "worker"]}


def test_what_keeps_roles_alive_is_installed_though_the_environment_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `deploy.units` was changed."""
    ran = installing(place, monkeypatch)
    request = {"version": "4", "extras": [], "is_offline": True, "kept": ["4"]}
    environment(place, request)
    supervised = Place({"host": "a", "directory": ".t", "units": "supervisor"})
    assert not facts(supervised, {"ports": {}})["has_manager"]
    environment(supervised, request)
    environment(supervised, request)
    assert ran == ["venv", "tenuto==4", "supervisor"]
    assert facts(supervised, {"ports": {}})["has_manager"]


def test_a_folder_that_a_process_runs_in_is_in_use_whatever_its_script_says_by_now(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.base / "configs/c1").mkdir()
    monkeypatch.chdir(place.base / "configs/c1")
    put(place, "node-a", "2", serves=True)
    assert place.in_use("configs") == {"c1", "c2"}


def test_who_waits_while_all_is_removed_and_who_comes_later_are_not_at_work_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, removed, inside, left = (threading.Event() for _ in range(4))

    def pause(wait_ms: int) -> None:
        """The one that waits, having seen that somebody holds the lock."""
        if wait_ms:
            waits.set()
            assert removed.wait(10)

    def waiting() -> None:
        with alone(place.base):
            inside.set()
            assert left.wait(10)

    real_flock = fcntl.flock
    monkeypatch.setattr(requests, "refuse_forgotten", pause)
    thread = threading.Thread(target=waiting, daemon=True)
    with alone(place.base):
        thread.start()
        assert waits.wait(10)
        remove(place, {})
    assert not place.base.exists()
    removed.set()
    assert inside.wait(10)
    monkeypatch.setattr(requests, "LOCK_LIMIT_S", -1)
    with pytest.raises(Refused, match="another deploy"), alone(place.base):
        pass
    left.set()
    thread.join(10)

    def removed_before(lock: IO[str], how: int) -> None:
        """Its holder takes the file away when this one has opened it."""
        monkeypatch.setattr(fcntl, "flock", real_flock)
        (place.base / requests.LOCK).unlink()
        real_flock(lock, how)

    monkeypatch.setattr(requests, "LOCK_LIMIT_S", 10)
    monkeypatch.setattr(fcntl, "flock", removed_before)
    with alone(place.base):
        assert requests._locked(place.base) is None


@pytest.mark.parametrize("end", [os.pipe, lambda: [one.detach() for one in reversed(socket.socketpair())]])
def test_who_waits_does_not_begin_what_its_operator_has_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, end: Callable[[], Sequence[int]]
) -> None:
    """A forgotten `remove` would empty the folder that a later `up` has filled."""
    operators, ours = end()
    monkeypatch.setattr(requests, "ANSWER_FD", ours)
    began = []

    def asked() -> None:
        with pytest.raises(Refused, match="went away before it was begun"), alone(place.base):
            began.append(1)

    with alone(place.base):
        thread = threading.Thread(target=asked, daemon=True)
        thread.start()
        os.close(operators)
        thread.join(10)
        assert not thread.is_alive(), "the lock is held, and it has left all the same"
    asked()  # nor where the lock is free by then
    assert not began
    os.close(ours)


def test_what_is_noted_as_drained_stays_so_whatever_starts_until_it_is_noted_that_it_is_not(
    place: Place,
) -> None:
    told_to_run(place, "1")
    note(place, {"state": {"drained": ["a"]}})
    told_to_run(place, "2")
    assert (place.state["version"], place.state["drained"]) == ("2", ["a"])
    note(place, {"state": {"drained": []}})
    told_to_run(place, "3")
    assert place.state["drained"] == []


@pytest.mark.parametrize("host", ["", ".", "..", "a/../..", "/", "a/b"])
def test_a_hosts_folder_is_one_below_the_directory_whoever_asks(host: str) -> None:
    """A host takes names from whoever deploys, and `remove` empties the folder."""
    with pytest.raises(Refused, match="can be no host's name"):
        Place({"host": host, "directory": ".t", "units": "auto"})


def test_a_role_is_not_ended_for_a_folder_that_is_not_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place, "node-a", "1", serves=True)
    before = place.script("node-a").read_text()
    state = {"version": "2", "config": "c2", "before": {}, "addresses": {}, "roles": ["node-a"]}
    request = {"role_id": "node-a", "script": "x", "stamp": "y", "state": state, "is_again": False}
    with pytest.raises(Refused, match="another deploy has removed it meanwhile"):
        start(place, request)
    assert place.script("node-a").read_text() == before


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another user's": (lambda path: path.mkdir(), "belongs to user"),
    "a link": (lambda path: path.symlink_to("."), "no directory"),
    "a file": (lambda path: path.touch(), "no directory"),
    "everybody's": (lambda path: path.mkdir(), "others may write in"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("asked", requests.DOES)
def test_nothing_is_asked_of_a_run_directory_that_others_may_write_in(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str, kind: str
) -> None:
    shutil.rmtree(place.run_dir)
    make, reason = FOREIGN[kind]
    make(place.run_dir)
    before = sorted(place.base.rglob("*"))
    if kind == "everybody's":
        place.run_dir.chmod(0o777)
    if kind == "another user's":
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "umask", lambda _: 0)
    line = json.dumps({"do": asked, "host": "a", "directory": ".t", "units": "supervisor"}).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    requests.main()
    told = json.loads(capsys.readouterr().out.removeprefix(MARK))
    assert str(place.base) in told["error"]
    assert reason in told["error"]
    assert sorted(path for path in place.base.rglob("*") if path.name != requests.LOCK) == before


def test_a_run_directory_that_another_user_makes_meanwhile_is_refused_before_anything_is_in_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (place.version("1"), place.base / "configs/c1"):
        folder.mkdir()
        (folder / COMPLETE).touch()
    shutil.rmtree(place.run_dir)
    place.run_dir.symlink_to(".")
    state = {"version": "1", "config": "c1", "before": {}, "addresses": {}, "roles": ["node-a"]}
    request = {"role_id": "node-a", "script": "x", "stamp": "y", "state": state, "is_again": False}
    with pytest.raises(Refused, match="no directory"):
        start(place, request)
    assert not place.script("node-a").exists()
    assert not (place.base / "state.json").exists()


def test_run_files_are_taken_only_from_directories_of_ours(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of `tenuto up`, too, is among the temporary files, where anybody makes what is not there."""
    others = tmp_path / "runtime/tenuto"
    others.mkdir(parents=True)
    (others / "scheduler-0.json").write_text(json.dumps({"role_id": "scheduler-0", "pid": os.getpid()}))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(others.parent))
    monkeypatch.delenv("TENUTO_RUN_DIR", raising=False)
    assert [one["role_id"] for one in requests.run_files(place, {})["run_files"]] == ["scheduler-0"]
    others.chmod(0o777)
    assert requests.run_files(place, {})["run_files"] == []


def linked(base: Path) -> None:
    """The directory is a link to one that is ours, and its own folder everybody's."""
    real = base.parent.rename(base.parent.parent / "real")
    base.parent.symlink_to(real)
    base.parent.parent.chmod(0o777)


BASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "everybody's": (lambda base: base.chmod(0o777), "others may write in"),
    "everybody's, sticky": (lambda base: base.chmod(0o1777), "others may write in"),
    "in everybody's": (lambda base: base.parent.chmod(0o777), "others may write in"),
    "further down in everybody's": (lambda base: base.parent.parent.chmod(0o777), "others may write in"),
    "a link": (lambda base: base.symlink_to(base.rename(base.with_name("b"))), "no directory"),
    "behind a link in everybody's": (linked, "others may write in"),
}


def asked_to(asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The error."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "umask", lambda _: 0)
    line = json.dumps({"do": asked, "host": "a", "directory": "s/.t", "units": "supervisor"}).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    requests.main()
    return str(json.loads(capsys.readouterr().out.removeprefix(MARK)).get("error", ""))


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("asked", requests.DOES)
def test_nothing_is_asked_of_a_folder_of_scripts_and_keys_that_others_may_write_in_or_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str, kind: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    base = tmp_path / "s/.t/a"
    (base / "run").mkdir(parents=True, mode=0o700)
    make, reason = BASES[kind]
    make(base)
    before = sorted(tmp_path.rglob("*"))
    assert reason in asked_to(asked, monkeypatch, capsys)
    assert sorted(tmp_path.rglob("*")) == before, "nor is there a lock"


@pytest.mark.parametrize("owned", [True, False])
def test_a_directory_of_another_user_is_refused_and_one_that_its_group_may_write_in_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owned: bool
) -> None:
    base = tmp_path / "s/.t/a"
    base.mkdir(parents=True)
    for path in (base, base.parent, base.parent.parent):
        path.chmod(0o775)
    if owned:
        with alone(base):
            assert (base / requests.LOCK).exists()
        return
    real, others = Path.lstat, base.parent

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        uid = os.getuid() + 1 if path == others else found.st_uid
        return os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(Refused, match="belongs to user"), alone(base):
        pass
    assert not (base / requests.LOCK).exists()
