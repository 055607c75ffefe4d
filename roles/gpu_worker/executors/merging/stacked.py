"""Nets of one architecture whose weights differ, as one net: `torch.func.vmap` over their stacked weights.

Each operator runs once with the weights of all members, where they would run one after the other. That pays where launching a
kernel takes longer than the kernel itself. A weight that is equal in all members is not stacked: `vmap` makes one larger operator of
that, as for equal leading layers. (`torch.func.stack_module_state` would stack and copy those too.)

All members must have as many rows: shorter batches are padded. So a batch runs together only where the padded one, by what was
measured at the start, is not slower than its members one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule

from fabric.clock import MonotonicClock
from roles.gpu_worker.executors.merging.base import (
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
from roles.gpu_worker.executors.merging.calls import Traffic, answered
from roles.gpu_worker.executors.merging.equality import are_alike, same_tensor, share_equal
from roles.gpu_worker.executors.merging.tracing import written_down

MEASUREMENTS: Final = 5
# Of operators that it runs member by member it warns at each call. Whether that pays is measured here.
torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]  # noqa: SLF001  there is no public way


class StackedGroup:
    """Models that run as one stacked net. Raises CannotMerge where they cannot, or where that is not faster.

    Their nets hold views of the stacked weights from then on, and still work alone.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        check_apart(members)
        self._members = dict(members)
        first, *others = (member.net for member in self._members.values())
        self.merged = tuple(name for name, _ in first.named_children())
        trial = Trial(self._members)
        seen = [Traffic.of(member) for member in self._members.values()]
        self._traffic = seen[0]
        if any(
            (one.call, one.call_axes, one.result_axes)
            != (seen[0].call, seen[0].call_axes, seen[0].result_axes)
            for one in seen
        ):
            raise CannotMerge("their modules are not called alike, or do not answer alike")
        for other in others:
            share_equal(first, other)
        with torch.inference_mode(mode=False), torch.no_grad():  # weights outlive this
            name, member = next(iter(self._members.items()))
            flat = _for_vmap(written_down(name, member, self._traffic).module())
            self._weights, axes = _stack([first, *others])

        def run(weights: dict[str, Tensor], *tensors: Tensor) -> list[Tensor]:
            answer: list[Tensor] = functional_call(flat, weights, tensors)
            return answer

        self._run: Callable[..., list[Tensor]] = torch.vmap(
            run, in_dims=(axes, *(0 for _ in self._traffic.call_axes)), randomness="error"
        )
        try:
            trial.check(self._together)
        except RuntimeError as error:  # of an operator that vmap does not know
            raise CannotMerge(
                f"torch.func.vmap cannot run them ({str(error).splitlines()[0][:200]})"
            ) from error
        self._gain = self._measured_gain()

    def run(self, batches: Mapping[str, Rows]) -> Answers:
        """See `Group`."""
        running = {name: batch for name, batch in batches.items() if count_of(batch)}
        counts = [count_of(batch) for batch in running.values()]
        padded = len(self._members) * max(counts, default=0)
        if len(running) < 2 or padded > self._gain * sum(counts):
            return alone(self._members, running)
        return self._together(running)

    def _together(self, batches: Mapping[str, Rows]) -> Answers:
        traffic = self._traffic
        calls = {name: traffic.tensors(self._members[name], batch) for name, batch in batches.items()}
        most = max(count_of(batch) for batch in batches.values())
        filler = next(iter(calls.values()))
        results = self._run(
            self._weights,
            *(
                torch.stack([_padded(calls.get(name, filler)[place], axis, most) for name in self._members])
                for place, axis in enumerate(traffic.call_axes)
            ),
        )
        answers: Answers = {}
        for place, (name, member) in enumerate(self._members.items()):
            if name in batches:
                own = [
                    result[place] if axis is None else result[place].narrow(axis, 0, count_of(batches[name]))
                    for result, axis in zip(results, traffic.result_axes, strict=True)
                ]
                answers[name] = answered(member, batches[name], traffic.result.filled(own))
        return answers

    def _measured_gain(self) -> float:
        """How often faster than one after the other, with a row for each."""
        batches = {name: rows_of(member.example, 1, 0) for name, member in self._members.items()}
        apart_ms = _took_ms(lambda: alone(self._members, batches))
        together_ms = _took_ms(lambda: self._together(batches))
        if together_ms >= apart_ms:
            raise CannotMerge(
                f"as one stacked net they are no faster here: {together_ms:.3g} ms for a row each, {apart_ms:.3g} ms one after the other"
            )
        return apart_ms / together_ms


def _for_vmap(net: nn.Module) -> nn.Module:
    """A traced net, which looks at no values, as `vmap` wants. The size of a tensor is asked of the tensor, which knows it there."""
    assert isinstance(net, GraphModule), "export writes one"
    for node in net.graph.nodes:
        if node.target is torch.ops.aten.sym_size.int:
            node.target = Tensor.size
    net.recompile()
    return net


def _stack(nets: Sequence[nn.Module]) -> tuple[dict[str, Tensor], dict[str, int | None]]:
    """The weights and buffers of all nets by `FlatNet`'s names, and along which axis each is stacked; None: equal in all."""
    found = [dict(_tensors_of(net)) for net in nets]
    if any(one.keys() != found[0].keys() for one in found):
        raise CannotMerge("their modules have other weights: they are not of one architecture")
    weights: dict[str, Tensor] = {}
    axes: dict[str, int | None] = {}
    for name in found[0]:
        own = [one[name] for one in found]
        if len({(one.shape, one.dtype) for one in own}) > 1:
            shapes = ", ".join(str(list(one.shape)) for one in own[:3])
            raise CannotMerge(f"their {name} has other shapes ({shapes}): they are not of one architecture")
    if not all(are_alike(nets[0], other) for other in nets[1:]):
        raise CannotMerge("their modules are of other classes, or have other settings")
    for name in found[0]:
        own = [one[name] for one in found]
        is_equal = all(same_tensor(one, own[0]) for one in own)
        stacked = own[0].data if is_equal else torch.stack([one.data for one in own])
        weights[f"net.{name}"], axes[f"net.{name}"] = stacked, None if is_equal else 0
        if not is_equal:
            for one, part in zip(own, stacked, strict=True):
                one.data = part
    return weights, axes


def _tensors_of(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tied ones once: `functional_call` ties them again."""
    yield from net.named_parameters()
    yield from net.named_buffers()


def _padded(tensor: Tensor, axis: int | None, most: int) -> Tensor:
    """To that many rows, by its first one; a member without rows has those of another."""
    if axis is None:
        return tensor
    first = tensor.narrow(axis, 0, 1)
    missing = most - tensor.shape[axis]
    return torch.cat([tensor, *[first] * missing], dim=axis) if missing else tensor


def _took_ms(call: Callable[[], object]) -> float:
    """The least of a few runs after one that nobody counts."""
    clock = MonotonicClock()
    took_ms = []
    for _ in range(1 + MEASUREMENTS):
        began_ms = clock.now_ms()
        call()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # not the device, on which another thread may capture (ADR 0070)
        took_ms.append(clock.now_ms() - began_ms)
    return min(took_ms[1:])
