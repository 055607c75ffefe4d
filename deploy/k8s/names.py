"""What things are called in the cluster, and where they lie in a pod."""

from __future__ import annotations

from typing import Final

APP: Final = "tenuto"
SCHEDULER_NAME: Final = f"{APP}-scheduler"
FRONTEND_NAME: Final = f"{APP}-frontend"
AGENT_NAME: Final = f"{APP}-node-agent"
GATEWAY_NAME: Final = f"{APP}-gateway"
KEYS_DIR: Final = "/run/tenuto-keys"
RUN_DIR: Final = "/run/tenuto/run"
CONFIG_FILE: Final = "cluster.json"
