"""What an address looks like at which somebody is to be reached."""

from __future__ import annotations

from fabric.errors import ConfigError
from fabric.policy_options import shown

PORT_MAX = 65_535


def check_address(address: str) -> None:
    """Raise ConfigError for one that cannot be connected to, with what it should look like.

    What follows a port behind a question mark is the key of whoever listens there.
    """
    scheme, mark, rest = address.partition("://")
    host, _, port = (rest if mark else address).partition("?")[0].rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX
    is_complete = host and host.isprintable() and " " not in host and is_port
    if not mark:
        right = f"tcp://{address}" if is_complete else "tcp://HOST:PORT, or ipc:///PATH on this host"
    elif scheme == "ipc":
        is_path = rest.startswith("/") and rest.isprintable()  # what is no text in UTF-8 is not printable
        right = "" if is_path else "ipc:///PATH, with an absolute path of printable characters"
    elif scheme == "tcp":
        right = "" if is_complete else f"tcp://HOST:PORT, with a port from 1 to {PORT_MAX}"
    else:
        right = "tcp://HOST:PORT, or ipc:///PATH on this host"
    if right:
        raise ConfigError(f"{shown(address)} is no address; it must be like {right}")
