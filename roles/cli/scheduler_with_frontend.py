"""The scheduler and a frontend as one process, on one loop: two of the four hops before a batch starts fall away.

For hosts that have fewer cores than a cluster has busy processes: there, two processes wait for each other's core
more than they gain by having two (docs/adr/0130-two-roles-on-one-loop.md).
"""

from __future__ import annotations

from typing import Any

from fabric.errors import ConfigError
from roles.frontend.shell import FrontendOptions, FrontendShell
from roles.runtime.loop.driver import Role, run_roles
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.process import StopSignal
from roles.runtime.process_events import StopAsked
from roles.scheduler.planning.start_config import Written
from roles.scheduler.shell import SchedulerShell
from roles.scheduler.surroundings import HERE_ALONE, Recording, SchedulerAddresses


def run_on_one_loop(
    written: Written,
    frontend: FrontendOptions,
    stop: StopSignal,
    recording: Recording | None = None,
    addresses: SchedulerAddresses = HERE_ALONE,
    number: int = 0,
) -> None:
    """Serve until told to stop and all is answered; see both shells. Either's end is the other's. `number`: the scheduler's."""
    leaving: Mailbox[StopAsked] = Mailbox()
    scheduler_shell = SchedulerShell(
        written, frontend.run_dir, recording, addresses, number=number, stop=leaving
    )
    try:
        try:
            frontend_shell = FrontendShell(frontend, stop, scheduler_shell.link, number)
        except ConfigError as error:  # whoever started this process knows it by the scheduler's name
            raise ConfigError(f"{frontend.frontend_id}, in the same process, {error}") from error
        try:
            # The scheduler last: whoever started this process waits for its run file.
            frontend_shell.announce()
            scheduler_shell.announce()
            roles: list[Role[Any, Any]] = [frontend_shell.role, scheduler_shell.role]
            is_told = False

            def is_over() -> bool:
                nonlocal is_told
                if frontend_shell.is_drained and not is_told:
                    is_told = True
                    leaving.post(StopAsked())
                return scheduler_shell.has_left and frontend_shell.is_drained

            run_roles(roles, is_over, scheduler_shell.on_defect.end)
        finally:
            frontend_shell.close()
    finally:
        scheduler_shell.close()
        leaving.close()
