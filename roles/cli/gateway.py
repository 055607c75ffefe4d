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
    default=0,
    show_default=True,
    help="Of several on one host, each with addresses of its own.",
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
    index: int,
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
    document, config = load_document(file, text=said)
    own = config.gateway
    for value, option in ((http, "--http"), (grpc, "--grpc")):
        if value is not None:
            check_listener(value, option, has_token=own.token_file is not None)
    if http is not None or grpc is not None:
        own = replace(own, http=http or own.http, grpc=grpc or own.grpc)
    if not own.is_wanted:
        raise ConfigError(f"{file}: has neither listen.http nor listen.grpc; give one of them, or --http")
    with role_process(gateway_id(index), run_dir_option) as (home, stop):
        where = Whereabouts(config, home, is_here=here)
        has_key = key_file is not None or config.security.keys is None
        addresses = frontends or tuple(where.clients(host_named_here(config.hosts), is_everywhere=has_key))
        if not addresses:
            raise ConfigError(
                f"{file} has no frontend on this host, and those on others need a client's key: give --key"
            )
        sections = {section["name"]: section for section in document["models"]}
        base_dir = file.parent.absolute()
        options = GatewayOptions(gateway_id(index), home, own, addresses, key_file, sections, base_dir)
        run_gateway(options, stop)
