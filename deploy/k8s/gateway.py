"""A gateway beside every frontend: one more container of its pod, which asks it by its local socket and so needs no key.

Its run directory is a folder of its own, so that the probes of one role say nothing of the other. Tokens and certificates come as a Secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.k8s.names import KEYS_DIR, RUN_DIR
from fabric.ids import frontend_id
from roles.config.gateway import GatewayConfig

GATEWAY_RUN_DIR: Final = f"{RUN_DIR}/gateway"
GATEWAY_KEYS_DIR: Final = f"{KEYS_DIR}/gateway"
SECRET_DIR: Final = "/etc/tenuto/gateway"  # noqa: S105  a folder
STOP_S: Final = 6
"""What a gateway takes to end: the frontend beside it must be there meanwhile."""

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GatewayWanted:
    """`ports` by the protocol's name. `files` of its Secret, by the key of `cluster.gateway` that names each."""

    ports: Mapping[str, int]
    files: Mapping[str, Path]

    def section(self, written: Mapping[str, Any]) -> Plain:
        """`cluster.gateway` as the pods read it. There is no scheduler beside it that would take changes of models."""
        found = {**written, **{key: f"{GATEWAY_KEYS_DIR}/{key}" for key in self.files}}
        found.pop("model_control", None)
        return found


def gateway_wanted(config: GatewayConfig) -> GatewayWanted | None:
    """None where the file has none, or one without a token: others reach a pod, whatever address the file says."""
    return GatewayWanted(config.ports, config.files) if config.may_be_reached else None


def gateway_command(wanted: GatewayWanted, config_file: str) -> list[str]:
    """As by hand."""
    frontend = f"ipc://{RUN_DIR}/{frontend_id('$(POD_NAME)')}.client"
    addresses = [word for name, port in wanted.ports.items() for word in (f"--{name}", f"$(POD_IP):{port}")]
    return ["tenuto", "gateway", config_file, "--frontend", frontend, *addresses]


def key_script(wanted: GatewayWanted) -> str:
    """Secret volumes belong to root, and a gateway refuses tokens that others may read."""
    copies = [f"install -m 0400 {SECRET_DIR}/{key} {GATEWAY_KEYS_DIR}/{key}" for key in wanted.files]
    return " && ".join([f"install -d -m 0700 {GATEWAY_KEYS_DIR} {GATEWAY_RUN_DIR}", *copies])
