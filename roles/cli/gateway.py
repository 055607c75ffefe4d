"""`tenuto gateway`: HTTP and gRPC in the foreground."""

from __future__ import annotations

from pathlib import Path

import click
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import gateway_id
from roles.cli import importing
from roles.cli.options import ConnectAddress, IntRange, file_argument, key_option, run_dir_flag
from roles.cli.role_commands import of_supervisor, role_process
from roles.cli.whereabouts import Whereabouts
from roles.config.gateway import check_listener
from roles.config.read_config import load_document
from roles.runtime.host_address import host_named_here

GATEWAYS_MAX = 64


@click.command()
@file_argument
@run_dir_flag
@click.option(
    "--index",
    type=IntRange(0, GATEWAYS_MAX - 1),
    help="Of several on one host, each with addresses of its own (default: 0).",
)
@click.option(
    "--node",
    "host",
    metavar="HOST",
    help="Be the gateway of that host of FILE: ask its frontends by local sockets, and listen at its address with the ports"
    " of listen.http and listen.grpc (8000 and 8001 where these are 0).",
)
@click.option(
    "--http", metavar="HOST:PORT", help="Where HTTP comes in (default: as the file's listen.http says)."
)
@click.option(
    "--grpc", metavar="HOST:PORT", help="Where gRPC comes in (default: as the file's listen.grpc says)."
)
@click.option(
    "--frontend",
    "frontends",
    type=ConnectAddress(),
    multiple=True,
    help="A frontend's client address, once for each (default: all of FILE's; of this host, where others need a key).",
)
@key_option
@of_supervisor
def gateway(
    *,
    file: Path,
    run_dir_option: Path | None,
    index: int | None,
    host: str | None,
    http: str | None,
    grpc: str | None,
    frontends: tuple[str, ...],
    key_file: Path | None,
    here: bool,
    said: str | None,
) -> None:
    """Run a gateway of FILE's cluster: the Open Inference Protocol by HTTP and gRPC, and plain JSON (docs/guides/gateway.md)."""
    try:
        with importing():
            from roles.gateway.shell import GatewayOptions, run_gateway  # noqa: PLC0415  only this command needs it
    except ImportError as error:
        raise ConfigError(
            f"the gateway needs more than is installed ({error}): pip install 'tenuto[gateway]'"
        ) from error
    if host is not None and index is not None:
        raise click.UsageError("--index is of gateways by number, and --node names one by its host: not both")
    document, config = load_document(file, text=said)
    own = config.gateway
    for value, option in ((http, "--http"), (grpc, "--grpc")):
        if value is not None:
            check_listener(value, option, has_token=own.token_file is not None)
    given = {name: value for name, value in (("http", http), ("grpc", grpc)) if value is not None}
    if not own.is_wanted and not given:
        raise ConfigError(f"{file}: has neither listen.http nor listen.grpc; give one of them, or --http")
    role_id = gateway_id(host or index or 0)
    with role_process(role_id, run_dir_option) as (home, stop):
        where = Whereabouts(config, home, is_here=here)
        own = replace(own, **given) if host is None else where.gateway(host, given)
        has_key = key_file is not None or (config.security.keys is None and host is None)
        near = host or host_named_here(config.hosts)
        addresses = frontends or tuple(where.clients(near, is_everywhere=has_key))
        if not addresses:
            raise ConfigError(
                f"{file} has no frontend on this host, and those on others need a client's key: give --key"
            )
        sections = {section["name"]: section for section in document["models"]}
        base_dir = file.parent.absolute()
        options = GatewayOptions(role_id, home, own, addresses, key_file, sections, base_dir)
        run_gateway(options, stop)
