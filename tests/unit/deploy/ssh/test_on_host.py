from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deploy.ssh import connection
from deploy.ssh.config_bundle import Source, carried_config
from deploy.ssh.connection import HostConnection
from deploy.ssh.facts import facts_from
from deploy.ssh.on_host import looking, requests
from deploy.ssh.on_host.folders import Place, file_system
from deploy.ssh.on_host.looking import NAMELESS, facts, port_holder, taken_of
from deploy.ssh.on_host.system import MARK, Refused, sha256
from deploy.ssh.steps import SentFile
from fabric.errors import ConfigError, FabricError, PeerLost
from roles.config.hosts import DeployConfig
from roles.config.read_config import parse_config
from roles.runtime.exit_codes import EXIT_NOT_STARTED


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("HOME", str(tmp_path))
    return Place({"host": "a", "directory": ".t", "units": "supervisor"})


def asked(**request: Any) -> dict[str, Any]:
    return {"host": "a", "directory": ".t", "units": "supervisor", **request}


def test_a_host_tells_what_it_is_and_changes_nothing(place: Place, tmp_path: Path) -> None:
    told = facts(place, {"ports": {"scheduler-0": [1]}, "interface": "lo"})
    found = facts_from(json.loads(json.dumps(told)), told["time_ms"] - 1, told["time_ms"] + 1)
    assert (found.address, found.clock_off_ms, found.taken, found.versions) == ("127.0.0.1", 0.0, {}, {})
    assert found.base == f"{tmp_path}/.t/a"
    assert list(tmp_path.iterdir()) == []
    for off_ms in (5_000.0, -5_000.0):
        moved = facts_from(told, told["time_ms"] - off_ms, told["time_ms"] - off_ms)
        assert moved.clock_off_ms == pytest.approx(off_ms)
    with pytest.raises(FabricError, match="cannot be understood"):
        facts_from({"state": {}}, 0, 0)


def test_a_port_that_is_taken_has_a_holder_with_a_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        holder = port_holder(port, {})
        assert f"(process {os.getpid()})" in holder
        ours = {"gateway-a": os.getpid()}
        assert taken_of("frontend-0", [1, port], {}) == [(port, holder)]
        assert taken_of("frontend-0", [1, port], ours) == [(port, "gateway-a")]
        assert taken_of("gateway-a", [1, port], ours) == []
        manager = mock.Mock(running=lambda: {"gateway-a"}, known=lambda: {"gateway-a"})
        monkeypatch.setattr(looking, "manager_of", lambda _: manager)
        wanted = {"ports": {"gateway-a": [port], "frontend-0": [port]}}
        assert facts(place, wanted)["taken"] == {"frontend-0": [(port, holder)]}, "it may be coming up there"
        place.run_dir.mkdir(parents=True)
        (place.run_dir / "gateway-a.json").write_text(f'{{"pid": {os.getppid()}}}')
        assert facts(place, wanted)["taken"] == {one: [(port, holder)] for one in wanted["ports"]}
    assert port_holder(1, {}) == ""


def test_a_role_that_serves_may_be_one_whose_files_nobody_may_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looking, "port_holder", lambda *_: NAMELESS)
    assert taken_of("gateway-a", [80], {"gateway-a": 7}) == []
    assert taken_of("gateway-a", [80], {"frontend-0": 7}) == [(80, NAMELESS)]


def test_a_host_without_the_command_says_so_and_that_is_an_answer(place: Place) -> None:
    answer = requests.ask(place, {"words": ["status"]})
    assert (answer["code"], answer["answer"]) == (EXIT_NOT_STARTED, None)
    assert "there is no " in answer["said"]


