"""This host's own address: what its roles bind, and tell others to reach them by."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection

from fabric.errors import ConfigError

_SIOCGIFADDR = 0x8915
_REQUEST_BYTES = 256


def own_address(host: str, given: str | None, interface: str | None) -> str:
    """The IPv4 address that others reach this host by: the given one, else its interface's, else its name's.

    Raises ConfigError where there is none, or where only this host itself could reach it by that.
    """
    if given is not None:
        return given
    if interface is not None:
        return address_of_interface(interface)
    right = f"say which one with cluster.addresses: {{{host}: …}} or with deploy.interface"
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:  # the latter of what cannot be one
        raise ConfigError(f"the host name {host} has no address here: {right}") from error
    if ipaddress.IPv4Address(address).is_loopback:  # as Debian writes a host's own name in /etc/hosts
        raise ConfigError(
            f"the host name {host} is {address} here, by which no other host reaches it: {right}"
        )
    return str(address)


def address_of_interface(interface: str) -> str:
    """Its IPv4 address. Raises ConfigError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack(f"{_REQUEST_BYTES}s", interface.encode()[:15])
        try:
            found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"the interface {interface} has no IPv4 address ({(error.strerror or '').lower()}); there is {known}"
            ) from error
    return socket.inet_ntoa(found[20:24])


def host_named_here(hosts: Collection[str]) -> str | None:
    """Which of these this machine's name is, with or without its domain; None: none, or several."""
    own = socket.gethostname()
    found = [host for host in hosts if host == own] or [
        host for host in hosts if host.partition(".")[0] == own.partition(".")[0]
    ]
    return found[0] if len(found) == 1 else None
