"""`tenuto up` and `down`: a cluster on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from msgspec.structs import replace

from deploy.local.detached import start_detached, stop_running
from deploy.local.events import RolePlan, SupervisorOutcome
from deploy.local.kept_up_file import KeptUpFile
from deploy.local.log_limit import forget_former_log
from deploy.local.role_plans import is_better_together, role_plans
from deploy.local.shell import Started, problems_of, supervise
from fabric.errors import ConfigError, FabricError
from fabric.ipc import private_files
from fabric.json_files import write_whole
from fabric.messages import SliceReport
from fabric.policy_options import counted
from roles.cli.cluster_tables import unplaced_line
from roles.cli.json_output import as_plain, echo_json
from roles.cli.options import IntRange, chosen_run_dir, json_option, remark, run_dir_flag
from roles.cli.restart import tell_processes
from roles.config.documents import read_text
from roles.config.read_config import load_config
from roles.runtime.environment import goes_at_logout
from roles.runtime.exit_codes import EXIT_CONFIG, EXIT_PARTIAL
from roles.runtime.process import (
    StopSignal,
    die_with_parent,
    log,
    remove_file,
    set_up_descriptors,
    set_up_logging,
    speak_to_nobody,
)
from roles.runtime.run_directory import (
    CONFIG_FILE,
    JSON_CONFIG_FILE,
    LOG_FILE,
    OLD_LOG_FILE,
    UpFile,
    claim,
    is_claimed,
    runs_already,
)
from roles.runtime.running_cluster import endpoints_in, processes_in

DEFAULT_CONFIG = """\
# One emulated GPU with one emulated model, of the size of a ResNet50 on a GTX 1080 Ti (Symphony, table 2).
models:
 - name: resnet50
   slo_ms: 100
   profile: {alpha_ms: 1.053, beta_ms: 5.072, max_batch: 64}
cluster: {gpus: 1}
"""

_LINGER = "so that commands reach this cluster then, say 'loginctl enable-linger', or start it with another --run-dir"
DESCRIPTOR_MAX = (1 << 20) - 1


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@run_dir_flag
@json_option
@click.option("--dry-run", "is_dry", is_flag=True, help="Only say which processes would be started.")
@click.option("--detach", is_flag=True, help="Run in the background; return when everything is ready.")
@click.option(
    "--together/--apart",
    default=None,
    help="One process for the scheduler and the first frontend, or one for each"
    " (default: together on a host with fewer than four cores, with one frontend).",
)
# Both from --detach, which makes the run directory and locks it before it makes the log.
@click.option("--remove-run-dir", is_flag=True, hidden=True)
@click.option("--lock", type=IntRange(3, DESCRIPTOR_MAX), hidden=True)
def up(
    file: Path | None,
    run_dir_option: Path | None,
    as_json: bool,  # noqa: FBT001  click's flags
    is_dry: bool,  # noqa: FBT001  click's flags
    detach: bool,  # noqa: FBT001  click's flags
    together: bool | None,  # noqa: FBT001  click's flags
    remove_run_dir: bool,  # noqa: FBT001  click's flags
    lock: int | None,
) -> None:
    """Run a whole cluster on this host, as FILE says; without FILE, one emulated GPU with one model.

    Exit 6 when a model of FILE could not be loaded and the others are served, 1 when none could be. A model that found no
    place is told, and served as soon as there is one: that is 0, also where no model has a place.
    """
    is_child = die_with_parent()
    set_up_descriptors()
    said, has_page = DEFAULT_CONFIG, False
    if file is not None:
        said = read_text(file)
        has_page = load_config(file, text=said).listen.page is not None
    home = chosen_run_dir(run_dir_option)
    if file is not None and file.absolute() == _copy_of(file, home.path).absolute():
        raise ConfigError(
            f"{file}: is where 'up' keeps a copy of its file, which goes with the cluster; give yours another name"
        )
    if is_dry:
        try:
            _tell_start(file, said, home.path, together=together, as_json=as_json)
        finally:
            home.remove()
        return
    if detach:
        arguments = [
            *([str(file)] if file else []),
            *(["--run-dir", str(home.path)] if run_dir_option else []),
            *([] if together is None else ["--together" if together else "--apart"]),
        ]
        up_file = start_detached(arguments, home.path, is_removed=home.is_new, has_page=has_page)
        _show_start(up_file, (), home.path, as_json=as_json)
        if goes_at_logout(home.path):
            remark([f"{home.path} goes when you log out; {_LINGER}"])
        sys.exit(EXIT_PARTIAL if up_file.problems else 0)
    # From here on a signal is a wish to end in order, so it is listened to before the first file is written.
    with StopSignal(is_child=is_child) as stop:
        set_up_logging("up")
        is_removed = remove_run_dir or home.is_new
        with claim(home.path, is_removed=is_removed, lock=lock, has_page=has_page):
            forget_former_log(home.path)
            outcome, problems = _run(file, said, home.path, stop, together=together, as_json=as_json)
            if outcome.exit_code == 0:
                for name in (LOG_FILE, OLD_LOG_FILE):
                    remove_file(home.path / name)
    if outcome.exit_code:
        raise (ConfigError if outcome.exit_code == EXIT_CONFIG else FabricError)(outcome.reason)
    if problems:
        sys.exit(EXIT_PARTIAL)


@click.command()
@click.option("--dry-run", "is_dry", is_flag=True, help="Only say which processes would be ended.")
@run_dir_flag
@json_option
def down(*, is_dry: bool, run_dir_option: Path | None, as_json: bool) -> None:
    """End the cluster that `tenuto up` runs on this host."""
    home = chosen_run_dir(run_dir_option)
    try:
        if is_dry:
            tell_processes(home.path, "end", as_json=as_json)
            return
        endpoints = endpoints_in(home.path)
        roles = [process for process in processes_in(home.path) if process.alive]
        stop_running(home.path)
        if as_json:
            ended = [replace(process, alive=False) for process in roles]
            echo_json({"endpoints": endpoints, "processes": as_plain(ended)})
        click.echo(f"{counted(len(roles), 'role')} ended", err=True)
    finally:
        home.remove()


def _run(
    file: Path | None, said: str, path: Path, stop: StopSignal, *, together: bool | None, as_json: bool
) -> tuple[SupervisorOutcome, Sequence[str]]:
    """How it ended, and what could not be served at its start. `said`: the file's text."""
    copy = _copy_of(file, path)
    try:
        with private_files():
            write_whole(copy, said)
        up_file = KeptUpFile(path)
    except OSError as error:
        raise FabricError(f"cannot write in the run directory {path}: {error.strerror}") from error

    problems: list[str] = []

    def on_started(started: Started) -> None:
        problems.extend(problems_of(started.slices))
        warnings = [f"{one.model_id}: {one.reason}" for one in started.warnings]
        warnings += map(unplaced_line, started.unplaced)
        if not any(one.models for one in started.slices):
            warnings.append("no model is served: none found a place")
        up_file.say(UpFile(os.getpid(), True, started.endpoints, problems, warnings))
        try:
            _show_start(up_file.said, started.slices, path, as_json=as_json)
        except OSError as error:  # nobody who reads any more: what serves goes on serving
            log.warning("start_not_shown reason=%r", error.strerror)
            speak_to_nobody()

    plans = _plans(file, said, path, together)
    return supervise(plans, path, stop, up_file, on_started), problems


