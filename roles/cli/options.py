"""What several commands have in common: the file argument, the options of a run, and the pictures."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from fabric.addresses import check_address
from fabric.errors import ConfigError, FabricError
from fabric.keys import Keyring
from fabric.policy_options import shown
from roles.cli import importing
from roles.config.checks import DURATION_MS_MAX, MOMENT_S_MAX, RATE_RPS_MAX, SEED_MAX
from roles.runtime.environment import RunDir, check_ours, run_dir

PROCESSES_MAX = 64
WORKERS_MAX = 1024


class FloatRange(click.FloatRange):
    """click's with both ends, for numbers only: its own lets NaN through, and repeats all digits of what it refuses."""

    def __init__(self, low: float, high: float, *, is_low_allowed: bool = True) -> None:
        super().__init__(min=low, max=high, min_open=not is_low_allowed)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or a usage error with the range."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (self.min or 0) <= number <= (self.max or 0) or (self.min_open and number == self.min):
            low = f"over {shown(self.min)}, up" if self.min_open else f"from {shown(self.min)}"
            self.fail(f"{shown(value)} is not a number {low} to {shown(self.max)}", param, ctx)
        return number


class IntRange(click.IntRange):
    """The same for whole numbers."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(min=low, max=high)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or a usage error with the range."""
        try:
            number = int(value)
        except ValueError:  # also of more digits than Python reads
            number = None
        if number is None or not (self.min or 0) <= number <= (self.max or 0):
            self.fail(f"{shown(value)} is not a whole number from {self.min:,} to {self.max:,}", param, ctx)
        return number


class ConnectAddress(click.ParamType[str]):
    """Where somebody is reached: tcp://HOST:PORT or ipc:///PATH; `several` with commas between. `check` raises ConfigError for one that is none."""

    name = "address"

    def __init__(self, *, several: bool = False, check: Callable[[str], None] = check_address) -> None:
        self._several = several
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same, or a usage error that names the wrong one and says what it should look like."""
        for one in str(value).split(",") if self._several else [str(value)]:
            try:
                self._check(one)
            except ConfigError as error:
                self.fail(str(error), param, ctx)
        return str(value)


class OutputPath(click.Path):
    """A file to be written at the end of a command: whether it can be is asked before the work."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or a usage error that names what is wrong with its folder."""
        path = super().convert(value, param, ctx)
        folder = Path(os.fsdecode(path)).absolute().parent
        if not folder.is_dir():
            self.fail(f"{shown(str(path))}: there is no folder {folder}", param, ctx)
        if not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{shown(str(path))}: the folder {folder} cannot be written to", param, ctx)
        return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What is written there in the block; FabricError where that fails after all: a full disk, or a file that only seems writable."""
    try:
        yield
    except OSError as error:
        raise FabricError(f"{path} cannot be written: {error.strerror or error}") from error


SHORTEST_S = 1e-3
"""A window that is shorter is lost in the rounding of moments, and nothing could come in it."""
WINDOW_S = FloatRange(SHORTEST_S, MOMENT_S_MAX)
BUDGET_MS = FloatRange(0, DURATION_MS_MAX, is_low_allowed=False)
RATE_RPS = FloatRange(0, RATE_RPS_MAX)

file_argument = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else."
)
plot_option = click.option("--plot", "plot_path", type=OutputPath(), help="Draw a PNG.")
warmup_option = click.option(
    "--warmup",
    "warmup_s",
    type=FloatRange(0, MOMENT_S_MAX),
    default=5.0,
    show_default=True,
    help="Before it, in s.",
)
duration_option = click.option(
    "--duration", "duration_s", type=WINDOW_S, default=60.0, show_default=True, help="Window in s."
)
seed_option = click.option("--seed", type=IntRange(0, SEED_MAX), help="Instead of the file's.")
workers_option = click.option(
    "--workers", type=IntRange(1, WORKERS_MAX), help="Processes.  [default: one per core]"
)


run_dir_flag = click.option(
    "--run-dir",
    "run_dir_option",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where run files and local sockets live (default: $TENUTO_RUN_DIR, then $XDG_RUNTIME_DIR/tenuto, then tenuto-UID in the temporary directory).",
)


def _through_tunnel(context: click.Context, parameter: click.Parameter, given: Any) -> Any:
    """From here on the run directory is one that stands for that host's, until the command is over.

    The callback of both `--via` and `--key`, in whichever order they were written: the last one that the command has opens it.
    """
    known: dict[str, Any] = context.meta.setdefault(f"{__name__}.via", {})
    known[str(parameter.name)] = given
    has = [one.name for one in context.command.params if one.name in _OF_TUNNEL]
    if len(known) == len(has) and known.get(_OF_TUNNEL[0]) is not None:
        # By its name: roles know nothing of ssh, and most commands need none.
        tunnel = importlib.import_module("deploy.ssh.tunnel").tunnel
        os.environ["TENUTO_RUN_DIR"] = str(context.with_resource(tunnel(*map(known.get, _OF_TUNNEL))))
    return given


def via_host() -> str:
    """Whose cluster the command is about; empty: this host's."""
    context = click.get_current_context(silent=True)
    known = {} if context is None else context.meta.get(f"{__name__}.via", {})
    return str(known.get(_OF_TUNNEL[0]) or "")


