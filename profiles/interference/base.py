"""What every interference law answers, how much the neighbours on one GPU slow a batch down, and what it needs for that.

A slowdown is a factor on the profile's l(b) at the slice's own share. Without neighbours it is 1, with one
exception: where the profile knows the whole GPU only, a model may say what a smaller share costs (`sm`).
`DeviceModel` applies it in both cases, so the scheduler's tables, the simulator and the emulated worker agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct, field

from fabric.errors import ProfileError
from fabric.ids import ModelId
from fabric.policy_options import Number
from profiles.model import WHOLE_GPU_PERCENT, ModelProfile

NeedT = TypeVar("NeedT")


class Running(Struct, frozen=True):
    """A batch on a slice: the model, its size, and the slice's share (None: no limit)."""

    model_id: ModelId
    batch_size: int
    share_percent: float | None = None

    @property
    def share_or_whole(self) -> float:
        """The share in percent; a slice without a limit has the whole GPU."""
        return WHOLE_GPU_PERCENT if self.share_percent is None else self.share_percent


class Interference(Protocol):
    """How much the neighbours on the same GPU slow a batch down. Idle slices are no neighbours.

    `covers_unlimited_slices`: it also says what slices without a share limit, side by side, do to each other.
    """

    @property
    def covers_unlimited_slices(self) -> bool:
        """See above."""
        ...

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        """The factor on l(b), 1 or more; more neighbours never make it smaller."""
        ...


class InterferenceLaw(Struct, Generic[NeedT], frozen=True):
    """An interference law as a configuration names it.

    `read` takes what the law needs out of a model's profile, or answers None where the profile lacks it. Errors call
    that `need`, and name the shipped `families` of profiles that have it. `build` makes the law from what was read
    and from checked `options`, which are numbers: they travel to emulated workers.
    """

    need: str
    families: tuple[str, ...]
    read: Callable[[ModelProfile], NeedT | None]
    build: Callable[[Mapping[ModelId, NeedT], Mapping[str, Any]], Interference]
    options: Mapping[str, Number] = field(default_factory=dict)

    def over(self, profiles: Mapping[ModelId, ModelProfile], options: Mapping[str, Any]) -> Interference:
        """The law for these models; ProfileError naming the first one that lacks what it needs."""
        needed: dict[ModelId, NeedT] = {}
        for model_id, profile in profiles.items():
            found = self.read(profile)
            if found is None:
                raise ProfileError(
                    f"model {model_id} has no {self.need} ({profile.ref or profile.source}); "
                    f"shipped families that do: {', '.join(self.families)}"
                )
            needed[model_id] = found
        return self.build(needed, options)


class NoInterference:
    """Slices of one GPU do not disturb each other; nobody measured that for slices without a limit."""

    covers_unlimited_slices = False

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:  # noqa: ARG002  the protocol's
        """Always 1."""
        return 1.0


NO_LAW = InterferenceLaw("anything", (), lambda profile: profile, lambda _, __: NoInterference())
