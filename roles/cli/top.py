"""`tenuto top`: models, slices and late requests of a running cluster, as they are now."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import click

from fabric.clock import MonotonicClock, WallClock
from fabric.errors import FabricError
from fabric.keys import Keyring
from roles.cli.console import plain_console
from roles.cli.json_output import as_plain, echo_json
from roles.cli.options import (
    FloatRange,
    chosen_run_dir,
    json_option,
    key_option,
    keyring_of,
    run_dir_flag,
    via_option,
)
from roles.cli.records import newest_bad_of_all
from roles.cli.terminal import Screen, is_terminal, whole_screen
from roles.cli.top_view import Explain, Facts, Quit, TopView
from roles.runtime.live_figures import live_figures
from roles.runtime.running_cluster import look

EVERY_S_MIN, EVERY_S_MAX = 0.5, 60.0
KEY_WAIT_S: Final = 0.1
LATE_MS: Final = 60_000.0
"""How old a late request may be to be shown."""
_END_S: Final = 1.0
"""Of a look that is under way when somebody quits."""

Job = Callable[[TopView], None]


@click.command()
@click.option(
    "--once", "is_once", is_flag=True, help="Print it once, and end; also where there is no terminal."
)
@click.option(
    "--every",
    "every_s",
    type=FloatRange(EVERY_S_MIN, EVERY_S_MAX),
    default=2.0,
    show_default=True,
    help="Look so often, in s.",
)
@run_dir_flag
@via_option
@key_option
@json_option
def top(
    *, is_once: bool, every_s: float, run_dir_option: Path | None, key_file: Path | None, as_json: bool
) -> None:
    """Show models, slices and late requests of the running cluster, again and again; ? lists the keys.

    Figures are of the last 10 s. --json prints one look.
    """
    keyring = keyring_of(key_file)
    home = chosen_run_dir(run_dir_option)
    console = plain_console()
    try:
        facts = facts_of(home.path, keyring)  # where there is no cluster, that is said and not drawn
        if as_json:
            echo_json(_plain(facts))
        elif is_once or not is_terminal(console):
            view = TopView()
            view.found(facts)
            console.print(view.whole())
        else:
            with whole_screen(console) as screen:
                _Top(screen, home.path, keyring, every_s, facts).run()
    finally:
        home.remove()


def facts_of(run_dir: Path, keyring: Keyring | None) -> Facts:
    """One look. Raises PeerLost where there is no cluster."""
    clock = MonotonicClock()
    at_ms = clock.now_ms()  # schedulers are asked first, and then whoever may be silent
    report = look(run_dir, keyring)
    live = live_figures(report.processes, keyring)
    requests, silent = newest_bad_of_all(report, keyring)
    now_ms = clock.now_ms()
    late = [one for one in requests if now_ms - one.ended_at_ms < LATE_MS]
    late.sort(key=lambda one: -one.ended_at_ms)
    return Facts(
        at_ms,
        WallClock().time_of_day(),
        report,
        live.models,
        late,
        sorted({*live.silent, *silent}),
        live.applications,
    )


def _plain(facts: Facts) -> dict[str, object]:
    return {
        "models": as_plain(facts.live),
        "slices": as_plain(facts.report.scheduler.slices),
        "late": [as_plain(one.record) for one in facts.late],
        "silent": list(facts.silent),
    }


class _Top:
    """The screen is this thread's; another one looks and explains, so that keys are heard while a role is silent."""

    def __init__(
        self, screen: Screen, run_dir: Path, keyring: Keyring | None, every_s: float, facts: Facts
    ) -> None:
        self._screen = screen
        self._run_dir = run_dir
        self._keyring = keyring
        self._every_ms = 1e3 * every_s
        self._clock = MonotonicClock()
        self._view = TopView()
        self._view.found(facts)
        self._looked_at_ms = facts.at_ms
        self._wanted: queue.SimpleQueue[Callable[[], Job] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._under_way = 0

    def run(self) -> None:
        """Until somebody quits."""
        worker = threading.Thread(target=self._work, daemon=True)
        worker.start()
        try:
            self._show()
        finally:
            # ZeroMQ ends the process where its sockets are closed under a thread that uses them.
            self._wanted.put(None)
            worker.join(_END_S)

    def _show(self) -> None:
        size = self._screen.height
        self._screen.show(self._view.screen(size))
        while True:
            keys = self._screen.keys(KEY_WAIT_S)
            if keys is None:
                return
            is_changed = self._screen.height != size
            for key in keys:
                is_changed = True
                match self._view.key(key):
                    case Quit():
                        return
                    case Explain() as wish:
                        self._want(partial(self._explained, wish))
            while not self._done.empty():
                self._done.get()(self._view)
                self._under_way -= 1
                is_changed = True
            is_due = self._clock.now_ms() - self._looked_at_ms >= self._every_ms
            if is_due and not self._under_way and not self._view.is_paused:
                self._looked_at_ms = self._clock.now_ms()
                self._want(self._look)
            if is_changed:
                size = self._screen.height
                self._screen.show(self._view.screen(size))

    def _want(self, ask: Callable[[], Job]) -> None:
        self._under_way += 1
        self._wanted.put(ask)

    def _work(self) -> None:
        while (ask := self._wanted.get()) is not None:
            try:
                self._done.put(ask())
            except Exception as error:  # noqa: BLE001  raised again where the screen is, which ends
                self._done.put(partial(_raise, error))

    def _look(self) -> Job:
        try:
            facts = facts_of(self._run_dir, self._keyring)
        except FabricError as error:
            trouble = str(error)
            return lambda view: view.lost(trouble)
        return lambda view: view.found(facts)

    def _explained(self, wish: Explain) -> Job:
        from roles.cli.explain import explanation_of  # noqa: PLC0415  the simulator: only for who asks
        from roles.cli.why import reasons_of  # noqa: PLC0415  likewise

        title = f"explain {wish.request_id}" if wish.request_id else f"why {wish.model_id}"
        try:
            if wish.request_id:
                lines = explanation_of(self._run_dir, self._keyring, wish.request_id)
            else:
                lines = reasons_of(self._run_dir, self._keyring, wish.model_id)
        except FabricError as error:
            lines = [str(error)]
        return lambda view: view.told(title, lines)


def _raise(error: Exception, view: TopView) -> None:
    del view
    raise error
