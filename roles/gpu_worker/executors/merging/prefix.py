"""Several models, one backbone: their equal leading modules run once for all, then each model's own rest.

A forward pass calls its submodules in some order. As long as every call so far was of a module that is equal in all models of the
group, its values are the same function of the input in all of them, whatever Python does between the calls, as long as that takes no weight
or buffer that differs. So the first
model runs on the joint batch up to the end of its last shared call, and what its shared calls were given and returned is kept. Then every
model runs as it is on its own rows, with shared modules answering from what was kept instead of computing. What they are given then is
compared: each model's own code makes it, and may make something else of the same rows (another scale, another mask).

Equal code on equal weights is a strong hint, not a proof: a model may mix its rows, or have them in another dimension than the first.
So a group is made only where it answers what separate runs answer, on examples of several sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from roles.gpu_worker.executors.merging.base import (
    TOLERANCE,
    Answers,
    CannotMerge,
    Member,
    Rows,
    Trial,
    alone,
    check_apart,
    count_of,
    rows_of,
)
from roles.gpu_worker.executors.merging.calls import Form, row_axes, taken_apart
from roles.gpu_worker.executors.merging.equality import equal_modules, own_tensors, same_tensor, share_equal
from roles.gpu_worker.executors.rounding import is_same

DIFFERENCES_MAX: Final = 3
"""In a row: these models make different things of all requests, and run apart from then on."""
log = logging.getLogger("tenuto")


_PLAIN: Final = (bool, int, float, str, type(None))


class _PrefixDone(Exception):
    pass


@dataclass(slots=True, frozen=True)
class _Call:
    """What a module was given: its tensors, and what is around them."""

    tensors: list[Tensor]
    form: Form

    @classmethod
    def of(cls, given: tuple[Any, ...], named: dict[str, Any]) -> Self:
        return cls(*taken_apart((given, named)))

    def rows_of(self, own: _Call, total: int, count: int, first: int) -> list[Tensor] | None:
        """Of this call with all rows, what `own` with `count` of them should be given; None: that is a call of another kind."""
        if len(self.tensors) != len(own.tensors) or not _fit(self.form.others, own.form.others, total, count):
            return None
        found = []
        for whole, part in zip(self.tensors, own.tensors, strict=True):
            if (whole.dtype, whole.device, whole.dim()) != (part.dtype, part.device, part.dim()):
                return None
            for axis, length in enumerate(part.shape):
                if (whole.shape[axis], length) == (total, count):
                    whole = whole.narrow(axis, first, count)  # noqa: PLW2901  once for each axis
            if whole.shape != part.shape:
                return None
            found.append(whole)
        return found


@dataclass(slots=True)
class _State:
    """What the shared modules of one group do when they are called."""

    mode: Literal["alone", "record", "answer"] = "alone"
    kept: dict[str, tuple[_Call, Any]] = field(default_factory=dict)
    """By module: what it was called with, and what it answered."""
    given: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    """What modules that answered were given, and what they were given for all. Looked at in the end, when the device has run all of it."""
    axes: dict[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Where the rows are in each tensor of its answer; None: nowhere."""
    last: str = ""
    total: int = 0
    rows: slice = field(default_factory=lambda: slice(0))


class _Shared(nn.Module):
    """In the place of a module that the group shares; everything else sees the module itself."""

    def __init__(self, module: nn.Module, name: str, state: _State) -> None:
        super().__init__()
        self.module = module
        self._name, self._state = name, state

    def forward(self, *given: Any, **named: Any) -> Any:
        """Compute, or answer from what was computed for all."""
        state = self._state
        if state.mode == "answer":
            return self._own_rows(_Call.of(given, named))
        result = self.module(*given, **named)
        if state.mode == "record":
            state.kept[self._name] = _Call.of(given, named), result
            if self._name == state.last:
                raise _PrefixDone
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _own_rows(self, call: _Call) -> Any:
        state = self._state
        known = state.kept.get(self._name)
        count = state.rows.stop - state.rows.start
        wanted = known and known[0].rows_of(call, state.total, count, state.rows.start)
        if known is None or wanted is None:
            raise CannotMerge(f"with these inputs {self._name} is called in another way for all together")
        state.given += ((self._name, *pair) for pair in zip(call.tensors, wanted, strict=True))
        tensors, form = taken_apart(known[1])
        axes = state.axes[self._name]
        return form.filled(
            [
                one if axis is None else one.narrow(axis, state.rows.start, count)
                for one, axis in zip(tensors, axes, strict=True)
            ]
        )


