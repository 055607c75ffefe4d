"""The gateway's part of the file: where HTTP and gRPC come in, who may ask, and what a request may take."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fabric.curve import host_of, is_loopback
from fabric.errors import ConfigError
from fabric.policy_options import shown
from roles.config.checks import check_endpoint, whole
from roles.config.sections import GatewaySection, ListenSection

HTTP_DEFAULT: Final = "127.0.0.1:8000"
GRPC_DEFAULT: Final = "127.0.0.1:8001"
"""As Triton's, so that clients find it."""
REQUEST_MB_MAX: Final = 1_024
CONNECTIONS_MAX: Final = 65_536


class GatewayConfig(Struct, frozen=True):
    """`http`, `grpc`: host:port; None: not served, and with neither there is no gateway.

    `token_file`: one bearer token a line; None: everybody may ask. `tls_certificate`, `tls_key`: PEM files.
    `is_model_control`: models may be loaded and unloaded through it.
    """

    http: str | None = None
    grpc: str | None = None
    token_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    request_bytes_max: int = 64 << 20
    connections_max: int = 1_024
    is_model_control: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is one."""
        return self.http is not None or self.grpc is not None

    @property
    def may_be_reached(self) -> bool:
        """Whether there is one that may listen where others reach it: that takes tokens."""
        return self.is_wanted and self.token_file is not None

    @property
    def ports(self) -> dict[str, int]:
        """By protocol, where clients look for it on a host that others reach: Triton's where the file says any free one."""
        return {
            name: int(address.rpartition(":")[2]) or int(default.rpartition(":")[2])
            for name, address, default in (
                ("http", self.http, HTTP_DEFAULT),
                ("grpc", self.grpc, GRPC_DEFAULT),
            )
            if address is not None
        }

    @property
    def files(self) -> dict[str, Path]:
        """What it reads besides, by the key that names each."""
        named = {
            "token_file": self.token_file,
            "tls_certificate": self.tls_certificate,
            "tls_key": self.tls_key,
        }
        return {key: path for key, path in named.items() if path is not None}

    def at(self, address: str) -> GatewayConfig:
        """The same on a host that others reach by that address, wherever the file says that it listens on this one."""
        return replace(self, **{name: f"{address}:{port}" for name, port in self.ports.items()})


NO_GATEWAY: Final = GatewayConfig()


def checked_gateway(section: GatewaySection | None, listen: ListenSection, base_dir: Path) -> GatewayConfig:
    """The values of `cluster.gateway` and `listen`, checked. Raises ConfigError."""
    http, grpc = listen.http, listen.grpc
    if section is not None and http is None and grpc is None:
        http, grpc = HTTP_DEFAULT, GRPC_DEFAULT
    section = section or GatewaySection()
    for key, value in (("http", http), ("grpc", grpc)):
        if value is not None:
            check_listener(value, f"listen.{key}", has_token=section.token_file is not None)
    if (section.tls_certificate is None) != (section.tls_key is None):
        raise ConfigError("cluster.gateway: must have both of tls_certificate and tls_key, or neither")
    whole(section.request_mb, "cluster.gateway.request_mb", 1, REQUEST_MB_MAX)
    whole(section.connections, "cluster.gateway.connections", 1, CONNECTIONS_MAX)
    return GatewayConfig(
        http,
        grpc,
        _path(section.token_file, base_dir),
        _path(section.tls_certificate, base_dir),
        _path(section.tls_key, base_dir),
        section.request_mb << 20,
        section.connections,
        section.model_control,
    )


def check_listener(value: str, where: str, *, has_token: bool) -> None:
    """An address for HTTP or gRPC. Raises ConfigError for one that others can reach where nobody needs a token."""
    check_endpoint(value, where, schemes=())
    if not has_token and not is_loopback(host_of(f"tcp://{value}")):
        raise ConfigError(
            f"{where}: is {shown(value)}, which others can reach: that needs cluster.gateway.token_file"
        )


def _path(written: str | None, base_dir: Path) -> Path | None:
    return None if written is None else base_dir / Path(written).expanduser()
