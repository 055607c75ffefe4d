"""`tenuto scheduler | frontend | node-agent | worker`: one role in the foreground."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from fabric.errors import ConfigError
from fabric.ids import frontend_id, role_id_of_node, scheduler_id
from fabric.keys import FRONTEND, Keyring
from roles.cli.options import IntRange, OutputPath, chosen_run_dir, run_dir_flag
from roles.config.cluster import ClusterConfig
from roles.config.documents import read_document
from roles.config.load import load_config, parse_config
from roles.runtime.environment import RunDir
from roles.runtime.epochs import SCHEDULERS_MAX
from roles.runtime.process import (
    StopSignal,
    die_with_parent,
    read_run_file,
    set_up_descriptors,
    set_up_logging,
)

JOURNAL_MB_MAX = 1 << 20  # a terabyte

_CONFIG = click.option("--config", type=click.Path(dir_okay=False, path_type=Path), required=True)


@click.command()
@_CONFIG
@run_dir_flag
@click.option(
    "--journal",
    type=OutputPath(),
    help="Record every event and action there, for `tenuto replay`.",
)
@click.option(
    "--journal-mb",
    type=IntRange(1, JOURNAL_MB_MAX),
    default=256,
    show_default=True,
    help="What the journal may take.",
)
@click.option(
    "--with-frontend",
    is_flag=True,
    help="Also run frontend 0, on the same loop: for a host with few cores.",
)
@click.option(
    "--standby", is_flag=True, help="One of cluster.schedulers that takes over when the active one is lost."
)
@click.option(
    "--index",
    type=IntRange(0, SCHEDULERS_MAX - 1),
    help="Which of cluster.schedulers this one is (default: 0, with --standby 1).",
)
def scheduler(
    config: Path,
    run_dir_option: Path | None,
    journal: Path | None,
    journal_mb: int,
    with_frontend: bool,  # noqa: FBT001  click's flags
    standby: bool,  # noqa: FBT001  click's flags
    index: int | None,
) -> None:
    """Run a scheduler: queues of metadata, every slice's free moment, the placement."""
    from roles.cli.one_loop import run_on_one_loop  # noqa: PLC0415  likewise
    from roles.frontend.shell import FrontendOptions  # noqa: PLC0415  only this command needs it
    from roles.scheduler.shell import Recording, Written, run_scheduler  # noqa: PLC0415  likewise

    number = int(standby) if index is None else index
    if standby and number == 0:
        raise click.UsageError("scheduler 0 is the active one at a start: it does not begin as a standby")
    with _role(scheduler_id(number), run_dir_option) as (home, stop):
        recording = None if journal is None else Recording(journal, journal_mb << 20)
        document = read_document(config)
        written = Written(parse_config(document, config.parent, source=str(config)), document, config.parent)
        schedulers = written.config.schedulers
        if number >= schedulers:
            raise ConfigError(
                f"cluster.schedulers: is {schedulers}; with scheduler {number} it must be over {number}"
            )
        if with_frontend:
            client = _client_address(written.config.listen.client, 0)
            keyring = _frontend_keys(written.config)
            addresses = _scheduler_addresses(home, schedulers)
            options = FrontendOptions(frontend_id(0), home, addresses, (client,), keyring=keyring)
            run_on_one_loop(written, options, stop, recording, number)
        else:
            run_scheduler(written, home, stop, recording, number=number)


@click.command()
@_CONFIG
@run_dir_flag
@click.option("--index", type=IntRange(0, 1023), default=0, help="Which of cluster.frontends this one is.")
@click.option(
    "--scheduler",
    "scheduler_given",
    multiple=True,
    help="The control address of a scheduler, once for each in their order (default: from their run files).",
)
def frontend(config: Path, run_dir_option: Path | None, index: int, scheduler_given: tuple[str, ...]) -> None:
    """Run a frontend: it owns requests and their payload, and gives each its one answer."""
    from roles.frontend.shell import FrontendOptions, run_frontend  # noqa: PLC0415  only this command needs it

    own = frontend_id(index)
    with _role(own, run_dir_option) as (home, stop):
        read = load_config(config)
        addresses = [[one] for one in scheduler_given] or _scheduler_addresses(home, read.schedulers)
        if not scheduler_given:
            _require_scheduler(home, read.schedulers)
        client, keyring = _client_address(read.listen.client, index), _frontend_keys(read)
        options = FrontendOptions(own, home, addresses, (client,), keyring=keyring)
        run_frontend(options, stop)


@click.command("node-agent")
@_CONFIG
@click.option("--node", required=True, help="The host's name in cluster.nodes.")
@run_dir_flag
def node_agent(config: Path, node: str, run_dir_option: Path | None) -> None:
    """Run the agent of one node: it starts, watches and ends the workers of this host."""
    from roles.node_agent.shell import run_node_agent  # noqa: PLC0415  only this command needs it

    with _role(role_id_of_node(node), run_dir_option) as (home, stop):
        run_node_agent(load_config(config), node, home, stop)


@click.command()
@click.option("--agent", required=True, help="The control address of this host's node agent.")
@click.option("--worker-id", required=True, help="The name the agent knows this process by.")
@run_dir_flag
def worker(agent: str, worker_id: str, run_dir_option: Path | None) -> None:
    """Run a worker, as a node agent does: it asks the agent what to host."""
    from roles.gpu_worker.shell import run_worker  # noqa: PLC0415  only this command needs it

    home = chosen_run_dir(run_dir_option)
    sys.exit(run_worker(agent, worker_id, home.path))


def _frontend_keys(config: ClusterConfig) -> Keyring | None:
    keys = config.security.keys
    return None if keys is None else Keyring.of_folder(keys, FRONTEND)


@contextmanager
def _role(role_id: str, run_dir_option: Path | None) -> Iterator[tuple[Path, StopSignal]]:
    die_with_parent()
    with StopSignal() as stop:
        set_up_descriptors()
        set_up_logging(role_id)
        home = chosen_run_dir(run_dir_option)
        try:
            yield home.path, stop
        finally:
            home.remove()


def _scheduler_addresses(home: Path, schedulers: int) -> list[Sequence[str]]:
    """Of each; where one that does not run yet will listen."""
    return [
        found.addresses["control"]
        if (found := read_run_file(home / f"{role_id}.json")) is not None
        else [RunDir(home).ipc_address(f"{role_id}.control")]
        for role_id in map(scheduler_id, range(schedulers))
    ]


def _require_scheduler(home: Path, schedulers: int) -> None:
    names = [f"{scheduler_id(number)}.json" for number in range(schedulers)]
    if not any((home / name).exists() for name in names):
        raise ConfigError(
            f"no scheduler serves in {home} (there is no {names[0]}): start it first, or give --scheduler"
        )


def _client_address(given: str, index: int) -> str:
    """Frontend i listens i ports above the configured one, so that several fit on one host; 0 stays 0."""
    if index == 0:
        return given
    if given.startswith("ipc://"):
        return f"{given}.{index}"
    host, _, port = given.rpartition(":")
    return given if port == "0" else f"{host}:{int(port) + index}"
