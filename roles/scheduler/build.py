"""One way to make a scheduler core from a configuration, live and simulated."""

from __future__ import annotations

from policies.batching import make_discipline
from policies.batching.sharded import sharded
from roles.cluster import PolicyChoice
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import SchedulerSettings


def scheduler_core(settings: SchedulerSettings, batching: PolicyChoice) -> SchedulerCore:
    """A core with its discipline; sub-clusters that share no model get a dispatcher each (Symphony 4.4)."""
    hosted = [[model.model_id for model in spec.models] for _, spec in settings.slices]
    return SchedulerCore(settings, sharded(lambda: make_discipline(batching.name, batching.options), hosted))