def test_sockets_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / ("x" * 90)))
    far = Place({"host": "a", "directory": ".t", "units": "auto"})
    assert str(far.run_dir).startswith("/tmp/tenuto-")
    assert file_system(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("size", [3, 5])
def test_a_file_that_is_not_what_was_said_leaves_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    file = {"path": "wheels/x", "size": size, "sha256": sha256(b"other"), "mode": 0o600}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc")))
    with pytest.raises(Refused, match="damaged" if size == 3 else "connection ended"):
        requests.receive(place, {"files": [file], "complete": "wheels"})
    assert list((place.base / "wheels").iterdir()) == []


def test_lines_from_before_a_rotation_are_told_too(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (place.base / "logs").mkdir(parents=True)
    for name, second in (("log.2", 1), ("log.1", 2), ("log", 3)):
        (place.base / f"logs/frontend-0.{name}").write_text(f"2026-11-23 04:03:0{second},000 {second}\n")
    requests.logs(place, {"since_ms": 1.0, "role": "", "is_followed": False})
    (told,) = [json.loads(line.removeprefix(MARK)) for line in capsys.readouterr().out.splitlines()]
    assert [line for _, line in told["progress"]["lines"]] == ["1", "2", "3"]


GONE = """
import sys
from pathlib import Path
from deploy.ssh.on_host.system import say
sys.stdin.read()
say("one step")
say("another step")
Path(sys.argv[1]).touch()
"""


def test_what_was_begun_is_ended_though_its_operator_went_away(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", GONE, str(tmp_path / "ended")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
    assert (tmp_path / "ended").exists()


# ---------------------------------------------------------------- ssh


@pytest.mark.parametrize(
    ("said", "code", "error", "line"),
    [
        ("u@a: Permission denied (publickey).", 255, PeerLost, "refuses this user's key"),
        ("Host key verification failed.", 255, PeerLost, "run `ssh a` once"),
        ("ssh: Could not resolve hostname a: x", 255, PeerLost, "is an unknown host"),
        ("ssh: connect to host a port 22: Connection refused", 255, PeerLost, "takes no ssh connections"),
        ("ssh: connect to host a port 22: Connection timed out", 255, PeerLost, "does not answer"),
        ("sh: 1: exec: python3: not found", 127, FabricError, "has no python3: install Python 3.11"),
        (f"{MARK}python 3.9.2", 1, FabricError, "its python3 is 3.9.2; Tenuto needs 3.11 or 3.12"),
        ("something else", 255, PeerLost, "something else"),
        ("", 1, FabricError, "ssh ended with code 1"),
    ],
)
def test_what_ssh_says_becomes_one_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int, error: type[FabricError], line: str
) -> None:
    fake = tmp_path / "ssh"
    fake.write_text(
        f"#!/bin/sh\ncat > /dev/null\necho 'welcome to this host'\necho '{said.replace(chr(39), '')}' >&2\nexit {code}\n"
    )
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert connection.is_ssh_there()
    with pytest.raises(error) as caught:
        HostConnection("a", DeployConfig()).ask({"do": "facts"})
    assert line.replace("'", "") in str(caught.value).replace("'", "")


def test_a_host_is_asked_through_ssh_with_the_code_on_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for ssh runs the command here: the same bytes, the same interpreter, no network."""
    fake = tmp_path / "ssh"
    fake.write_text(
        '#!/bin/sh\necho "Last login: today"\nprintf "%s\\n" "$@" > "$HOME/arguments"\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_CONFIG", "/x/config")
    deploy = DeployConfig(user="u", port=2222, python=sys.executable)
    told = HostConnection("a", deploy).ask({"do": "facts", "ports": {}, "interface": None})
    assert told["base"] == f"{tmp_path}/.tenuto/a"
    words = (tmp_path / "arguments").read_text().splitlines()
    assert words[:2] == ["-F", "/x/config"]
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("--") + 1] == "a"
    with pytest.raises(FabricError, match="No such file"):
        HostConnection("a", deploy).ask({"do": "receive", "files": [{"path": "/proc/x/y"}]})


@pytest.mark.parametrize(
    ("said", "code", "error", "line"),
    [
        ('{"ok": {"state"', 255, PeerLost, "ssh ended with code 255"),
        ('{"ok"\\n', 1, FabricError, "ssh ended with code 1"),
        ('{"progress": {"role": "fro', 255, PeerLost, "ssh ended with code 255"),
        ("\\377\\n", 255, PeerLost, "ssh ended with code 255"),
        ('[1]\\n{"ok": 1}\\n7\\n', 255, PeerLost, "ssh ended with code 255"),
        (' welcome to it\\ntenuto:{}\\ntenuto:{"ok": {"a": 1}}\\n', 0, None, ""),
    ],
    ids=["cut", "cut line", "cut progress", "bytes", "no objects", "greeting"],
)
def test_a_line_that_cannot_be_understood_is_no_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    code: int,
    error: type[FabricError] | None,
    line: str,
) -> None:
    fake = tmp_path / "ssh"
    fake.write_text(f"#!/bin/sh\ncat > /dev/null\nprintf '{MARK}{said}'\nexit {code}\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if error is None:
        assert HostConnection("a", DeployConfig()).ask({"do": "facts"}) == {"a": 1}
        return
    with pytest.raises(error) as caught:
        HostConnection("a", DeployConfig()).ask({"do": "facts"})
    assert line in str(caught.value)


def test_a_file_that_has_gone_before_it_was_sent_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\nexec cat > /dev/null\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"abc")
    file = SentFile.of("configs/c/files/weights.bin", weights)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"weights\.bin: no such file"):
        HostConnection("a", DeployConfig()).ask({"do": "receive"}, [file])


def test_a_host_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\nexec sleep 100\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(PeerLost, match=r"did not answer within 0\.3 s"):
        HostConnection("a", DeployConfig()).ask({"do": "facts"}, limit_s=0.3)


# ---------------------------------------------------------------- what a file names


def test_every_file_that_a_configuration_names_goes_with_it_and_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("class Model: ...\n")
    (tmp_path / "trace.csv").write_text("at_ms\n1\n")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text("{}")
    document = {
        "models": [
            {
                "name": "own",
                "slo_ms": 30,
                "rate_rps": 1,
                "loader": {"python": "mine:Model", "weights": "weights"},
                "arrival": {"process": "trace", "path": "trace.csv"},
            }
        ],
        "cluster": {"nodes": [{"host": "a", "device": "cpu"}], "addresses": {"a": "127.0.0.1"}},
    }
    source = Source(tmp_path / "c.yaml", document, parse_config(document, tmp_path))
    carried = carried_config(source, {"a": "10.0.0.1"})
    there = tmp_path / "there/configs" / carried.name
    for name, content in carried.files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    parsed = parse_config(json.loads((there / "cluster.json").read_text()), there)
    loader = parsed.models[0].loader
    assert loader is not None
    assert loader.weights is not None
    monkeypatch.chdir(there)  # as every role and every worker of a host does
    assert Path(loader.weights, "config.json").exists()
    assert str(there) not in loader.weights, "it is another path on another host"
    monkeypatch.undo()
    assert (there / "mine.py").exists()
    assert carried_config(source, {"a": "10.0.0.1"}).name == carried.name
    (tmp_path / "mine.py").write_text("class Model: pass\n")
    assert carried_config(source, {"a": "10.0.0.1"}).name != carried.name
    document["models"][0]["loader"]["python"] = "no_such_module:Model"  # type: ignore[index]
    with pytest.raises(ConfigError, match="there is no module no_such_module"):
        carried_config(source, {"a": "10.0.0.1"})


@pytest.mark.parametrize(
    "part", [{"weights": "/proc/self/mem"}, {"weights": "x" * 300}, {"python": "odd:Model"}]
)
def test_a_file_that_cannot_be_read_is_named(part: dict[str, str], tmp_path: Path) -> None:
    """As where this user may not: `/proc/self/mem` gives nobody its first bytes."""
    (tmp_path / "mine.py").write_text("class Model: ...\n")
    (tmp_path / "odd.py").symlink_to("/proc/self/mem")
    loader = {"python": "mine:Model", **part}
    document: dict[str, Any] = {
        "models": [{"name": "own", "slo_ms": 30, "rate_rps": 1, "loader": loader}],
        "cluster": {"nodes": [{"host": "a", "device": "cpu"}], "addresses": {"a": "127.0.0.1"}},
    }
    source = Source(tmp_path / "c.yaml", document, parse_config(document, tmp_path))
    with pytest.raises(
        ConfigError, match=r"(/proc/self/mem|odd\.py): input/output error|/x+: file name too long"
    ):
        carried_config(source, {"a": "10.0.0.1"})


@pytest.mark.parametrize("is_text", [False, True])
def test_the_module_of_an_applications_glue_is_carried_too(tmp_path: Path, is_text: bool) -> None:
    (tmp_path / "shop_glue").mkdir()
    (tmp_path / "shop_glue/__init__.py").write_text("class Crops: ...\n")
    glue: Any = "shop_glue:Crops" if is_text else {"python": "shop_glue:Crops"}
    stages = {"one": {"model": "m"}, "two": {"model": "m", "after": "one", "glue": glue}}
    document: dict[str, Any] = {
        "models": [{"name": "m", "slo_ms": 30, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
        "applications": [{"name": "shop", "slo_ms": 90, "stages": stages}],
        "cluster": {"nodes": [{"host": "a", "device": "cpu"}], "addresses": {"a": "127.0.0.1"}},
    }
    source = Source(tmp_path / "c.yaml", document, parse_config(document, tmp_path))
    carried = carried_config(source, {"a": "10.0.0.1"})
    assert carried.files["shop_glue/__init__.py"] == tmp_path / "shop_glue/__init__.py"
    (tmp_path / "shop_glue/__init__.py").write_text("class Crops: pass\n")
    changed = carried_config(source, {"a": "10.0.0.1"})
    assert changed.name != carried.name
    differ = {role for role, view in changed.views.items() if view != carried.views[role]}
    assert differ == {"frontend-0"}, "nobody else runs it"
    stages["two"]["glue"] = "no_such_module:Crops" if is_text else {"python": "no_such_module:Crops"}
    with pytest.raises(ConfigError, match=r"shop\.two: there is no module no_such_module"):
        carried_config(source, {"a": "10.0.0.1"})


def test_the_code_for_hosts_needs_nothing_but_python() -> None:
    """Isolated, from a folder without ours and without site-packages."""
    code = connection._package()
    boot = "import sys,os; f=os.memfd_create('t'); os.write(f,sys.stdin.buffer.read()); sys.path.insert(0,'/proc/self/fd/%d'%f)"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"{boot}; import deploy.ssh.on_host.requests as r; print(r.__file__)",
        ],
        input=code,
        capture_output=True,
        check=False,
    )
    assert done.stdout.startswith(b"/proc/self/fd/"), done.stderr


def test_what_the_environment_says_instead_of_the_file_is_what_is_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "models: [{name: m, slo_ms: 30, profile: {alpha_ms: 1, beta_ms: 5}}]\n"
        "cluster: {nodes: [{host: a, gpus: 1}], addresses: {a: 127.0.0.1}}\n"
    )
    monkeypatch.setenv("TENUTO_SET", "models.m.slo_ms=40; cluster.nodes.a.gpus=2")
    source = Source.of(file)
    written = carried_config(source, {"a": "10.0.0.1"}).files["cluster.json"]
    assert isinstance(written, bytes)
    carried = json.loads(written)
    assert (carried["models"][0]["slo_ms"], carried["cluster"]["nodes"][0]["gpus"]) == (40, 2)
    assert (source.config.models[0].slo_ms, source.config.nodes[0].gpus) == (40, 2)
    assert not source.is_changed
    file.write_text(file.read_text().replace("beta_ms: 5", "beta_ms: 6"))
    assert source.is_changed


def test_a_bundle_has_what_the_loaders_of_heads_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Model: ...\n")
    for name in ("cats", "dogs"):
        (tmp_path / f"{name}.safetensors").write_text(name)
    heads = [
        {"name": name, "loader": {"zoo": "torchvision", "arch": "resnet18", "weights": f"{name}.safetensors"}}
        for name in ("cats", "dogs")
    ]
    heads.append({"name": "own", "loader": {"python": "mine:Model"}})
    document = {
        "models": [{"name": "vision", "slo_ms": 30, "heads": heads}],
        "cluster": {"nodes": [{"host": "a", "device": "cpu"}], "addresses": {"a": "127.0.0.1"}},
    }
    source = Source(tmp_path / "c.yaml", document, parse_config(document, tmp_path))
    files = carried_config(source, {"a": "10.0.0.1"}).files
    assert "mine.py" in files
    assert {name.rpartition("-")[2] for name in files} >= {"cats.safetensors", "dogs.safetensors"}
