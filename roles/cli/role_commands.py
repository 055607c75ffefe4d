"""`tenuto scheduler | frontend | node-agent | worker`: one role in the foreground."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from fabric.ids import frontend_id, role_id_of_node, scheduler_id
from roles.cli import importing
from roles.cli.options import (
    ConnectAddress,
    IntRange,
    OutputPath,
    chosen_run_dir,
    file_argument,
    run_dir_flag,
)
from roles.cli.whereabouts import (
    Whereabouts,
    check_frontend_name,
    chosen_host,
    index_of_frontend,
    index_of_scheduler,
)
from roles.config.documents import read_text
from roles.config.hosts import FRONTENDS_MAX
from roles.config.nodes import SHARDS_MAX
from roles.config.read_config import load_config, load_document
from roles.runtime.environment import kept_from_cleaning, require_usable
from roles.runtime.epochs import SCHEDULERS_MAX
from roles.runtime.process import StopSignal, die_with_parent, set_up_descriptors, set_up_logging

JOURNAL_MB_MAX = 1 << 20  # a terabyte

_CLIENT = click.option("--client", help="Where clients come in (default: as the file's listen.client says).")
_METRICS = click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve a page of metrics there for Prometheus (default: as the file's listen.metrics says; off without it).",
)
_HERE = click.option(
    "--here", is_flag=True, hidden=True, help="Everything is on this host, wherever FILE places it."
)
_COPY = click.option(
    "--copy",
    "said",
    callback=lambda _context, _parameter, copy: None if copy is None else read_text(copy),
    type=click.Path(dir_okay=False, path_type=Path),
    hidden=True,
    help="What FILE said when the cluster was started, whatever has become of it.",
)


def of_supervisor(command: Callable[..., None]) -> Callable[..., None]:
    """Options that `up` gives its roles: `here`, and `said`, which is FILE's text, or None."""
    return _HERE(_COPY(command))


@click.command()
@file_argument
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
@_CLIENT
@click.option(
    "--standby", is_flag=True, help="One of cluster.schedulers that takes over when the active one is lost."
)
@click.option(
    "--index",
    type=IntRange(0, SCHEDULERS_MAX * SHARDS_MAX - 1),
    help="Which of cluster.schedulers this one is (default: by this host's name; 0, with --standby 1).",
)
@_METRICS
@of_supervisor
def scheduler(
    file: Path,
    run_dir_option: Path | None,
    journal: Path | None,
    journal_mb: int,
    with_frontend: bool,  # noqa: FBT001  click's flags
    client: str | None,
    standby: bool,  # noqa: FBT001  click's flags
    index: int | None,
    metrics: str | None,
    here: bool,  # noqa: FBT001  click's flags
    said: str | None,
) -> None:
    """Run a scheduler of FILE's cluster: queues of metadata, every slice's free moment, the placement."""
    with importing():
        from roles.cli.scheduler_with_frontend import run_on_one_loop  # noqa: PLC0415  only this command needs it
        from roles.scheduler.planning.start_config import Written  # noqa: PLC0415  likewise
        from roles.scheduler.shell import run_scheduler  # noqa: PLC0415  likewise
        from roles.scheduler.surroundings import Recording  # noqa: PLC0415  likewise

    document, config = load_document(file, text=said)
    written = Written(config, document, file.parent)
    number = index_of_scheduler(written.config, index, is_standby=standby, is_here=here)
    if standby and not written.config.places.schedulers[number].is_standby:
        raise click.UsageError(
            f"scheduler {number} is the active one at a start: it does not begin as a standby"
        )
    with role_process(scheduler_id(number), run_dir_option) as (home, stop):
        recording = None if journal is None else Recording(journal, journal_mb << 20)
        where = Whereabouts(written.config, home, is_here=here)
        addresses = where.scheduler(number, metrics)
        if with_frontend:
            options = where.frontend(0, is_beside=True, client=client)
            run_on_one_loop(written, options, stop, recording, addresses, number)
        else:
            run_scheduler(written, home, stop, recording, addresses, number=number)


@click.command()
@file_argument
@run_dir_flag
@click.option(
    "--index", type=IntRange(0, FRONTENDS_MAX - 1), help="Which of cluster.frontends this one is, from 0."
)
@click.option(
    "--name",
    help="A name of its own instead of the number, for one of several at the same place of FILE: something else says how many.",
)
@click.option(
    "--scheduler",
    "scheduler_given",
    type=ConnectAddress(),
    multiple=True,
    help="The control address of a scheduler, once for each in their order (default: FILE's, or their run files').",
)
@_CLIENT
@_METRICS
@of_supervisor
def frontend(
    file: Path,
    run_dir_option: Path | None,
    index: int | None,
    name: str | None,
    scheduler_given: tuple[str, ...],
    client: str | None,
    metrics: str | None,
    here: bool,  # noqa: FBT001  click's flags
    said: str | None,
) -> None:
    """Run a frontend of FILE's cluster: it owns requests and their payload, and gives each its one answer.

    Without --index it is the only one that FILE places on the host of this name.
    """
    with importing():
        from roles.frontend.shell import run_frontend  # noqa: PLC0415  only this command needs it

    config = load_config(file, text=said)
    own = index_of_frontend(config, index, is_here=here)
    if name is not None:
        check_frontend_name(name)
    with role_process(frontend_id(own if name is None else name), run_dir_option) as (home, stop):
        where = Whereabouts(config, home, is_here=here)
        options = where.frontend(own, scheduler_given, client=client, name=name, metrics=metrics)
        run_frontend(options, stop)


@click.command("node-agent")
@file_argument
@click.option("--node", help="The host's name in cluster.nodes (default: this host's name, or the only one).")
@run_dir_flag
@_METRICS
@of_supervisor
def node_agent(
    file: Path,
    node: str | None,
    run_dir_option: Path | None,
    metrics: str | None,
    here: bool,  # noqa: FBT001  click's flags
    said: str | None,
) -> None:
    """Run the agent of one node of FILE's cluster: it starts, watches and ends the workers of this host."""
    with importing():
        from roles.node_agent.shell import run_node_agent  # noqa: PLC0415  only this command needs it

    config = load_config(file, text=said)
    host = chosen_host(node, [one.host for one in config.nodes], "--node")
    with role_process(role_id_of_node(host), run_dir_option) as (home, stop):
        where = Whereabouts(config, home, is_here=here)
        run_node_agent(config, host, home, stop, where.node(host, metrics))


@click.command()
@click.option(
    "--agent", type=ConnectAddress(), required=True, help="The control address of this host's node agent."
)
@click.option("--worker-id", required=True, help="The name the agent knows this process by.")
@run_dir_flag
def worker(agent: str, worker_id: str, run_dir_option: Path | None) -> None:
    """Run a worker, as a node agent does: it asks the agent what to host."""
    with importing():
        from roles.gpu_worker.shell import run_worker  # noqa: PLC0415  only this command needs it

    home = chosen_run_dir(run_dir_option)
    require_usable(home.path)
    sys.exit(run_worker(agent, worker_id, home.path))


@contextmanager
def role_process(role_id: str, run_dir_option: Path | None) -> Iterator[tuple[Path, StopSignal]]:
    """The process of a role, from its start to its end: its run directory, and the signal that ends it."""
    with StopSignal(is_child=die_with_parent()) as stop:
        set_up_descriptors()
        set_up_logging(role_id)
        home = chosen_run_dir(run_dir_option)
        try:
            require_usable(home.path)
            with kept_from_cleaning(home.path):
                yield home.path, stop
        finally:
            home.remove()
