"""Nets whose operators have weights in common, as one graph with super-operators (Usher section 3.4).

Each net is traced to a list of operators. Convolutions and linear layers of several nets with a block of equal weights at about the same
place are merged; everything else is copied, each net's part with its own tensors. A super-operator waits for the inputs of all its
members and each net keeps its order, so that operations in place stay right. A model without rows in a batch takes part with tensors of no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Final

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from roles.gpu_worker.executors.merging.base import (
    TRIED_ROWS,
    Answers,
    CannotMerge,
    Member,
    Rows,
    Trial,
    alone,
    check_apart,
    count_of,
)
from roles.gpu_worker.executors.merging.calls import answered
from roles.gpu_worker.executors.merging.equality import hold, share_equal
from roles.gpu_worker.executors.merging.matching import Step, matched
from roles.gpu_worker.executors.merging.super_operator import Place, SuperOperator
from roles.gpu_worker.executors.merging.tracing import TracedNet, traced

TRIED: Final = (*TRIED_ROWS, (0, 1, 2), (1, 2, 0), (2, 0, 1))
"""Each model also without rows."""


class OperatorGroup:
    """Models that run as one graph. Raises CannotMerge where one cannot be traced, or where no weights are common.

    Equal weights are held once by all nets from then on, and these still work alone. Common blocks are views.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        check_apart(members)
        self._members = dict(members)
        trial = Trial(self._members, TRIED)
        first, *others = (member.net for member in self._members.values())
        for other in others:
            share_equal(first, other)
        with torch.inference_mode(mode=False), torch.no_grad():  # what is traced outlives this
            nets = [traced(name, member) for name, member in self._members.items()]
            steps = matched([net.operators for net in nets])
        joint = [step for step in steps if len(step.uses) > 1]
        if not joint:
            raise CannotMerge("no convolutions or linear layers of theirs have weights in common")
        self.merged = tuple(
            next(iter(step.uses.values())).operator.name.removesuffix(".weight") for step in joint
        )
        self._joint = _Joint(nets, steps, self._held_once(joint)).module()
        self._traffic = [
            net.traffic for net in nets
        ]  # and no more of them: they know the weights that are held no longer
        try:
            trial.check(self.run)
        except RuntimeError as error:  # of an operator that takes no tensors without rows
            raise CannotMerge(
                f"their joint graph does not run ({str(error).splitlines()[0][:200]})"
            ) from error

    def run(self, batches: Mapping[str, Rows]) -> Answers:
        """See `Group`."""
        running = {name: batch for name, batch in batches.items() if count_of(batch)}
        if len(running) < 2:
            return alone(self._members, running)
        tensors: list[Tensor] = []
        for (name, member), traffic in zip(self._members.items(), self._traffic, strict=True):
            if name in running:
                tensors += traffic.tensors(member, running[name])
            else:
                tensors += (
                    one if axis is None else one.narrow(axis, 0, 0)
                    for one, axis in zip(traffic.example, traffic.call_axes, strict=True)
                )
        results = iter(self._joint(*tensors))
        answers: Answers = {}
        for (name, member), traffic in zip(self._members.items(), self._traffic, strict=True):
            own = [next(results) for _ in traffic.result_axes]
            if name in running:
                answers[name] = answered(member, running[name], traffic.result.filled(own))
        return answers

    def _held_once(self, joint: Sequence[Step]) -> dict[Tensor, Tensor]:
        """Let all members of a super-operator hold the block itself where it is their whole weight. What is held instead of what."""
        instead: dict[Tensor, Tensor] = {}
        for step in joint:
            owner, *others = [use.operator.weight.tensor for use in step.uses.values()]
            instead.update(
                (one, owner) for one in others if one.shape == step.block.tensor.shape == owner.shape
            )
        for member in self._members.values():
            hold(member.net, instead)
        return instead


class _Joint:
    """The graph in the making: nets' inputs and answers one net after the other."""

    def __init__(
        self, nets: Sequence[TracedNet], steps: Sequence[Step], instead: Mapping[Tensor, Tensor]
    ) -> None:
        self._nets, self._instead = nets, instead
        self._root, self._graph = nn.Module(), Graph()
        self._made: list[dict[Node, Node]] = [
            {
                node: self._graph.placeholder(f"input_{number}_{place}")
                for place, node in enumerate(net.inputs)
            }
            for number, net in enumerate(nets)
        ]
        self._done = [0] * len(nets)
        for place, step in enumerate(steps):
            if len(step.uses) > 1:
                self._merge(step, f"super_operator_{place}")
        for number, net in enumerate(nets):
            self._copy(number, len(net.nodes))
        self._graph.output(
            [self._value(number, node) for number, net in enumerate(nets) for node in net.outputs]
        )

    def module(self) -> GraphModule:
        """It, checked."""
        self._graph.lint()
        return GraphModule(self._root, self._graph)

    def _merge(self, step: Step, name: str) -> None:
        uses = {number: use.operator for number, use in step.uses.items()}
        for number, operator in uses.items():
            self._copy(number, self._nets[number].nodes.index(operator.node))
        first = next(iter(uses.values()))
        block = step.block.tensor
        places = [
            Place(
                None if use.operator.weight.tensor.shape == block.shape else use.operator.weight.tensor,
                use.operator.bias,
                use.row,
                use.column,
            )
            for use in step.uses.values()
        ]
        settings = None if first.is_linear else first.node.args[3:]
        self._root.add_module(name, SuperOperator(block, places, settings))
        inputs = tuple(self._value(number, operator.given) for number, operator in uses.items())
        outputs = self._graph.call_module(name, inputs)
        for place, (number, operator) in enumerate(uses.items()):
            self._made[number][operator.node] = self._graph.call_function(getitem, (outputs, place))
            self._done[number] += 1

    def _copy(self, number: int, end: int) -> None:
        """What a net does before its node of that number."""
        for node in self._nets[number].nodes[self._done[number] : end]:
            self._made[number][node] = self._graph.node_copy(node, lambda one: self._value(number, one))
        self._done[number] = end

    def _value(self, number: int, node: Node) -> Node:
        """A weight is fetched where it is needed first."""
        made = self._made[number]
        if node not in made:
            tensor = self._nets[number].weights[node]
            name = f"weight_{number}_{node.name}"
            setattr(self._root, name, self._instead.get(tensor, tensor))
            made[node] = self._graph.get_attr(name)
        return made[node]