_OF_TUNNEL = ("via", "key_file")


def _via(told: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--via", metavar="HOST", expose_value=False, callback=_through_tunnel, help=told)


via_option = _via(
    "The cluster of HOST, reached by ssh, instead of this host's; with --key all of it, else what runs on HOST itself."
)
via_up_option = _via("The cluster that `tenuto up` runs on HOST, reached by ssh, instead of this host's.")


key_option = click.option(
    "--key",
    "key_file",
    envvar="TENUTO_KEY_FILE",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    callback=_through_tunnel,
    help="For an address by TCP that asks for one (or $TENUTO_KEY_FILE): a client's file, or operator.key in its keys folder.",
)
scheduler_option = click.option(
    "--scheduler",
    "scheduler_address",
    type=ConnectAddress(several=True),
    help="Its control address, with --key by TCP (default: the cluster of this host). Of several shards: ADDRESS,ADDRESS…",
)


def keyring_of(key_file: Path | None) -> Keyring | None:
    """What `key_option` names. Raises ConfigError where that is no key."""
    return None if key_file is None else Keyring.of_file(key_file)


def chosen_run_dir(option: Path | None) -> RunDir:
    """The run directory that the option names, or the environment's: the other host's with `--via`. Raises ConfigError where it is not ours alone to write in.

    What the option names need not be there.
    """
    if option is None:
        return run_dir()
    if via_host():
        raise click.UsageError("give either --run-dir or --via")
    path = option.absolute()
    try:
        check_ours(path, "--run-dir")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"--run-dir: {path} cannot be looked at: {error.strerror}") from error
    return RunDir(path)


def refuse_others(mode: str, *taken: str) -> None:
    """Raises UsageError where something was given that means nothing with the option `mode`. `taken`: the parameters that do."""
    context = click.get_current_context()
    hints = {
        str(one.name): one.get_error_hint(context) for one in context.command.params if mode not in one.opts
    }
    for name, hint in hints.items():
        if name not in taken and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            known = ", ".join(hints[one] for one in taken)
            raise click.UsageError(f"{mode} does not go with {hint}: it takes {known}")


def remark(lines: Iterable[str]) -> None:
    """Say on stderr what a user should know beside the result."""
    for line in lines:
        click.echo(f"tenuto: {line}", err=True)


def painters() -> ModuleType:
    """The module of pictures, asked for before any work: a missing package is said at once."""
    try:
        with importing():
            from roles.lab import plots  # noqa: PLC0415  matplotlib is an extra, and slow to import
    except ImportError as error:
        raise click.ClickException(
            f"--plot needs the extra 'plots': pip install 'tenuto[plots]' ({error})"
        ) from error
    return plots
