from __future__ import annotations

import pytest

from fabric.addresses import check_address
from fabric.errors import ConfigError

KEY = "0" * 64


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:5555",
        "tcp://localhost:1",
        "tcp://[::1]:65535",
        f"tcp://10.0.0.1:7000?key={KEY}",
        "ipc:///run/tenuto/frontend-0.client",
        f"ipc:///run/x?key={KEY}",
    ],
)
def test_what_can_be_connected_to(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("address", "right"),
    [
        ("10.0.0.1:7000", "it must be like tcp://10.0.0.1:7000"),
        ("node-a:7000", "it must be like tcp://node-a:7000"),
        ("10.0.0.1", "it must be like tcp://HOST:PORT, or ipc:///PATH on this host"),
        ("", "'' is no address; it must be like tcp://HOST:PORT, or ipc:///PATH on this host"),
        ("/run/tenuto/x", "ipc:///PATH on this host"),
        ("http://10.0.0.1:7000", "tcp://HOST:PORT, or ipc:///PATH"),
        ("tcp://10.0.0.1", "tcp://HOST:PORT, with a port from 1 to 65535"),
        ("tcp://:7000", "tcp://HOST:PORT"),
        ("tcp://a b:7000", "tcp://HOST:PORT"),
        ("tcp://a\n:7000", "tcp://HOST:PORT"),
        ("tcp://10.0.0.1:x", "with a port from 1"),
        ("tcp://10.0.0.1:0", "with a port from 1"),
        ("tcp://10.0.0.1:70000", "with a port from 1"),
        ("tcp://10.0.0.1:٣", "with a port from 1"),
        ("ipc:///run/\udcff", "ipc:///PATH, with an absolute path of printable characters"),
        ("ipc:///run/a\0b", "ipc:///PATH, with an absolute path of printable characters"),
        ("ipc://run/x", "ipc:///PATH, with an absolute path"),
        ("x" * 5_000, "x… (5002 characters)"),
    ],
)
def test_what_cannot_is_named_with_what_would_be_right(address: str, right: str) -> None:
    with pytest.raises(ConfigError) as found:
        check_address(address)
    assert right in str(found.value)
