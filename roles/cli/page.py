"""`tenuto page`: what the cluster does just now, in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from fabric.ids import PAGE_ID
from roles.cli.options import key_option, remark, run_dir_flag, via_option
from roles.cli.role_commands import of_supervisor, role_process
from roles.config.checks import check_endpoint
from roles.config.read_config import load_config
from roles.page.shell import ADDRESS_DEFAULT, Page, PageOptions
from roles.runtime.process import read_run_file
from roles.runtime.running_cluster import processes_in


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--address",
    metavar="HOST:PORT",
    help=f"Where to serve it (default: as FILE's listen.page says, else {ADDRESS_DEFAULT}).",
)
@click.option("--open", "is_opened", is_flag=True, help="Also open it in this host's browser.")
@run_dir_flag
@via_option
@key_option
@of_supervisor
def page(
    *,
    file: Path | None,
    address: str | None,
    is_opened: bool,
    run_dir_option: Path | None,
    key_file: Path | None,
    here: bool,
    said: str | None,
) -> None:
    """Show the running cluster in a browser: serve its page until interrupted, or say where it is served already.

    With listen.page in the file `tenuto up` serves it.
    """
    if address is not None:
        check_endpoint(address, "--address", schemes=())
    configured = None if file is None else load_config(file, text=said).listen.page
    with role_process(PAGE_ID, run_dir_option) as (home, stop):
        found = None if here else _served(home)
        if found is not None:
            _tell(found, is_opened=is_opened)
            return
        served = Page(PageOptions(home, address or configured or ADDRESS_DEFAULT, key_file))
        try:
            served.announce()
            if not here:
                if not any(one.alive and one.role_id != PAGE_ID for one in processes_in(home)):
                    remark(
                        [f"no cluster runs in {home}: the page says so, and shows one that is started there"]
                    )
                _tell(served.url, is_opened=is_opened)
            served.run(stop)
        finally:
            served.close()


def _served(run_dir: Path) -> str | None:
    """Where this cluster's page is served already."""
    known = read_run_file(run_dir / f"{PAGE_ID}.json")
    return known.addresses["page"][0] if known is not None and known.is_alive else None


def _tell(url: str, *, is_opened: bool) -> None:
    click.echo(url)
    if is_opened:
        webbrowser.open(url)
