"""Names of things that cross process lines.

A *peer* is one incarnation of a role: ``"frontend-0/5f3a9c01"`` is the process that called itself
``frontend-0`` and drew the boot nonce ``5f3a9c01``. A role that restarts keeps its role id and draws a new
nonce, so a message for the dead incarnation can never reach the living one.
"""

from __future__ import annotations

import secrets
from typing import Final, NewType

ModelId = NewType("ModelId", str)
SliceId = NewType("SliceId", str)  # "<node>/gpu<i>/<k>": the k-th slice of that GPU
BatchId = NewType("BatchId", int)  # dense per scheduler and epoch
FrontendId = NewType("FrontendId", str)
NodeId = NewType("NodeId", str)
Epoch = NewType("Epoch", int)
PeerId = NewType("PeerId", str)
Incarnation = NewType("Incarnation", str)

OPERATOR: Final = "operator"
"""The role id of whoever asks for a status, or changes the plan."""
FRONTEND_PREFIX: Final = "frontend-"
SCHEDULER_PREFIX: Final = "scheduler-"
AGENT_PREFIX: Final = "node-"
WORKER_PREFIX: Final = "worker-"
GATEWAY_PREFIX: Final = "gateway-"
PAGE_ID: Final = "page"
"""The role id of the page for people; a cluster has one at most."""
FRONTEND_NAME_BYTES_MAX: Final = 64
"""Of a frontend's role id, so that a batch of 4,096 runs from so many frontends fits into one header."""


def frontend_id(number: int | str) -> FrontendId:
    """The role id of a frontend: from 0, or by the name that whoever starts it gave it."""
    return FrontendId(f"{FRONTEND_PREFIX}{number}")


def scheduler_id(number: int) -> str:
    """The role id of a scheduler, from 0; the others stand by."""
    return f"{SCHEDULER_PREFIX}{number}"


def gateway_id(number: int | str) -> str:
    """The role id of a gateway: from 0, or by the host whose gateway it is."""
    return f"{GATEWAY_PREFIX}{number}"


def worker_prefix(node_id: NodeId) -> str:
    """What the role ids of a node's workers begin with; a number follows."""
    return f"{WORKER_PREFIX}{node_id}-"


def is_worker_of(role_id: str, node_id: NodeId) -> bool:
    """Whether that is the role id of a worker of that node."""
    number = role_id.removeprefix(worker_prefix(node_id))
    return number != role_id and number.isascii() and number.isdigit()


def role_id_of_node(host: str) -> str:
    """The role id of a node's agent, which is also its run file's name."""
    return f"{AGENT_PREFIX}{host}"


def new_incarnation() -> Incarnation:
    """Draw a boot nonce: 8 hexadecimal digits, fresh for every start of a process."""
    return Incarnation(secrets.token_hex(4))


def peer_id(role_id: str, incarnation: Incarnation) -> PeerId:
    """Name one incarnation of a role."""
    return PeerId(f"{role_id}/{incarnation}")


def role_id_of(peer: PeerId) -> str:
    """The role id inside a peer's name, the same for all its incarnations."""
    return peer.rpartition("/")[0] or peer
