"""Links over ZeroMQ: control over ROUTER and DEALER, payload over PUSH and PULL.

Every socket has bounded queues and no linger except for a flush of at most 100 ms when it is closed in good order.
One thread owns a socket.
"""

from fabric.sockets.base import TURN_HEADER_BYTES, context, new_counters
from fabric.sockets.options import CONTROL, LinkOptions
from fabric.sockets.push_pull import PullLink, PushOptions, PushPool
from fabric.sockets.router_dealer import CONNECT_MS, RECONNECT_AFTER_MS, DealerLink, RouterLink

__all__ = [
    "CONNECT_MS",
    "CONTROL",
    "RECONNECT_AFTER_MS",
    "TURN_HEADER_BYTES",
    "DealerLink",
    "LinkOptions",
    "PullLink",
    "PushOptions",
    "PushPool",
    "RouterLink",
    "context",
    "new_counters",
]
