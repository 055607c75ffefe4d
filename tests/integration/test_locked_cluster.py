"""A whole cluster with keys: its commands by TCP, what it says of strangers, and where its secrets are not."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fabric.client import BlockingClient, ClientOptions, ask_status
from fabric.curve import guarded
from fabric.errors import Unauthorised
from fabric.ids import PeerId
from fabric.keys import Keyring, read_pair
from roles.runtime.defects import DefectReport
from roles.runtime.process import read_run_file
from tests.environment import AT_ONCE
from tests.integration.proc import until
from tests.integration.test_keys import bare_address, run
from tests.integration.test_up import CLUSTER, ROOT, Home, home

__all__ = ["home"]


@pytest.fixture
def locked(home: Home, tmp_path: Path) -> Home:
    folder = tmp_path / "keys"
    run("create", str(folder))
    for node in ("local", "other"):
        run("add", str(folder), f"node/{node}")
    for name in ("alice", "eve"):
        run("add", str(folder), f"client/{name}", "--out", str(tmp_path / f"{name}.key"))
    eve = (tmp_path / "eve.key").read_bytes()
    run("revoke", str(folder), "client/eve")
    (tmp_path / "eve.key").write_bytes(eve)
    (tmp_path / "eve.key").chmod(0o600)
    home.file.write_text(CLUSTER + 'security: {keys: keys}\nlisten: {control: "tcp://127.0.0.1:0"}\n')
    return home


def command(*arguments: object) -> tuple[int, str, str]:
    """A command that knows nothing of the run directory: exit code, stdout, stderr."""
    told = subprocess.run(
        [sys.executable, "-m", "roles.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=AT_ONCE
        | {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TENUTO_RUN_DIR": "/nonexistent/run"},
    )
    return told.returncode, told.stdout, told.stderr


def test_commands_reach_a_cluster_by_tcp_with_a_key_and_not_without(locked: Home, tmp_path: Path) -> None:
    process, started = locked.up("--apart")
    control = next(one for one in started["endpoints"]["control"] if one.startswith("tcp:"))
    client = next(one for one in started["endpoints"]["client"] if one.startswith("tcp:"))
    operator, alice = tmp_path / "keys" / "operator.key", tmp_path / "alice.key"
    np.save(tmp_path / "x.npy", np.zeros(4, np.float32))
    loaded = tmp_path / "loaded.yaml"
    loaded.write_text(CLUSTER.replace("slo_ms: 200", "slo_ms: 200, rate_rps: 50"))

    for address in (control, bare_address(control)):
        code, out, err = command("status", "--scheduler", address, "--key", operator, "--json")
        assert code == 0, err
        assert [one["model_id"] for one in json.loads(out)["models"]] == ["resnet50"]
        assert command("status", "--scheduler", address, "--key", operator)[0] == 0
    code, out, err = command(
        *("models", "set", "resnet50", "--slo-ms", 250, "--scheduler", control, "--key", operator, "--json")
    )
    assert (code, json.loads(out)["status"]) == (0, "ok"), err
    for key in (operator, alice):
        code, out, err = command(
            "infer", "resnet50", tmp_path / "x.npy", "--target", client, "--key", key, "--json"
        )
        assert code == 0, err
        assert json.loads(out)["ledger"]["batch_size"] == 1
    code, out, err = command(
        *("bench", loaded, "--target", client, "--key", alice, "--duration", 1, "--warmup", 0, "--json")
    )
    assert code in {0, 1, 4}, err  # on a host that is busy its senders are late, and say so
    assert json.loads(out)["models"]["resnet50"]["offered"] > 0
    assert json.loads(out)["models"]["resnet50"]["good"] > 0

    refused = [
        (("status", "--scheduler", control), "asks for a key"),
        (("status", "--scheduler", bare_address(control)), "asks for a key"),
        (("status", "--scheduler", control, "--key", alice), "the operator's key may"),
        (
            ("models", "set", "resnet50", "--slo-ms", 9, "--scheduler", bare_address(control)),
            "asks for a key",
        ),
        (("infer", "resnet50", tmp_path / "x.npy", "--target", bare_address(client)), "asks for a key"),
        (
            ("infer", "resnet50", tmp_path / "x.npy", "--target", client, "--key", tmp_path / "eve.key"),
            "does not let our key in",
        ),
    ]
    for arguments, told in refused:
        code, out, err = command(*arguments)
        assert code not in {0, 6}, arguments
        assert told in err, err
        assert "Traceback" not in err
        assert out == ""
    with pytest.raises(Unauthorised):  # a node's key is let in nowhere where clients are
        ask_status(bare_address(client), keyring=Keyring.of_folder(tmp_path / "keys", "node/other"))
    code, shown, err = locked.run("status")
    assert code == 0, err
    assert "Refused for their key by frontend-0" in shown
    assert "Refused for their key by scheduler-0" in shown
    process.terminate()
    assert process.wait(60) == 0


def test_a_client_is_told_what_there_is_and_not_how_it_is(locked: Home, tmp_path: Path) -> None:
    _, started = locked.up("--apart")
    client = next(one for one in started["endpoints"]["client"] if one.startswith("tcp:"))
    with BlockingClient(client, ClientOptions(key_file=tmp_path / "alice.key")) as sdk:
        assert [info.model_id for info in sdk.models()] == ["resnet50"]
    operator = Keyring.of_folder(tmp_path / "keys", "operator")
    assert ask_status(client, 10_000.0, keyring=operator).role_id == "frontend-0"
    control = next(one for one in started["endpoints"]["control"] if one.startswith("tcp:"))
    assert (
        ask_status(control, 10_000.0, server=PeerId("scheduler-0"), keyring=operator).role_id == "scheduler-0"
    )


def test_secrets_are_in_no_command_line_log_status_configuration_report_or_journal(
    locked: Home, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    secrets = {path.name: read_pair(path).secret for path in (*folder.glob("*.key"), tmp_path / "alice.key")}
    assert len(secrets) == 6
    process, started = locked.up("--apart")
    client = next(one for one in started["endpoints"]["client"] if one.startswith("tcp:"))
    with BlockingClient(client, ClientOptions(key_file=tmp_path / "alice.key")) as sdk:
        sdk.infer("resnet50", {"input": np.zeros(4, np.float32)}, budget_ms=2_000.0)
    said = {
        name: locked.run(*words)[1:]
        for name, words in {"status": ("status",), "json": ("status", "--json")}.items()
    }
    said["config"] = command("config", "show", locked.file, "--json")[1:]
    said["keys"] = command("keys", "show", folder, "--json")[1:]
    said["wrong"] = command(
        "infer", "resnet50", folder / "operator.key", "--target", client, "--key", folder / "trusted.json"
    )[1:]
    pids = locked.processes()
    assert len(pids) >= 4
    places: dict[str, bytes] = {name: "".join(words).encode() for name, words in said.items()}
    for pid in pids:
        for name in ("cmdline", "environ"):
            places[f"{pid}/{name}"] = Path(f"/proc/{pid}/{name}").read_bytes()
    scheduler = read_run_file(locked.path / "scheduler-0.json")
    assert scheduler is not None
    for path in locked.path.iterdir():
        if path.is_file():
            places[path.name] = path.read_bytes()
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"{path} is not its user's alone"
    process.terminate()
    out, err = process.communicate(timeout=60)
    places["up"] = (out + err).encode()
    assert len(places) > 15
    for name, content in places.items():
        for whose, secret in secrets.items():
            assert secret.encode() not in content, f"the secret of {whose} is in {name}"


def test_a_defects_report_shows_no_secret(locked: Home, tmp_path: Path) -> None:
    """It has the error's text and its event; whatever of ours is in them shows itself by its `repr`."""
    keyring = Keyring.of_folder(tmp_path / "keys", "scheduler")
    locked.path.mkdir(mode=0o700)
    error = RuntimeError("a defect", keyring, guarded(keyring), read_pair(tmp_path / "alice.key"))
    error.add_note(f"{keyring!r} {guarded(keyring)!r}")
    DefectReport("scheduler-0", locked.path).tell(error)
    (report,) = locked.path.glob("*.defect")
    content = report.read_text()
    assert "a defect" in content
    assert keyring.own.secret not in content
    assert read_pair(tmp_path / "alice.key").secret not in content


def test_a_journal_knows_no_secret_and_is_its_users_alone(locked: Home, tmp_path: Path) -> None:
    secret = read_pair(tmp_path / "keys" / "scheduler.key").secret.encode()
    journal = tmp_path / "events.journal"
    locked.path.mkdir(mode=0o755)
    role = locked.start("scheduler", str(locked.file), "--journal", str(journal))
    until((locked.path / "scheduler-0.json").exists, what="the scheduler")
    role.terminate()
    out, err = role.communicate(timeout=60)
    assert role.returncode == 0, err
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert journal.stat().st_size > 0
    assert secret not in journal.read_bytes() + out.encode() + err.encode()
