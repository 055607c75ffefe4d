"""A cluster of one's own, as `tenuto demo` and `goodput --live` have, and Ctrl-C at their terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.proc import processes_naming, until
from tests.integration.test_up import CLUSTER, ROOT, STOP_MS

COMMAND = """
import signal, subprocess, sys
from pathlib import Path
from roles.benchmark.temporary_cluster import temporary_cluster

class Told(subprocess.Popen):
    def terminate(self):
        super().terminate()
        told.append(self)
        print("told to end", flush=True)

told = []
subprocess.Popen = Told
signal.signal(signal.SIGINT, signal.default_int_handler)  # however the suite itself was started
try:
    with temporary_cluster(Path(sys.argv[1])) as cluster:
        print(cluster.pid, flush=True)
        signal.pause()
finally:
    print(told[0].returncode, flush=True)
"""


@pytest.mark.parametrize("is_impatient", [False, True])
def test_ctrl_c_ends_it_in_order_and_a_second_one_at_once(tmp_path: Path, *, is_impatient: bool) -> None:
    """The terminal signals all of its foreground, and the command ends what it has started."""
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        process_group=0,
    )
    with process:
        try:
            assert process.stdout is not None
            cluster = int(process.stdout.readline())
            if is_impatient:
                os.kill(cluster, signal.SIGSTOP)
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "told to end\n"
            if is_impatient:
                os.killpg(process.pid, signal.SIGINT)
            assert int(process.stdout.readline()) == (-signal.SIGKILL if is_impatient else 0)
            assert process.wait(STOP_MS / 1e3) != 0
        finally:
            process.kill()
    until(lambda: not processes_naming(str(tmp_path)), what="the end of all processes")
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]
