"""Several models, one backbone: their equal leading modules run once for all, then each model's own rest.

A forward pass calls its submodules in some order. As long as every call so far was of a module that is equal in all models of the
group, its values are the same function of the input in all of them, whatever Python does between the calls. So the first
model runs on the joint batch up to the end of its last shared call, and what its shared calls returned is kept. Then every
model runs as it is on its own rows, with shared modules answering from what was kept instead of computing.

Equal code on equal weights is a strong hint, not a proof: a model may mix its rows, or have them in another dimension than the first.
So a group is made only where it answers what separate runs answer, on examples of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fabric.errors import FabricError
from roles.gpu_worker.executors.merging.equality import equal_modules, share_equal

Rows = dict[str, Tensor]
Infer = Callable[[Rows], Mapping[str, Tensor]]
TOLERANCE: Final = 1e-5
"""Between a joint and a separate run: kernels may sum in another order for another batch size."""
TRIED_ROWS: Final = ((1, 2), (3, 1))


class CannotMerge(FabricError):
    """These models share no prefix that could be run for all of them; says why."""


class _PrefixDone(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Member:
    """A model of a group: `infer` runs `net` on rows [n, …] and answers rows."""

    net: nn.Module
    infer: Infer
    example: Mapping[str, Tensor]
    """One request."""


@dataclass(slots=True)
class _State:
    """What the shared modules of one group do when they are called."""

    mode: Literal["alone", "record", "answer"] = "alone"
    kept: dict[str, Any] = field(default_factory=dict)
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
            return tree_map(self._own_rows, state.kept[self._name])
        result = self.module(*given, **named)
        if state.mode == "record":
            state.kept[self._name] = result
            if self._name == state.last:
                raise _PrefixDone
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def _own_rows(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == self._state.total:
            return value[self._state.rows]
        return value


class PrefixGroup:
    """Models that run their shared prefix together. Raises CannotMerge where they have none, or where it goes wrong.

    The nets are changed: equal modules hold one copy of their weights, and those of the prefix stand in wrappers that still work alone.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = dict(members)
        nets = [member.net for member in self._members.values()]
        _check_alike(nets)
        first, *others = nets
        self.prefix = _leading(first, others, next(iter(self._members.values())))
        if not self.prefix:
            raise CannotMerge("their first layers differ already: nothing could be run for all of them")
        self._state = _State(last=self.prefix[-1])
        separate = [self._alone(batches) for batches in self._tried()]
        for other in others:
            share_equal(first, other)
        for name in self.prefix:
            for net in nets:
                _put(net, name, _Shared(net.get_submodule(name), name, self._state))
        try:
            self._check(separate)
        except CannotMerge:
            for net in nets:
                for name in self.prefix:
                    shared = net.get_submodule(name)
                    assert isinstance(shared, _Shared), "put there above"
                    _put(net, name, shared.module)
            raise

    def run(self, batches: Mapping[str, Rows]) -> dict[str, Mapping[str, Tensor]]:
        """Each model's outputs for its rows; models without rows are not run and not in the answer."""
        counts = {name: _count(batch) for name, batch in batches.items()}
        running = [name for name in self._members if counts.get(name)]
        if len(running) < 2:
            return self._alone({name: batches[name] for name in running})
        joint = _joined([batches[name] for name in running])
        state = self._state
        answers: dict[str, Mapping[str, Tensor]] = {}
        state.total = sum(counts[name] for name in running)
        try:
            state.mode = "record"
            self._record(joint)
            state.mode = "answer"
            begin = 0
            for name in running:
                state.rows = slice(begin, begin + counts[name])
                begin += counts[name]
                answers[name] = self._members[name].infer(dict(batches[name]))
        finally:
            state.mode = "alone"
            state.kept.clear()
        return answers

    def _record(self, joint: Rows) -> None:
        try:
            next(iter(self._members.values())).infer(joint)
        except _PrefixDone:
            return
        raise CannotMerge(f"with these inputs the model never came to {self._state.last}")

    def _alone(self, batches: Mapping[str, Rows]) -> dict[str, Mapping[str, Tensor]]:
        return {name: self._members[name].infer(dict(batch)) for name, batch in batches.items()}

    def _tried(self) -> list[dict[str, Rows]]:
        """Batches of different sizes with different rows: a row that comes back from another request is seen."""
        return [
            {
                name: _rows_of(member.example, sizes[index % len(sizes)], index)
                for index, (name, member) in enumerate(self._members.items())
            }
            for sizes in TRIED_ROWS
        ]

    def _check(self, separate: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        for batches, expected in zip(self._tried(), separate, strict=True):
            found = self.run(batches)
            for name, outputs in expected.items():
                for key, value in outputs.items():
                    if not _is_close(found[name][key], value):
                        raise CannotMerge(
                            f"{name} answers {key} differently when its prefix runs with others' rows"
                        )


def _check_alike(nets: Sequence[nn.Module]) -> None:
    if len(nets) < 2 or len({id(net) for net in nets}) < len(nets):
        raise CannotMerge("a group needs two models or more, each with a net of its own")
    if len({type(net) for net in nets}) > 1:
        raise CannotMerge("models share a prefix only with models of their own class")
    if any(module.training for net in nets for module in net.modules()):
        raise CannotMerge("in training mode a model may answer differently each time: eval() it first")
    if any(isinstance(module, _Shared) for net in nets for module in net.modules()):
        raise CannotMerge("a model is in a group already")


def _leading(first: nn.Module, others: list[nn.Module], member: Member) -> list[str]:
    """Equal modules in the order of their calls, up to the first call that is not of one; each called just once."""
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

    hooks = []
    for name, module in first.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _, __, name=name: enter(name)))
        hooks.append(module.register_forward_hook(lambda _, __, ___, name=name: leave(name)))
    try:
        member.infer(_rows_of(member.example, 1, 0))
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


def _rows_of(example: Mapping[str, Tensor], count: int, seed: int) -> Rows:
    """Rows that differ: to floats noise is added, whole numbers change their places, so that they stay in their bounds."""
    draw = torch.Generator().manual_seed(seed)
    rows: Rows = {}
    for key, value in example.items():
        stacked = torch.stack([value.cpu()] * count)
        if stacked.is_floating_point():
            stacked = stacked + torch.randn(stacked.shape, generator=draw).to(stacked.dtype)
        elif value.dim():
            stacked = torch.stack([row.roll(seed + place, -1) for place, row in enumerate(stacked)])
        rows[key] = stacked.to(value.device)
    return rows


def _count(batch: Rows) -> int:
    return next(iter(batch.values())).shape[0]


def _joined(batches: Sequence[Rows]) -> Rows:
    first = batches[0]
    for other in batches[1:]:
        for key, value in first.items():
            given = other.get(key)
            if given is None or given.shape[1:] != value.shape[1:] or given.dtype != value.dtype:
                raise CannotMerge(f"input {key} has another shape or type in another model's batch")
    return {key: torch.cat([batch[key] for batch in batches]) for key in first}


def _is_close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(
        left.float(), right.float(), rtol=TOLERANCE, atol=TOLERANCE
    )
