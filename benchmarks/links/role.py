"""One role of Tenuto on one emulated host; run inside that host's namespaces by `cluster.py`.

    python role.py ROLE HOME HOST ADDRESS CONFIG [SCHEDULER]        ROLE: scheduler | frontend | agent

`HOME/HOST` is the host's run directory; those of the other hosts are hidden, or ipc sockets would lead there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.links.cluster import KEYS
from fabric.ids import FrontendId
from fabric.keys import FRONTEND, Keyring
from roles.config.documents import read_document
from roles.config.read_config import load_config, parse_config
from roles.frontend.shell import FrontendOptions, run_frontend
from roles.node_agent.shell import AgentOptions, run_node_agent
from roles.runtime.process import StopSignal, die_with_parent, set_up_logging
from roles.scheduler.planning.start_config import Written
from roles.scheduler.shell import run_scheduler
from roles.scheduler.surroundings import SchedulerAddresses


def main() -> int:
    """See the module's docstring."""
    role, *rest = sys.argv[1:]
    home, host, address, config, *scheduler = rest
    die_with_parent()
    _hide_others(Path(home), host)
    run_dir_path = Path(home) / host
    with StopSignal() as stop:
        set_up_logging(f"{role}-{host}", "WARNING")
        if role == "scheduler":
            document = read_document(Path(config))
            written = Written(
                parse_config(document, Path(config).parent, source=config), document, Path(config).parent
            )
            run_scheduler(written, run_dir_path, stop, addresses=SchedulerAddresses([f"tcp://{address}:0"]))
        elif role == "frontend":
            keyring = Keyring.of_folder(Path(home) / KEYS, FRONTEND)
            own = FrontendId(f"frontend-{host}")
            run_frontend(FrontendOptions(own, run_dir_path, [scheduler], host=address, keyring=keyring), stop)
        else:
            agent_options = AgentOptions(address=address)
            run_node_agent(load_config(Path(config)), host, run_dir_path, stop, agent_options)
    return 0


def _hide_others(home: Path, host: str) -> None:
    """In this process's own mount namespace, which `ip netns exec` has made."""
    for directory in home.iterdir():
        if directory.is_dir() and directory.name not in {host, KEYS}:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(directory)], check=True)


if __name__ == "__main__":
    sys.exit(main())
