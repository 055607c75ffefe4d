"""The sbatch example, with stand-ins for Slurm's own commands: nodes are folders and loopback addresses of this machine."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.environment import AT_ONCE
from tests.integration.proc import processes_naming, until

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "examples" / "slurm" / "tenuto.sbatch"
MODELS = "models:\n - {name: fast, slo_ms: 5000, profile: {alpha_ms: 1, beta_ms: 4, max_batch: 16}}\n"
JOB = "4711"

# Each task of a step on its node: with the node's name, its own disk for sockets, and its own first address. As srun does, it
# passes signals on, ends when its tasks have, and its exit code is the highest of theirs.
SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
options = []
while words[0].startswith("--"):
    options.append(words.pop(0))
assert "--overlap" in options, "or a step waits for the resources of the one before"
named = [one.partition("=")[2] for one in options if one.startswith("--nodelist=")]
hosts = named or {hosts!r}
assert f"--ntasks={{len(hosts)}}" in options and f"--nodes={{len(hosts)}}" in options
tasks = []
for host in hosts:
    own = dict(SLURMD_NODENAME=host, TENUTO_RUN_DIR=os.environ["TENUTO_RUN_DIR"] + ("" if host == {head!r} else "-" + host))
    tasks.append(subprocess.Popen(words, env=os.environ | own, stdin=subprocess.DEVNULL))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(code if code >= 0 else 128 - code for code in [task.wait() for task in tasks]))
"""
SCONTROL = """#!/bin/sh
test "$1 $2 $3" = "show hostnames nodes[1-2]" || exit 1
printf '%s\\n' {hosts}
"""
HOSTNAME = """#!/bin/sh
test "$1" = -I || exit 1
case $SLURMD_NODENAME in {cases} *) exit 1 ;; esac
"""


class Job:
    """An allocation of two nodes, the script in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device = "emulated"
        self.gpus = 1
        self.restarts = 0
        (folder / "bin").mkdir()
        (folder / "models").mkdir()
        (folder / "models" / "models.yaml").write_text(MODELS)
        self.allocate("node1", "node2")

    def allocate(self, *hosts: str) -> None:
        """It runs on those."""
        self.hosts = list(hosts)
        network = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
        cases = " ".join(
            f"{host}) echo {network}.{at} 10.9.9.9 ;;" for at, host in enumerate(self.hosts, start=1)
        )
        for name, text in (
            ("srun", SRUN.format(python=sys.executable, hosts=self.hosts, head=self.hosts[0])),
            ("scontrol", SCONTROL.format(hosts=" ".join(self.hosts))),
            ("hostname", HOSTNAME.format(cases=cases)),
            ("tenuto", f'#!/bin/sh\nexec {sys.executable} -m roles.cli "$@"\n'),
        ):
            path = self.folder / "bin" / name
            path.write_text(text)
            path.chmod(0o755)

    @property
    def directory(self) -> Path:
        return self.folder / "models" / f"tenuto-{JOB}"

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        environment = AT_ONCE | {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.folder),
            "SLURM_JOB_ID": JOB,
            **({"SLURM_RESTART_COUNT": str(self.restarts)} if self.restarts else {}),
            "SLURM_JOB_NODELIST": "nodes[1-2]",
            "SLURM_GPUS_ON_NODE": str(self.gpus),
            "SLURMD_NODENAME": self.hosts[0],
            "TENUTO_DEVICE": self.device,
        }
        words = ["bash", str(SCRIPT), "models/models.yaml", *command]
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(words, cwd=self.folder, env=environment, stdout=said, stderr=said)

    def said(self) -> str:
        """What the script and the roles said."""
        paths = [self.folder / "said", *self.directory.glob("*.log")]
        return "\n".join(path.read_text() for path in paths)

    def left(self) -> dict[int, str]:
        """Processes of it that still live."""
        return processes_naming(str(self.folder))


@pytest.fixture
def job() -> Iterator[Job]:
    with TemporaryDirectory(prefix="tnt-") as folder:
        made = Job(Path(folder))
        yield made
        for pid in made.left():
            os.kill(pid, 9)


def test_a_job_is_a_cluster_for_a_command_whose_exit_code_it_has(job: Job) -> None:
    """On the first node by the run directory, and as from another one with the address and the key."""
    script = (
        "tenuto status --json > status.json"
        " && tenuto infer fast x.npy --budget-ms 30000 --json > here.json"
        " && TENUTO_RUN_DIR=/nowhere/run tenuto infer fast x.npy --budget-ms 30000 --json"
        ' --target "$TENUTO_TARGET" --key "$TENUTO_CLIENT_KEY" > there.json; test $? = 0 && exit 42'
    )
    np.save(job.folder / "models" / "x.npy", np.zeros(4, np.float32))
    process = job.start("bash", "-c", script)
    assert process.wait(200) == 42, job.said()
    assert "ready: tcp://127." in job.said()
    models = job.folder / "models"
    assert '"outputs"' in (models / "here.json").read_text()
    assert '"outputs"' in (models / "there.json").read_text()
    assert all(host in (models / "status.json").read_text() for host in job.hosts)
    assert job.left() == {}
    assert not list(models.glob(".cluster-*"))
    for path in job.directory.rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(job.directory.stat().st_mode) == 0o700


def test_without_a_command_it_serves_until_the_job_is_ended(job: Job) -> None:
    process = job.start()
    until((job.directory / "health.log").exists, 60_000.0, "the roles' start")
    process.terminate()
    assert process.wait(60) == 143
    assert job.left() == {}


@pytest.mark.parametrize("left", ["whole", "half made"])
def test_a_job_that_is_requeued_comes_up_on_other_nodes(job: Job, left: str) -> None:
    """What it left is that of a start that ended, or was killed between two of its keys, be it the same one."""
    if left == "whole":
        assert job.start("true").wait(200) == 0, job.said()
        job.restarts = 1
    else:
        half_made = job.directory / "keys-0"
        half_made.mkdir(parents=True)
        (half_made / "trusted.json").write_text('{"keys": []}')
    job.allocate("node3", "node4")
    assert job.start("true").wait(200) == 0, job.said()
    for name in ("node3", "node4"):
        assert (job.directory / f"keys-{job.restarts}" / f"node-{name}.key").exists()
    assert job.left() == {}


@pytest.mark.parametrize(
    ("models", "device", "words"),
    [(MODELS + "batching: no-such\n", "emulated", "no-such"), (MODELS, "cuda", "a role has ended before")],
)
def test_a_cluster_that_cannot_be_says_why_and_ends(job: Job, models: str, device: str, words: str) -> None:
    """A file that is wrong, and agents that do not find the GPUs."""
    (job.folder / "models" / "models.yaml").write_text(models)
    job.device, job.gpus = device, 99
    process = job.start("true")
    assert process.wait(100) not in (0, None)
    assert words in (job.folder / "said").read_text()
    assert job.left() == {}


def test_shellcheck_finds_nothing() -> None:
    program = Path(sys.executable).with_name("shellcheck")
    assert program.exists(), "from the extra `test`"
    done = subprocess.run([program, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
