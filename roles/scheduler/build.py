"""One way to make a scheduler core from a configuration, live and simulated."""

from __future__ import annotations

from policies.batching.per_subcluster import per_subcluster
from policies.batching.registry import make_discipline
from roles.config.cluster import PolicyChoice
from roles.scheduler.core import SchedulerCore
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.settings import SchedulerSettings


def scheduler_core(
    settings: SchedulerSettings, batching: PolicyChoice, planning: ControllerSettings | None = None
) -> SchedulerCore:
    """A core with its discipline; sub-clusters that share no model get a dispatcher each (Symphony 4.4).

    With `planning` its placement follows what happens.
    """
    hosted = [[model.model_id for model in spec.models] for _, spec in settings.slices]
    discipline = per_subcluster(lambda: make_discipline(batching.name, batching.options), hosted)
    return SchedulerCore(settings, discipline, planning)
