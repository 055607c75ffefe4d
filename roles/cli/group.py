"""The `tenuto` command: finds a subcommand, runs it, and turns every expected error into a line and a code.

The exit codes are in `roles/runtime/exit_codes.py`. Subcommands are imported when they are called: `tenuto worker` must not pay for
the simulator, nor `tenuto status` for torch.
"""

from __future__ import annotations

import errno
import importlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem

from fabric.errors import error_text
from roles.cli import ending_without_python, raise_interrupts
from roles.cli.whole_help import WholeHelpGroup
from roles.runtime.exit_codes import (
    EXIT_CONFIG,
    EXIT_DEFECT,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_UNREACHABLE,
)
from roles.runtime.idle_import import import_at_idle_priority

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

COMMANDS = {
    "bench": "roles.cli.bench:bench",
    "compare": "roles.cli.compare:compare",
    "completion": "roles.cli.completion:completion",
    "config": "roles.cli.config:config",
    "dashboards": "roles.cli.dashboards:dashboards",
    "deploy": "deploy.ssh.commands:deploy",
    "demo": "deploy.local.demo.command:demo",
    "doctor": "roles.cli.doctor:doctor",
    "down": "deploy.local.commands:down",
    "drain": "roles.cli.models:drain",
    "restart": "roles.cli.restart:restart",
    "explain": "roles.cli.explain:explain",
    "frontend": "roles.cli.role_commands:frontend",
    "gateway": "roles.cli.gateway:gateway",
    "goodput": "roles.cli.goodput:goodput",
    "health": "roles.cli.health:health",
    "infer": "roles.cli.infer:infer",
    "keys": "roles.cli.keys:keys",
    "logs": "deploy.local.logs:logs",
    "models": "roles.cli.models:models",
    "node-agent": "roles.cli.role_commands:node_agent",
    "page": "roles.cli.page:page",
    "plan": "roles.cli.plan:plan",
    "replay": "roles.cli.replay:replay",
    "profile": "roles.cli.profile:profile",
    "record": "roles.cli.record:record",
    "reproduce": "roles.cli.reproduce:reproduce",
    "scheduler": "roles.cli.role_commands:scheduler",
    "simulate": "roles.cli.simulate:simulate",
    "spans": "roles.cli.spans:spans",
    "status": "roles.cli.status:status",
    "top": "roles.cli.top:top",
    "trace": "roles.cli.explain:trace",
    "up": "deploy.local.commands:up",
    "what-if": "roles.cli.what_if:what_if",
    "why": "roles.cli.why:why",
    "worker": "roles.cli.role_commands:worker",
}


BESIDE_SERVING = ("drain", "health", "models", "restart", "status", "top")
"""Asked of a cluster that serves, perhaps on these very cores: they may wait, its batches may not."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk that takes no more: what was written at once, past any buffer, does not fail a second time and tells it only by this."""


class LazyGroup(WholeHelpGroup):
    """A group that imports a command when it is asked for; other distributions add theirs by entry point."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Ours and those of the entry-point group ``tenuto.commands``."""
        del ctx
        return sorted([*COMMANDS, *(point.name for point in _others())])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and options; no command is imported for it."""
        names = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """What is to be run; its module is imported then."""
        resolved = super().resolve_command(ctx, args)
        raise_interrupts()
        return resolved

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None for a name nobody has."""
        del ctx
        target = COMMANDS.get(cmd_name)
        if target is not None:
            module, _, attribute = target.partition(":")
            command = getattr(importlib.import_module(module), attribute)
        else:
            found = [point for point in _others() if point.name == cmd_name]
            if not found:
                return None
            command = _loaded(found[0])
        assert isinstance(command, click.Command)
        return command


def _loaded(point: EntryPoint) -> click.Command:
    """Another distribution's command. One that cannot be loaded says so when it is called, and hides no other."""
    try:
        command = point.load()
    except Exception as error:  # noqa: BLE001  # somebody else's code, which may raise anything
        problem = f"{point.value} cannot be loaded: {error_text(error)}"
    else:
        if isinstance(command, click.Command):
            return command
        problem = f"{point.value} is no click command"

    def refuse() -> None:
        raise click.ClickException(problem)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(point.name, callback=refuse, help=problem, context_settings=settings)


def _others() -> EntryPoints:
    from importlib.metadata import entry_points  # noqa: PLC0415  45 ms, and most commands are ours

    return entry_points(group="tenuto.commands")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tenuto", prog_name="tenuto")
