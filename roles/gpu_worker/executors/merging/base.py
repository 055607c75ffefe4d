"""What all ways to run several models together share: their members, and the trial of a group against separate runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from fabric.errors import FabricError
from roles.gpu_worker.executors.rounding import is_same

Rows = dict[str, Tensor]
Infer = Callable[[Rows], Mapping[str, Tensor]]
Answers = dict[str, Mapping[str, Tensor]]
TOLERANCE: Final = 1e-5
"""Between a joint and a separate run: kernels may sum in another order for another batch size."""
TRIED_ROWS: Final = ((1, 2), (3, 1))
_HALF: Final = (torch.float16, torch.bfloat16)


class CannotMerge(FabricError):
    """These models cannot be run together in that way; says why."""


@dataclass(frozen=True, slots=True)
class Member:
    """A model of a group: `infer` runs `net` on rows [n, …] and answers rows."""

    net: nn.Module
    infer: Infer
    example: Mapping[str, Tensor]
    """One request."""


class Group(Protocol):
    """Models that run together. `merged`: the modules that run once for all of them."""

    merged: tuple[str, ...]

    def run(self, batches: Mapping[str, Rows]) -> Answers:
        """Each model's outputs for its rows; models without rows are not run and not in the answer.

        Raises CannotMerge where these very values take another way through a model.
        """
        ...


class _Buffers:
    """Those of a net, and whether anything was written to them since."""

    def __init__(self, net: nn.Module) -> None:
        # A tensor that was made in inference mode has no number that grows with each write.
        self._kept = [(one, one.clone() if one.is_inference() else one._version) for one in net.buffers()]  # noqa: SLF001  there is no public way

    @property
    def have_changed(self) -> bool:
        return any(
            not torch.equal(one, before) if isinstance(before, Tensor) else one._version != before  # noqa: SLF001  see above
            for one, before in self._kept
        )


class Trial:
    """What members answer apart, for batches of different sizes with different rows: a row that comes back from another request is seen.

    `sizes`: for each trial the numbers of rows, which the members have in turn.
    """

    def __init__(self, members: Mapping[str, Member], sizes: Sequence[Sequence[int]] = TRIED_ROWS) -> None:
        self._members = members
        self._batches = [
            {
                name: rows_of(member.example, counts[index % len(counts)], index)
                for index, (name, member) in enumerate(members.items())
            }
            for counts in sizes
        ]
        written = {name: _Buffers(member.net) for name, member in members.items()}
        self._expected = [self._apart(batches) for batches in self._batches]
        for name, buffers in written.items():
            if buffers.have_changed:
                raise CannotMerge(f"{name} changes its own buffers when it runs")

    def check(self, run: Callable[[Mapping[str, Rows]], Answers]) -> None:
        """Raises CannotMerge where a joint run answers something else."""
        for batches, expected in zip(self._batches, self._expected, strict=True):
            found = run(batches)
            for name, outputs in expected.items():
                for key, value in outputs.items():
                    if not is_same(found[name][key], value, TOLERANCE, TOLERANCE):
                        raise CannotMerge(
                            f"{name} answers {key} differently when it runs with others' rows{self._rounding(name)}"
                        )

    def _apart(self, batches: Mapping[str, Rows]) -> Answers:
        given = {
            name: {key: value.clone() for key, value in batch.items()}
            for name, batch in batches.items()
            if count_of(batch)
        }
        answers = alone(self._members, given)
        for name, batch in given.items():
            if not all(is_same(value, batches[name][key], 0.0, 0.0) for key, value in batch.items()):
                raise CannotMerge(f"{name} changes its inputs when it runs")
        return answers

    def _rounding(self, name: str) -> str:
        dtypes = {one.dtype for one in self._members[name].net.parameters()}
        half = [dtype for dtype in _HALF if dtype in dtypes]
        return (
            f" ({str(half[0]).removeprefix('torch.')} rounds differently for each batch size)" if half else ""
        )


def check_apart(members: Mapping[str, Member]) -> None:
    """That there are several, each with a net of its own that does not change while it runs. Raises CannotMerge."""
    nets = [member.net for member in members.values()]
    if len(nets) < 2 or len({id(net) for net in nets}) < len(nets):
        raise CannotMerge("a group needs two models or more, each with a net of its own")
    if any(module.training for net in nets for module in net.modules()):
        raise CannotMerge("in training mode a model may answer differently each time: eval() it first")


def alone(members: Mapping[str, Member], batches: Mapping[str, Rows]) -> Answers:
    """One after the other."""
    return {name: members[name].infer(dict(batch)) for name, batch in batches.items()}


def rows_of(example: Mapping[str, Tensor], count: int, seed: int) -> Rows:
    """Rows that differ: to floats noise is added, whole numbers change their places, so that they stay in their bounds."""
    draw = torch.Generator().manual_seed(seed)
    rows: Rows = {}
    for key, value in example.items():
        stacked = value.cpu().expand(count, *value.shape).clone()
        if stacked.is_floating_point():
            stacked = stacked + torch.randn(stacked.shape, generator=draw).to(stacked.dtype)
        elif value.dim() and count:
            stacked = torch.stack([row.roll(seed + place, -1) for place, row in enumerate(stacked)])
        rows[key] = stacked.to(value.device)
    return rows


def count_of(batch: Rows) -> int:
    """How many rows it has."""
    return next(iter(batch.values())).shape[0]
