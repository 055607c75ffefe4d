"""A net as a list of operators with their weights by name, whatever its code looks like (`torch.export`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.fx.node import map_arg

from roles.gpu_worker.executors.merging.base import CannotMerge, Member
from roles.gpu_worker.executors.merging.blocks import Weight
from roles.gpu_worker.executors.merging.calls import FlatNet, Traffic

_LINEAR: Final = torch.ops.aten.linear.default
_SHAPING: Final = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_CONVOLUTIONS: Final = (torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding)


@dataclass(frozen=True, slots=True)
class Operator:
    """A convolution or a linear layer: what can be merged."""

    node: Node
    name: str
    """Of its weight."""
    weight: Weight
    bias: Tensor | None

    @property
    def given(self) -> Node:
        """What gives its input."""
        given = self.node.args[0]
        assert isinstance(given, Node), "no constant runs through a layer"
        return given

    @property
    def is_linear(self) -> bool:
        """Else it is a convolution."""
        return self.node.target is _LINEAR

    @property
    def is_grouped(self) -> bool:
        """A convolution whose output channels see some of the input channels only."""
        return not self.is_linear and self.node.args[6:7] not in ((), (1,))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two must have in common to be merged: of convolutions also their settings and the size of their pictures."""
        common = (self.node.target, self.weight.tensor.dtype, self.weight.tensor.device)
        return common if self.is_linear else (*common, str(self.node.args[3:]), *self._picture)

    @property
    def _picture(self) -> tuple[str, ...]:
        return tuple(map(str, self.given.meta["val"].shape[1:]))


@dataclass(frozen=True, slots=True)
class TracedNet:
    """The operators of one call in order. `inputs` take the call's tensors in order, `outputs` are the answer's."""

    traffic: Traffic
    nodes: Sequence[Node]
    inputs: Sequence[Node]
    outputs: Sequence[Node]
    weights: Mapping[Node, Tensor]
    operators: Sequence[Operator]


def traced(name: str, member: Member) -> TracedNet:
    """Raises CannotMerge where its code cannot be written down so, such as where it looks at values."""
    traffic = Traffic.of(member)
    exported = written_down(name, member, traffic)
    signature = exported.graph_signature
    *nodes, output = exported.graph_module.graph.nodes
    for node in nodes:
        if node.target in _SHAPING:
            node.args = (node.args[0], _without_unknown(node))
    placed = dict(zip((one for one in nodes if one.op == "placeholder"), signature.input_specs, strict=True))
    tensors = {**exported.constants, **exported.state_dict}
    weights = {
        node: tensors[spec.target]
        for node, spec in placed.items()
        if spec.kind is not InputKind.USER_INPUT and spec.target in tensors
    }
    writes = any(one.kind is not OutputKind.USER_OUTPUT for one in signature.output_specs)
    if writes or any(_is_in_place(one) and one.args[0] in weights for one in nodes):
        raise CannotMerge(f"{name} changes its own buffers when it runs")
    names = {node: str(spec.target).removeprefix("net.") for node, spec in placed.items()}
    outputs: list[Node] = []
    map_arg(output.args[0], outputs.append)
    return TracedNet(
        traffic,
        [one for one in nodes if one.op != "placeholder"],
        [node for node, spec in placed.items() if spec.kind is InputKind.USER_INPUT],
        outputs,
        weights,
        [_operator(one, names, weights) for one in nodes if _is_operator(one, weights)],
    )


def written_down(name: str, member: Member, traffic: Traffic) -> ExportedProgram:
    """Its `FlatNet` for any number of rows. Raises CannotMerge."""
    rows = Dim("rows", min=1, max=1 << 20)
    shapes = tuple({} if axis is None else {axis: rows} for axis in traffic.call_axes)
    tensors = tuple(one.clone() for one in traffic.example)
    try:
        return export(FlatNet(member.net, traffic.call), tensors, dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # whatever a model's code does under export, it cannot be merged
        told = " ".join(str(error).split())[:200]
        raise CannotMerge(
            f"{name} cannot be traced by torch.export ({type(error).__name__}: {told})"
        ) from error


def _without_unknown(node: Node) -> list[Any]:
    """The shape it makes, a -1 by the number it stands for: without any rows it could be any number."""
    return [
        made if wanted == -1 and isinstance(made, int) else wanted
        for wanted, made in zip(node.args[1], node.meta["val"].shape, strict=True)  # type: ignore[arg-type]
    ]


def _is_in_place(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable  # noqa: SLF001  there is no public way


def _is_operator(node: Node, weights: Mapping[Node, Tensor]) -> bool:
    if (
        node.target in _CONVOLUTIONS and node.meta["val"].ndim < 4
    ):  # of one picture: there are no rows to join
        return False
    return node.target in (_LINEAR, *_CONVOLUTIONS) and all(
        one is None or one in weights for one in node.args[1:3]
    )


def _operator(node: Node, names: Mapping[Node, str], weights: Mapping[Node, Tensor]) -> Operator:
    weight = node.args[1]
    bias = node.args[2] if len(node.args) > 2 else None
    assert isinstance(weight, Node), "looked at above"
    return Operator(
        node,
        names[weight],
        Weight(weights[weight], is_by_rows=node.target is not _LINEAR),
        weights[bias] if isinstance(bias, Node) else None,
    )