def tenuto() -> None:
    """Serve many small models with tight SLOs on shared GPUs."""


def foreign_fabric() -> str | None:
    """Where `fabric` comes from if it is not ours: an SSH library on PyPI has the same import name."""
    module = importlib.import_module("fabric")
    found = Path(module.__file__ or "").resolve().parent
    return None if found == Path(__file__).resolve().parents[2] / "fabric" else str(found)


def run() -> None:
    """Run the command line; every error ends in one readable line on stderr and its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Letters that it does not have are shown as ?, as stderr shows them its way.
        sys.stdout.reconfigure(errors="replace")
    try:
        _run()
    except OSError as error:
        lost = _lost_outputs()
        reason = _unwritten(error, lost)
        if not reason:
            _tell_defect(error)
        _silence(lost)
        _end(f"tenuto: {reason}", EXIT_FAILURE)
    except Exception as error:  # noqa: BLE001  top of the process: what nobody foresaw is written down
        _tell_defect(error)


def _tell_defect(error: Exception) -> NoReturn:
    from roles.runtime.defects import DefectReport  # noqa: PLC0415  only here

    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "tenuto")
    try:
        folder = tempfile.gettempdir()
    except OSError:  # none can be written: then the report goes to stderr, with the reason
        folder = "/tmp"  # noqa: S108  only named in that reason
    DefectReport(command, Path(folder)).tell(error)
    sys.exit(EXIT_DEFECT)


def _unwritten(error: OSError, lost: Mapping[int, OSError]) -> str:
    """What could not be written, and why; empty where the error is about something else. A full disk is no defect of ours."""
    if lost:
        return f"the output cannot be written: {next(iter(lost.values())).strerror}"
    if error.errno in _FULL:
        return f"{error.filename or 'the output or a temporary file'} cannot be written: {error.strerror}"
    if error.errno == errno.EIO:
        return f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"
    from fabric.errors import ConfigError  # noqa: PLC0415  only here
    from roles.runtime.environment import temporary_directory  # noqa: PLC0415  only here

    try:
        temporary_directory()
    except ConfigError as missing:
        return str(missing)
    return ""


def _lost_outputs() -> dict[int, OSError]:
    """Which of stdout and stderr take no more, and why: one that has just failed still holds what it was to write, and fails again."""
    lost: dict[int, OSError] = {}
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None and not stream.closed:  # None: it was closed from the beginning
                stream.flush()
        except OSError as error:
            lost[descriptor] = error
    return lost


def _end(tell: str | Callable[[], None], code: int) -> NoReturn:
    try:
        if isinstance(tell, str):
            click.echo(tell, err=True)
        else:
            tell()
    except OSError:  # the code tells it too
        _silence([2])
    sys.exit(code)


def _silence(descriptors: Iterable[int]) -> None:
    """What is still to be written there is not tried again at the interpreter's end, which would complain."""
    from roles.runtime.process import speak_to_nobody  # noqa: PLC0415  slow to import, and seldom needed

    for descriptor in descriptors:
        speak_to_nobody(descriptor)


def _run() -> None:
    foreign = foreign_fabric()
    if foreign is not None:
        _end(
            f"tenuto: the package 'fabric' at {foreign} is another distribution's (the SSH library?); "
            "uninstall it from this environment, or give Tenuto one of its own",
            EXIT_FAILURE,
        )
    from fabric.errors import (  # noqa: PLC0415  checked above
        ConfigError,
        FabricError,
        PeerLost,
        ProfileError,
        RequestError,
    )

    if sys.argv[1:] and sys.argv[1] in BESIDE_SERVING:
        # The import's thread may hold the interpreter for seconds where all cores are busy.
        with ending_without_python():
            import_at_idle_priority(COMMANDS[sys.argv[1]].partition(":")[0])
    try:
        sys.exit(tenuto(standalone_mode=False) or 0)
    except click.ClickException as error:  # a usage error: exit code 2
        _end(error.show, error.exit_code)
    except (ConfigError, ProfileError) as error:
        _end(f"tenuto: {error}", EXIT_CONFIG)
    except PeerLost as error:
        _end(f"tenuto: {error}", EXIT_UNREACHABLE)
    except RequestError as error:  # by the name that callers of the SDK catch
        _end(f"tenuto: {error.code}: {error}", EXIT_FAILURE)
    except FabricError as error:
        _end(f"tenuto: {error}", EXIT_FAILURE)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (`tenuto status | head`): nothing to say, nobody to hear it
        sys.exit(EXIT_FAILURE)
