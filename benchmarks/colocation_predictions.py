"""What is predicted of models side by side on one GPU, from their profiles and from what was measured of others in the same run.

- `igniter`: iGniter's model (equations 1 to 11) with the coefficients of the profiles. It has no word on slices without a share.
- `sm`: Tenuto's law by SM utilisation (`profiles/interference/by_sm.py`), on the run time alone at the same share.
- `line by SM`: the form of gpulet's model, `max(1, c1 own + c2 other + c3)` with the neighbour that disturbs most, fitted to the groups
  of this run but for the one that is predicted (leave-one-out). gpulet's own variables are the use of the L2 cache and of memory, which
  need hardware counters that torch does not show. The SM use that its kernels show stands in for both, times the share, as
  gpulet does with what was measured on the whole GPU. So it says what a line can do, and is not gpulet's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fabric.errors import ProfileError
from fabric.ids import ModelId
from profiles.igniter.performance_model import Resident, predict_ms, read_coefficients, read_hardware
from profiles.interference.base import Running
from profiles.interference.by_sm import LAW
from profiles.measured import MeasuredProfile
from profiles.model import WHOLE_GPU_PERCENT

COEFFICIENTS = 3


@dataclass(slots=True, frozen=True)
class Group:
    """Models that ran side by side: their run times in ms, medians, alone at the same share and beside each other.

    `shares` in percent; None: they took turns on the whole GPU.
    """

    profiles: tuple[MeasuredProfile, ...]
    batch_size: int
    shares: tuple[float, ...] | None
    alone_ms: tuple[float, ...]
    beside_ms: tuple[float, ...]


Predicted = Sequence[float] | None
"""Run times in ms, a model each; None: it cannot be said."""


def by_igniter(group: Group) -> Predicted:
    """With the GPU's coefficients from the first profile; None where a profile has none, and without shares."""
    if group.shares is None:
        return None
    residents = []
    for profile, share in zip(group.profiles, group.shares, strict=True):
        if profile.igniter is None:
            return None
        residents.append(
            Resident(read_coefficients(profile.igniter["coefficients"]), group.batch_size, share)
        )
    hardware = group.profiles[0].igniter
    assert hardware is not None, "looked at above"
    return predict_ms(read_hardware(hardware["hardware"]), residents)


def by_sm(group: Group) -> Predicted:
    """What the neighbours cost by SM utilisation, on top of the time alone; None where a profile has no kernels."""
    try:
        law = LAW.over(
            {_id(place): profile.profile() for place, profile in enumerate(group.profiles)}, {"strength": 1.0}
        )
    except ProfileError:
        return None
    running = _running(group)
    return [
        alone_ms
        * law.slowdown(one, running[:place] + running[place + 1 :])
        / law.slowdown(one, ())  # of the share itself, which is in the time alone
        for place, (one, alone_ms) in enumerate(zip(running, group.alone_ms, strict=True))
    ]


def by_line(groups: Sequence[Group]) -> list[Predicted]:
    """Each group by the line through the other ones with shares; None where it has none, or those do not determine the line."""
    rows = [None if group.shares is None else _uses(group) for group in groups]
    return [None if row is None else _left_out(place, row, groups, rows) for place, row in enumerate(rows)]


def _left_out(
    place: int, row: Sequence[Sequence[float]], groups: Sequence[Group], rows: Sequence[_Rows | None]
) -> Predicted:
    others = [
        (group, uses)
        for other, (group, uses) in enumerate(zip(groups, rows, strict=True))
        if other != place and uses is not None
    ]
    known = np.array([use for _, uses in others for use in uses])
    if len(known) <= COEFFICIENTS or np.linalg.matrix_rank(known) < COEFFICIENTS:
        return None
    slowdowns = [
        beside / alone
        for group, _ in others
        for beside, alone in zip(group.beside_ms, group.alone_ms, strict=True)
    ]
    line = np.linalg.lstsq(known, np.array(slowdowns), rcond=None)[0]
    return [
        alone_ms * max(1.0, float(np.dot(line, use)))
        for use, alone_ms in zip(row, groups[place].alone_ms, strict=True)
    ]


_Rows = Sequence[Sequence[float]]


def _uses(group: Group) -> _Rows | None:
    """Each model's own use of the GPU's SMs as a fraction, that of the neighbour with most, and 1; None where a profile has no kernels."""
    try:
        wanted = [_sm_use(profile, group.batch_size) for profile in group.profiles]
    except ProfileError:
        return None
    used = [
        sms * one.share_or_whole / WHOLE_GPU_PERCENT for sms, one in zip(wanted, _running(group), strict=True)
    ]
    return [[own, max(used[:place] + used[place + 1 :]), 1.0] for place, own in enumerate(used)]


def _sm_use(profile: MeasuredProfile, batch_size: int) -> float:
    found = LAW.read(profile.profile())
    if found is None:
        raise ProfileError("its kernels were not seen")
    return found.fraction(batch_size)


def _running(group: Group) -> list[Running]:
    shares = group.shares or (None,) * len(group.profiles)
    return [Running(_id(place), group.batch_size, share) for place, share in enumerate(shares)]


def _id(place: int) -> ModelId:
    """Two of a group may be the same model."""
    return ModelId(str(place))
