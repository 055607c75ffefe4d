"""One way to make a scheduler core from a configuration, live and simulated."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from msgspec.structs import replace

from fabric.ids import BatchId
from fabric.messages import PlanCopy
from policies.batching.per_subcluster import per_subcluster
from policies.batching.registry import make_discipline
from roles.config.cluster import PolicyChoice
from roles.scheduler.core import SchedulerCore
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.settings import SchedulerSettings

# Before anything was measured: a first transfer also opens the socket it goes by. Both are soon replaced.
FIRST_GUARD_MS: Final = 2.0
FIRST_TRANSFER_MS: Final = 5.0


class Prepared(NamedTuple):
    """A core that has heard nothing yet, and the plan that it is of."""

    core: SchedulerCore
    settings: SchedulerSettings
    planning: ControllerSettings
    settled: PlanCopy
    kept: object
    """What was kept when the plan was read (`SavedPlan.state`)."""


def begun_anew(settings: SchedulerSettings, role_id: str, first_batch_id: BatchId) -> SchedulerSettings:
    """A plan's settings, for this process to begin with."""
    return replace(
        settings,
        role_id=role_id,
        pid=os.getpid(),
        guard_ms=FIRST_GUARD_MS,
        transfer_ms=FIRST_TRANSFER_MS,
        first_batch_id=first_batch_id,
    )


def scheduler_core(
    settings: SchedulerSettings, batching: PolicyChoice, planning: ControllerSettings | None = None
) -> SchedulerCore:
    """A core with its discipline; sub-clusters that share no model get a dispatcher each (Symphony 4.4).

    With `planning` its placement follows what happens.
    """
    hosted = [[model.model_id for model in spec.models] for _, spec in settings.slices]
    discipline = per_subcluster(lambda: make_discipline(batching.name, batching.options), hosted)
    return SchedulerCore(settings, discipline, planning)
