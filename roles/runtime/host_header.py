"""Which `Host` a request may name: a site whose name was made to lead here (DNS rebinding) names its own, which its browser takes for that site."""

from __future__ import annotations

from typing import Final

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def own_hosts(*addresses: str) -> frozenset[str]:
    """Those of who listens at these addresses, and of loopback, which tunnels lead to."""
    return frozenset(host_named(one) for one in addresses) | _LOOPBACK


def host_named(address: str) -> str:
    """Without its port, if it has one; names are the same in capitals."""
    return (address if address.endswith("]") else address.rpartition(":")[0] or address).lower()