def _copy_of(file: Path | None, path: Path) -> Path:
    return path / (JSON_CONFIG_FILE if file is not None and file.suffix == ".json" else CONFIG_FILE)


def _plans(file: Path | None, said: str, path: Path, together: bool | None) -> list[RolePlan]:  # noqa: FBT001  click's flag
    copy = _copy_of(file, path)
    config = load_config(file or copy, text=said)
    is_together = is_better_together(config) if together is None else together
    return role_plans(config, file or copy, copy, path, is_together=is_together)


def _tell_start(file: Path | None, said: str, path: Path, *, together: bool | None, as_json: bool) -> None:
    """What would be started. Raises FabricError where something runs already."""
    if is_claimed(path):
        raise runs_already(path)
    plans = _plans(file, said, path, together)
    roles = [plan.role_id for plan in sorted(plans, key=lambda plan: plan.start_rank)]
    if as_json:
        echo_json({"dry_run": True, "roles": roles})
    else:
        click.echo(f"nothing was done; this would start {', '.join(roles)}", err=True)


def _show_start(up_file: UpFile, slices: Sequence[SliceReport], path: Path, *, as_json: bool) -> None:
    remark((*up_file.problems, *up_file.warnings))
    if as_json:
        plain = {
            "endpoints": up_file.endpoints,
            "run_dir": str(path),
            "pid": up_file.pid,
            "processes": processes_in(path),
            "slices": slices,
            "problems": up_file.problems,
            "warnings": up_file.warnings,
        }
        echo_json(as_plain(plain))
        return
    purposes = {"client": "clients connect to"} | {name: name for name in ("http", "grpc", "page", "metrics")}
    told = [
        f"{name} {' '.join(up_file.endpoints[purpose])}"
        for purpose, name in purposes.items()
        if up_file.endpoints.get(purpose)
    ]
    click.echo(f"tenuto is up (process {up_file.pid}); {'; '.join(told)}", err=True)
