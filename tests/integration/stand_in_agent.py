"""A real node agent whose workers are stand-ins: ``stand_in_agent.py RUN_DIR [OPTIONS]``.

OPTIONS is JSON: `node`, keys of the node's configuration; `outlive_ms`; `limits`, fields of `AgentLimits`; `worker`,
"real" for workers that are none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from roles.config.read_config import parse_config
from roles.node_agent.events import AgentLimits
from roles.node_agent.shell import AgentOptions, run_node_agent, worker_command
from roles.runtime.process import StopSignal, die_with_parent, set_up_logging
from roles.runtime.restarts import RestartRule

WORKER = Path(__file__).with_name("stand_in_worker.py")
LIMITS: dict[str, Any] = {"grace_ms": 200.0, "terminate_ms": 300.0, "kill_ms": 1_000.0}


def command(address: str, worker_id: str, run_dir: Path) -> list[str]:
    del run_dir
    return [sys.executable, str(WORKER), address, worker_id]


def main() -> None:
    die_with_parent()
    set_up_logging("node-a")
    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    said = {**LIMITS, **options.get("limits", {})}
    if "restart" in said:
        said["restart"] = RestartRule(**said["restart"])
    node = {"host": "a", "gpus": 4, "device": "cpu", **options.get("node", {})}
    document = {
        "models": [{"name": "m", "slo_ms": 50, "profile": {"alpha_ms": 1, "beta_ms": 1}}],
        "cluster": {"nodes": [node]},
    }
    agent_options = AgentOptions(
        AgentLimits(**said),
        worker_command if options.get("worker") == "real" else command,
        outlive_ms=options.get("outlive_ms", 30_000.0),
    )
    with StopSignal() as stop:
        run_node_agent(parse_config(document, Path()), "a", Path(sys.argv[1]), stop, agent_options)


if __name__ == "__main__":
    main()
