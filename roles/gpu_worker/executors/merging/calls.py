"""What a member's net is called with and answers, taken out of `infer` and put back.

`infer` is anybody's code around one call of the net. It runs up to that call, where its tensors are taken; the net's answer is computed
for all members together; then `infer` runs again, and its call gets that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from roles.gpu_worker.executors.merging.base import CannotMerge, Member, Rows, count_of, rows_of

_TENSOR = object()  # in a form: here is one


@dataclass(frozen=True, slots=True)
class Form:
    """Any structure around tensors: what a net is called with, or answers."""

    spec: TreeSpec
    others: tuple[Any, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """With these in their places."""
        given = iter(tensors)
        return tree_unflatten([next(given) if one is _TENSOR else one for one in self.others], self.spec)


def taken_apart(value: Any) -> tuple[list[Tensor], Form]:
    """Its tensors, and what is around them."""
    leaves, spec = tree_flatten(value)
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    return tensors, Form(spec, tuple(_TENSOR if isinstance(one, Tensor) else one for one in leaves))


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a member's net is called and answers, whatever the number of rows; in `…_axes` where the rows are, None: nowhere."""

    call: Form
    call_axes: tuple[int | None, ...]
    result: Form
    result_axes: tuple[int | None, ...]
    example: tuple[Tensor, ...]
    """The tensors of a call with two rows."""

    @classmethod
    def of(cls, member: Member) -> Self:
        """Seen with two and with three rows. Raises CannotMerge where that tells too little."""
        two, three = (called(member, rows_of(member.example, count, 0)) for count in (2, 3))
        if two[1] != three[1]:
            raise CannotMerge("its module is called differently for another number of rows")
        answers = []
        for tensors, form in (two, three):
            given, named = form.filled(tensors)
            answers.append(taken_apart(member.net(*given, **named)))
        return cls(
            two[1],
            row_axes(two[0], three[0]),
            answers[0][1],
            row_axes(answers[0][0], answers[1][0]),
            tuple(two[0]),
        )

    def tensors(self, member: Member, rows: Rows) -> list[Tensor]:
        """Of the call for these rows. Raises CannotMerge where it is called in another way than before, such as with fewer of them."""
        tensors, form = called(member, rows)
        if form != self.call or any(
            _beside_rows(one, axis) != _beside_rows(traced, axis)
            or (axis is not None and one.shape[axis] != count_of(rows))
            for one, traced, axis in zip(tensors, self.example, self.call_axes, strict=True)
        ):
            raise CannotMerge("with these inputs its module is called in another way")
        return tensors


class FlatNet(nn.Module):
    """A net that takes its tensors in a row and gives them so."""

    def __init__(self, net: nn.Module, call: Form) -> None:
        super().__init__()
        self.net = net
        self._call = call

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """What the net answers, without what is around it."""
        given, named = self._call.filled(tensors)
        return taken_apart(self.net(*given, **named))[0]


def called(member: Member, rows: Rows) -> tuple[list[Tensor], Form]:
    """What `infer` calls the net with for these rows; the net does not run."""
    with _standing_in(member.net, _stop):
        try:
            member.infer(dict(rows))
        except _Called as call:
            return taken_apart((call.given, call.named))
    raise CannotMerge("its infer does not call the module that it holds")


def answered(member: Member, rows: Rows, result: Any) -> Mapping[str, Tensor]:
    """What `infer` makes of that result of its one call."""
    results = [result]

    def answer(*_: Any, **__: Any) -> Any:
        if not results:
            raise CannotMerge("its infer calls its module more than once")
        return results.pop()

    with _standing_in(member.net, answer):
        return member.infer(dict(rows))


class _Called(Exception):
    def __init__(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.given, self.named = given, named


def _stop(*given: Any, **named: Any) -> Any:
    raise _Called(given, named)


@contextmanager
def _standing_in(net: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Python looks at an object before its class: its own `forward` goes first."""
    before = vars(net).get("forward")
    vars(net)["forward"] = forward
    try:
        yield
    finally:
        del vars(net)["forward"]
        if before is not None:
            vars(net)["forward"] = before


def _beside_rows(tensor: Tensor, axis: int | None) -> tuple[Any, ...]:
    """What has to be as it was when it was looked at, whatever the number of rows."""
    lengths = [length for at, length in enumerate(tensor.shape) if at != axis]
    return tensor.dtype, tensor.device, lengths


def row_axes(two: Sequence[Tensor], three: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Along which axis each tensor has the rows, by what it is for two and for three; None: it has none. Raises CannotMerge."""
    found: list[int | None] = []
    for left, right in zip(two, three, strict=True):
        lengths = list(zip(left.shape, right.shape, strict=True))
        moving = [axis for axis, (one, other) in enumerate(lengths) if one != other]
        if len(moving) > 1 or any(lengths[axis] != (2, 3) for axis in moving):
            raise CannotMerge("its module's tensors do not have the rows along one axis")
        found.append(moving[0] if moving else None)
    return tuple(found)