class PrefixGroup:
    """Models that run their shared prefix together. Raises CannotMerge where they have none, or where it goes wrong.

    The nets are changed: equal modules hold one copy of their weights, and those of the prefix stand in wrappers that still work alone.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = dict(members)
        nets = [member.net for member in self._members.values()]
        check_apart(self._members)
        _check_alike(nets)
        first, *others = nets
        self.merged = tuple(leading(first, others, next(iter(self._members.values()))))
        if not self.merged:
            raise CannotMerge("their first layers differ already: nothing could be run for all of them")
        self._state = _State(last=self.merged[-1])
        self._differed = 0
        trial = Trial(self._members)
        for other in others:
            share_equal(first, other)
        for name in self.merged:
            for net in nets:
                _put(net, name, _Shared(net.get_submodule(name), name, self._state))
        try:
            self._find_rows()
            trial.check(self.run)
        except BaseException:
            for net in nets:
                for name in self.merged:
                    shared = net.get_submodule(name)
                    assert isinstance(shared, _Shared), "put there above"
                    _put(net, name, shared.module)
            raise

    def run(self, batches: Mapping[str, Rows]) -> Answers:
        """See `Group`."""
        counts = {name: count_of(batch) for name, batch in batches.items()}
        running = [name for name in self._members if counts.get(name)]
        if len(running) < 2 or self._differed == DIFFERENCES_MAX:
            return alone(self._members, {name: batches[name] for name in running})
        joint = _joined([batches[name] for name in running])
        state = self._state
        answers: Answers = {}
        state.total = sum(counts[name] for name in running)
        with self._recorded(joint):
            state.mode = "answer"
            begin = 0
            for name in running:
                state.rows = slice(begin, begin + counts[name])
                begin += counts[name]
                answers[name] = self._members[name].infer(dict(batches[name]))
            self._compare()
        return answers

    def _compare(self) -> None:
        """Raises CannotMerge where a shared module answered for other values than it was given."""
        for name, own, wanted in self._state.given:
            if not (
                _is_same_memory(own, wanted)
                or torch.equal(own, wanted)
                or is_same(own, wanted, TOLERANCE, TOLERANCE)
            ):
                self._differed += 1
                if self._differed == DIFFERENCES_MAX:
                    log.warning("heads_differ module=%s: they run apart from now on", name)
                raise CannotMerge(
                    f"{name} is given other values when a model runs with others' rows: they prepare or mix rows differently"
                )
        self._differed = 0

    def _find_rows(self) -> None:
        """By batches of two and of three: that a length is that of the batch may be chance."""
        example = next(iter(self._members.values())).example
        answers: list[dict[str, list[Tensor]]] = []
        for count in (2, 3):
            with self._recorded(rows_of(example, count, 0)):
                answers.append({name: taken_apart(kept[1])[0] for name, kept in self._state.kept.items()})
        two, three = answers
        if two.keys() != three.keys():
            raise CannotMerge("other modules of it are called for another number of rows")
        self._state.axes = {name: row_axes(two[name], three[name]) for name in two}

    @contextmanager
    def _recorded(self, joint: Rows) -> Iterator[None]:
        """Meanwhile what the shared modules answer for those rows is kept."""
        state = self._state
        state.mode = "record"
        try:
            with suppress(_PrefixDone):
                next(iter(self._members.values())).infer(joint)
                raise CannotMerge(f"with these inputs the model never came to {state.last}")
            yield
        finally:
            state.mode = "alone"
            state.kept.clear()
            state.given.clear()


def _fit(whole: Sequence[Any], own: Sequence[Any], total: int, count: int) -> bool:
    """Whether what is beside the tensors of a call with all rows is that of a call with some of them, as far as it is plain.

    Whole numbers may be of rows.
    """
    return len(whole) == len(own) and all(
        one == other or (type(one) is type(other) is int and one * count == other * total)
        for one, other in zip(whole, own, strict=True)
        if isinstance(one, _PLAIN) or isinstance(other, _PLAIN)
    )


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    """As is what one shared module answered and the next one takes."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _check_alike(nets: Sequence[nn.Module]) -> None:
    if len({type(net) for net in nets}) > 1:
        raise CannotMerge("models share a prefix only with models of their own class")
    if any(isinstance(module, _Shared) for net in nets for module in net.modules()):
        raise CannotMerge("a model is in a group already")


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Says when an operation takes one of these tensors, also without a call of the module that holds it."""

    def __init__(self, tensors: Sequence[Tensor], tell: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By address: `weight.data` is another object. What is empty has none.
        self._addresses = {one.data_ptr() for one in tensors} - {0}
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look and go on."""
        named = kwargs or {}
        if any(one.data_ptr() in self._addresses for one in taken_apart((args, named))[0]):
            self._tell()
        return func(*args, **named)


def _differing(first: nn.Module, others: Sequence[nn.Module]) -> list[Tensor]:
    """Weights and buffers of the first that another one lacks, or has with other values."""
    mine, *theirs = (
        {(name, key): one for name, module in net.named_modules() for key, one in own_tensors(module).items()}
        for net in (first, *others)
    )
    return [
        one
        for place, one in mine.items()
        if not all(place in other and same_tensor(one, other[place]) for other in theirs)
    ]


def leading(first: nn.Module, others: list[nn.Module], member: Member) -> list[str]:
    """Equal modules in the order of their calls, up to the first call that is not of one; each called just once.

    A weight or buffer that differs and is used between the calls ends them as well, whatever its values do for the example.
    """
    equal = set(equal_modules(first, others))
    calls: list[str] = []
    inside: list[str] = []

    def enter(name: str) -> None:
        if inside:
            return
        if name in equal:
            inside.append(name)
            calls.append(name)
        elif name and not any(one.startswith(f"{name}.") for one in equal):
            calls.append(name)

    def leave(name: str) -> None:
        if inside == [name]:
            inside.clear()

    def meet() -> None:
        if not inside:
            calls.append("")  # as a call of what is not equal

    hooks = []
    for name, module in first.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _, __, name=name: enter(name)))
        hooks.append(module.register_forward_hook(lambda _, __, ___, name=name: leave(name)))
    try:
        with _Watched(_differing(first, others), meet):
            member.infer(rows_of(member.example, 1, 0))
    finally:
        for hook in hooks:
            hook.remove()
    prefix: list[str] = []
    for name in calls:
        if name not in equal or calls.count(name) > 1:
            break
        prefix.append(name)
    return prefix


def _put(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    holder = net.get_submodule(parent)
    holder.add_module(last, module)


def _joined(batches: Sequence[Rows]) -> Rows:
    first = batches[0]
    for other in batches[1:]:
        for key, value in first.items():
            given = other.get(key)
            if given is None or given.shape[1:] != value.shape[1:] or given.dtype != value.dtype:
                raise CannotMerge(f"input {key} has another shape or type in another model's batch")
    return {key: torch.cat([batch[key] for batch in batches]) for key in first}
