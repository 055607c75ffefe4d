"""How the command ends where its output cannot be written, and on Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from roles.runtime.idle_import import AT_ONCE_VARIABLE

CLI = [sys.executable, "-m", "roles.cli"]
FULL = Path("/dev/full")
FILE = """\
models: [{name: a, slo_ms: 50, rate_rps: 50, profile: {alpha_ms: 1, beta_ms: 5}}]
cluster: {gpus: 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("command", ["--help", "plan FILE", "plan FILE --json", "config schema", "--version"])
def test_an_output_that_cannot_be_written_is_one_line_and_exit_1(
    file: Path, tmp_path: Path, command: str, *, is_buffered: bool
) -> None:
    words = [str(file) if word == "FILE" else word for word in command.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1", "TMPDIR": str(tmp_path)}
    with FULL.open("w") as full:
        ended = subprocess.run(
            [*CLI, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert (
        ended.stderr
        in (
            "tenuto: the output cannot be written: No space left on device\n",
            "tenuto: the output or a temporary file cannot be written: No space left on device\n",  # past any buffer
        )
    )
    assert ended.returncode == 1
    assert not list(tmp_path.glob("*.defect"))


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("command", "code"), [("plan /missing.yaml", 3), ("plan", 2), ("status --run-dir /missing", 5)]
)
def test_an_error_that_cannot_be_told_keeps_its_code(command: str, code: int) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run([*CLI, *command.split()], stderr=full, stdout=subprocess.PIPE, check=False)
    assert ended.returncode == code


NO_ROOM = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
MAIN = "import sys; from roles.cli import main; sys.argv = ['tenuto', *ARGUMENTS]"
ELSEWHERE = {
    name: value for name, value in os.environ.items() if name not in ("XDG_RUNTIME_DIR", "TENUTO_RUN_DIR")
}


def on_a_full_disk(
    arguments: Sequence[str], folder: Path, code: str = ""
) -> subprocess.CompletedProcess[str]:
    """The command where no file can be written, nor a temporary directory found. `code`: what happens before it."""
    script = f"ARGUMENTS = {list(arguments)!r}\n{NO_ROOM}\n{MAIN}\n{code}\nmain()"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=ELSEWHERE, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "status --json",
        "health",
        "models list",
        "drain a",
        "infer a FILE",
        "logs",
        "down",
        "up FILE",
    ],
)
def test_without_a_temporary_directory_a_command_says_what_is_missing(file: Path, command: str) -> None:
    words = [str(file) if word == "FILE" else word for word in command.split()]
    ended = on_a_full_disk(words, file.parent)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.startswith("tenuto: No usable temporary directory found in ['/tmp', ")
    assert ended.stderr.endswith(" with --run-dir\n")
    assert ended.stderr.count("\n") == 1


RAISING = """\
import errno, click
from roles.cli import group
def fail(): raise ERROR
group.LazyGroup.get_command = lambda *_: click.Command("fail", callback=fail)
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("OSError(errno.ENOSPC, 'No space')", "the output or a temporary file cannot be written: No space"),
        ("OSError(errno.EFBIG, 'Too large', '/x')", "/x cannot be written: Too large"),
        ("FileNotFoundError(errno.ENOENT, 'No usable directory')", "No usable temporary directory found in "),
    ],
)
def test_a_full_disk_is_no_defect_wherever_it_is_noticed(tmp_path: Path, error: str, told: str) -> None:
    ended = on_a_full_disk(["fail"], tmp_path, RAISING.replace("ERROR", error))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"tenuto: {told}")
    assert ended.stderr.count("\n") == 1


def test_a_defect_on_a_full_disk_is_told_on_stderr_and_stdout_stays_as_it_was(tmp_path: Path) -> None:
    ended = on_a_full_disk(["fail"], tmp_path, RAISING.replace("ERROR", "KeyError('planted')"))
    assert (ended.returncode, ended.stdout) == (70, "")
    assert ended.stderr.count("Traceback") == 1
    told = re.search(
        r"^tenuto: a defect of Tenuto ended fail \(KeyError\); (/tmp/fail-\d+.defect) cannot be",
        ended.stderr,
        re.MULTILINE,
    )
    assert told is not None
    Path(told[1]).unlink()  # empty, as the disk is full


def test_an_error_of_the_system_that_is_a_defect_writes_nothing_to_stdout(tmp_path: Path) -> None:
    code = RAISING.replace("ERROR", "OSError(errno.EINVAL, 'Invalid argument')")
    script = f"ARGUMENTS = ['fail']\n{MAIN}\n{code}\nmain()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (70, "")
    assert len(list(tmp_path.glob("*.defect"))) == 1


# From inside, at a chosen moment, since what a sleep hits is luck.
INTERRUPTED = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
        return None
from roles.cli import main
sys.meta_path.insert(0, Interrupt())
sys.argv = ["tenuto", *ARGUMENTS]
main()
"""


# Where C calls Python an exception cannot be raised: of a weak reference it is printed, of a hash not even that.
IN_A_CALLBACK = """\
import weakref
class Interrupt:
    class Thing: pass
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            thing = self.Thing()
            def gone(reference):
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(100))
            reference = weakref.ref(thing, gone)
            del thing
        return None
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("simulate FILE", "roles.cli.simulate"),
        ("simulate FILE", "roles.simulator.fast_world"),
        # These import more when they are called.
        ("scheduler missing.yaml", "roles.scheduler.shell"),
        ("scheduler missing.yaml", "roles.scheduler.planning.start_config"),
        ("frontend missing.yaml", "roles.frontend.shell"),
        ("node-agent missing.yaml", "roles.node_agent.shell"),
        ("worker --agent ipc:///missing --worker-id w", "roles.gpu_worker.shell"),
        ("gateway missing.yaml", "roles.gateway.shell"),
        ("replay missing.journal", "roles.scheduler.replay_start"),
        ("spans --endpoint http://localhost:1", "roles.observability.spans"),
        ("goodput --live FILE", "roles.lab.live_goodput"),
        ("plan FILE --plot plan.png", "roles.lab.plots"),
    ],
)
def test_ctrl_c_is_not_lost_where_no_exception_can_be_raised(file: Path, command: str, module: str) -> None:
    before, after = INTERRUPTED.split("from roles.cli")
    inside = f"{before.partition('class Interrupt')[0]}{IN_A_CALLBACK}from roles.cli{after}"
    words = [str(file) if word == "FILE" else word for word in command.split()]
    code = f"MODULE = {module!r}; ARGUMENTS = {words!r}\n{inside}"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=file.parent, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr.strip()) == (130, "")


@pytest.mark.parametrize(
    "module",
    [
        "roles.cli.group",
        "click",
        "click.core",
        "fabric.errors",
        "roles.cli.simulate",
        "numpy",
        "roles.simulator.fast_world",
    ],
)
def test_ctrl_c_during_any_import_is_130_without_a_traceback(file: Path, module: str) -> None:
    code = f"MODULE = {module!r}; ARGUMENTS = ['simulate', {str(file)!r}]\n{INTERRUPTED}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (130, "")


# A rolling restart on one host, whose cluster is never ready again.
WAITING = """\
import os, signal, sys, threading
from deploy.ssh import shell
from deploy.ssh.shell import Deployment
from deploy.ssh.steps import Phase, Plan, Step
waits, wait = threading.Event(), shell.wait
def waited(*arguments, **named):
    waits.set()
    return wait(*arguments, **named)
shell.wait = waited
class Host:
    is_first = True
    def ask(self, request, *_, **__):
        if request["do"] == "ask" and self.is_first:
            self.is_first = False
            waits.wait(30)
            os.kill(os.getpid(), signal.SIGINT)
        return {"code": 5, "answer": None, "said": "no active scheduler answers"}
class Restarting(Deployment):
    def plan_restart(self, only):
        role = {"do": "start", "role_id": "scheduler-0"}
        step = Step("a", Phase.SCHEDULERS, "start", "", role, is_replacing=True)
        return Plan((step,), {}, {}, ("a",), ("a",))
of = Deployment.of
def deployment(path):
    made = of(path)
    made.connections["a"] = Host()
    return Restarting(made.source, made.cluster)
Deployment.of = deployment
from roles.cli import main
sys.argv = ["tenuto", "deploy", "restart", "--rolling", FILE]
main()
"""


def test_ctrl_c_ends_a_rolling_command_that_waits_for_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        FILE.replace("gpus: 1", "nodes: [{host: a}], addresses: {a: 127.0.0.1}"), encoding="utf-8"
    )
    (tmp_path / "ssh").touch()  # it is not called
    ended = subprocess.run(
        [sys.executable, "-c", f"FILE = {str(file)!r}\n{WAITING}"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    assert "a  interrupted: this ends first: start:" in lines
    assert lines[-3:] == [
        "tenuto: interrupted; done: nothing",
        "tenuto: not done: a: start:",
        f"tenuto: to restart those: tenuto deploy restart {file} --rolling --role scheduler-0",
    ]


# What runs before `main` is Python's own, and so is what it says there.
BEGINNING = """\
import os, sys
class Begins:
    def find_spec(self, name, path=None, target=None):
        if name == "roles.cli.group":
            os.write(1, b"begins\\n")
        return None
from roles.cli import main
sys.meta_path.insert(0, Begins())
sys.argv = ["tenuto", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["status", "plan FILE", "up FILE"])
def test_a_signal_at_any_moment_ends_a_command_without_a_traceback(
    file: Path, command: str, number: signal.Signals
) -> None:
    """Which moment a delay hits differs from host to host; that there is no traceback does not."""
    words = [str(file) if word == "FILE" else word for word in command.split()]
    environment = {**os.environ, "TENUTO_RUN_DIR": str(file.parent / "run")}
    # By the signal itself (a shell's 128 + number), as Ctrl-C is documented, or as it would have ended anyhow.
    codes = {-number, 128 + signal.SIGINT, {"status": 5, "plan": 0, "up": 0}[words[0]]}
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        process = subprocess.Popen(
            [sys.executable, "-c", BEGINNING, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(delay_s)
        process.send_signal(number)
        _, told = process.communicate(timeout=100)
        assert process.returncode in codes, (delay_s, told)
        assert "Traceback" not in told, delay_s
        assert "KeyboardInterrupt" not in told, delay_s


def test_nothing_is_imported_before_ctrl_c_is_seen_to() -> None:
    code = "import os, sys; there = set(sys.modules); import roles.cli; print(*(set(sys.modules) - there))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    isolated = [sys.executable, "-S", "-c", code]  # without what an environment imports at each start
    ended = subprocess.run(isolated, env=environment, capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) == {"roles", "roles.cli", "__future__"}


HELD = """\
import os, signal, threading, time
class Held:
    def find_spec(self, name, path=None, target=None):
        if name == "roles.cli.status" and threading.current_thread() is not threading.main_thread():
            sys.setswitchinterval(1e6)  # this thread does not let go of the interpreter
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + 20
            while time.monotonic() < until:
                pass
        return None
import sys
from roles.cli import main
sys.meta_path.insert(0, Held())
sys.argv = ["tenuto", "status"]
main()
"""


def test_ctrl_c_ends_a_command_whose_imports_wait_for_an_idle_core() -> None:
    environment = {name: value for name, value in os.environ.items() if name != AT_ONCE_VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-c", HELD], env=environment, capture_output=True, text=True, check=False, timeout=15
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_a_signal_that_is_ignored_stays_ignored_to_the_end(file: Path) -> None:
    code = (
        "import atexit, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))\n"
        f"from roles.cli import main; sys.argv = ['tenuto', 'plan', {str(file)!r}]; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "True"
