"""A real node agent whose workers are stand-ins: ``stand_in_agent.py RUN_DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

from roles.config import parse_config
from roles.node_agent.events import AgentLimits
from roles.node_agent.shell import AgentOptions, run_node_agent
from roles.process import StopSignal, die_with_parent, set_up_logging

WORKER = Path(__file__).with_name("stand_in_worker.py")
DOCUMENT = {
    "models": [{"name": "m", "slo_ms": 50, "profile": {"alpha_ms": 1, "beta_ms": 1}}],
    "cluster": {"nodes": [{"host": "a", "gpus": 4, "device": "cpu"}]},
}


def command(address: str, worker_id: str, run_dir: Path) -> list[str]:
    del run_dir
    return [sys.executable, str(WORKER), address, worker_id]


def main() -> None:
    die_with_parent()
    set_up_logging("node-a")
    limits = AgentLimits(grace_ms=200.0, terminate_ms=300.0, kill_ms=1_000.0)
    with StopSignal() as stop:
        config = parse_config(DOCUMENT, Path())
        run_node_agent(config, "a", Path(sys.argv[1]), stop, AgentOptions(limits, command))


if __name__ == "__main__":
    main()
