"""Each discipline of ours beside the reference that was written from its paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fabric.ids import ModelId, SliceId
from policies.batching.base import Discipline
from policies.batching.baselines.squishy import Bin, ModelLoad, spread
from policies.batching.batch_moments import exec_table
from policies.batching.disciplines.clockwork import Clockwork
from policies.batching.disciplines.deferred import Deferred
from policies.batching.disciplines.eager import Eager
from policies.batching.disciplines.fixed import Fixed
from policies.batching.disciplines.nexus import Nexus
from policies.batching.disciplines.shepherd import Shepherd
from policies.batching.disciplines.timeout import Timeout
from tests.references import assigned, backlog, central
from tests.references.playing import Reference, Setting

TIMEOUT_MS = 7.0
TARGET, WAIT_MS = 4, 9.0
EPOCH_MS = 190.0  # no multiple of a rate's sample, whose end would be its own by the last bit of a float


@dataclass(frozen=True)
class Pair:
    """`classes`: of how many speeds the slices may be (None: several).

    With several, ours looks at the heads that a window drop takes when the fastest slices' batch is looked at, and
    leaves them out of the slower ones' for good; without the drop nothing depends on when it looks.

    `is_central`: it is played with delays of each model's own, and with run times that cross, too.
    """

    ours: Callable[[], Discipline]
    reference: Callable[[Setting], Reference]
    classes: int | None = None
    has_ties: bool = False
    is_central: bool = False


def _central(ours: Callable[[], Discipline], due: central.Due, *, is_window: bool) -> Pair:
    rules = central.Rules(due, is_window=is_window)
    return Pair(
        ours, lambda setting: central.Central(setting, rules), 1 if is_window else None, is_central=True
    )


def loads_and_bins(setting: Setting, rates: Mapping[str, float]) -> tuple[list[ModelLoad], list[Bin]]:
    """What our packing is asked for."""
    loads = [
        ModelLoad(ModelId(model.name), model.slo_ms - model.delay_ms, rates[model.name])
        for model in setting.models
    ]
    bins = [
        Bin(SliceId(gpu.name), {ModelId(name): exec_table(run_ms) for name, run_ms in gpu.run_ms.items()})
        for gpu in setting.gpus
    ]
    return loads, bins


def nexus_shares(setting: Setting, rates: Mapping[str, float]) -> assigned.Shares:
    """What our packing makes of the rates; it is tested beside a plain one by itself."""
    plan = spread(*loads_and_bins(setting, rates))
    return {
        slice_id: [(share.load.model_id, share.batch_size, share.per_ms) for share in shares]
        for slice_id, shares in plan.shares.items()
    }


def _nexus(setting: Setting) -> Reference:
    return assigned.Nexus(setting, lambda rates: nexus_shares(setting, rates), EPOCH_MS)


PAIRS: Mapping[str, Pair] = {
    "deferred simple": _central(lambda: Deferred(is_window_drop=False), central.deferred, is_window=False),
    "deferred window": _central(Deferred, central.deferred, is_window=True),
    "eager simple": _central(Eager, central.eager, is_window=False),
    "eager window": _central(lambda: Eager(is_window_drop=True), central.eager, is_window=True),
    "timeout simple": _central(
        lambda: Timeout(lambda _: TIMEOUT_MS, is_window_drop=False),
        central.timeout(TIMEOUT_MS),
        is_window=False,
    ),
    "timeout window": _central(
        lambda: Timeout(lambda _: TIMEOUT_MS), central.timeout(TIMEOUT_MS), is_window=True
    ),
    "clockwork": Pair(Clockwork, backlog.Clockwork, has_ties=True),
    "clockwork, all sizes": Pair(
        lambda: Clockwork(has_all_sizes=True),
        lambda setting: backlog.Clockwork(setting, range(1, 129)),
        has_ties=True,
    ),
    "shepherd": Pair(Shepherd, backlog.Shepherd, has_ties=True),
    "nexus": Pair(lambda: Nexus(epoch_s=EPOCH_MS / 1000), _nexus, has_ties=True),
    "fixed": Pair(
        lambda: Fixed(max_wait_ms=WAIT_MS, batch=TARGET),
        lambda setting: assigned.Fixed(setting, TARGET, WAIT_MS),
        has_ties=True,
    ),
}


def kinds_of(setting: Setting) -> dict[str, int]:
    """Slices with equal run times are of one kind."""
    tables = [{name: tuple(run_ms) for name, run_ms in gpu.run_ms.items()} for gpu in setting.gpus]
    return {gpu.name: tables.index(own) for gpu, own in zip(setting.gpus, tables, strict=True)}
