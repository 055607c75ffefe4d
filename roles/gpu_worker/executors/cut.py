"""A model cut into stages that run one after the other, each with its own weights.

`torch.export` writes down what the model does as one list of operations, whatever its code looks like, for any size of batch. A
*layer* here is the part of that list between two narrow places: there a single activation is still needed (beside what
follows from the inputs alone, such as a mask, which is small and goes along). Between the blocks of transformers and residual
networks the list is narrow, within a block it is not. Layers are measured, and stages are those runs of layers whose slowest is
fastest (`policies/balanced_cut.py`), or begin at the modules that the user names.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx import Graph, GraphModule, Node

from fabric.clock import Clock
from policies.balanced_cut import balanced_cut
from roles.gpu_worker.executors.loaders.base import LoaderError, UserModel

MEASUREMENTS: Final = 5
_BATCH: Final = 2  # of the trace and the measurements: export takes a size of 1 for a constant

Value = Tensor | int
"""What goes from stage to stage: activations, and sizes that follow from the batch's."""


class CutError(LoaderError):
    """The model cannot be cut so; says why, and what could be."""


@dataclass(slots=True, frozen=True)
class Stage:
    """One part: it takes the values of these names, in this order, and gives those."""

    module: GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def run(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """What it gives for what it takes."""
        given: tuple[Value, ...] = self.module(*values)
        return given


@dataclass(slots=True, frozen=True)
class Layer:
    """A part of the list of operations between two narrow places. `modules`: the model's modules in it, as `named_modules` has them."""

    first: int
    end: int
    modules: tuple[str, ...]


class Traced:
    """A model as one list of operations. Raises CutError where it cannot be written down so."""

    def __init__(self, model: UserModel, example: Mapping[str, Tensor]) -> None:
        self.inputs = tuple(example)
        self._example = {key: torch.stack([value] * _BATCH) for key, value in example.items()}
        whole = _Whole(model, self.inputs)
        if not any(True for _ in whole.parameters()):
            raise CutError("it has no weights that can be found: nothing of it can be put elsewhere")
        with torch.inference_mode():
            self.outputs = tuple(model.infer(dict(self._example)))
        size = Dim("batch", min=1, max=1 << 20)
        shapes = (tuple({0: size} for _ in self.inputs),)
        try:
            with torch.no_grad():
                exported = export(whole.eval(), tuple(self._example.values()), dynamic_shapes=shapes)
                self._graph = exported.module()
        except Exception as error:  # whatever a model's code does under export, it cannot be cut
            raise CutError(
                f"torch.export cannot write it down: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        self._nodes = [
            node for node in self._graph.graph.nodes if node.op in _COMPUTES and not _is_guard(node)
        ]
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._last_use = self._last_uses()
        self.layers = self._layers()
        self._layer_ms: list[float] | None = None

    def times_ms(self, stages: Sequence[Stage], clock: Clock) -> list[float]:
        """What each takes for one request, on the device that they are on: the median of a few runs after one that nobody counts."""
        took_ms: list[list[float]] = [[] for _ in stages]
        with torch.inference_mode():
            for _ in range(1 + MEASUREMENTS):
                values: Sequence[Value] = tuple(value[:1] for value in self._example.values())
                for stage, own_ms in zip(stages, took_ms, strict=True):
                    _settle(values)
                    began_ms = clock.now_ms()
                    values = stage.run(values)
                    _settle(values)
                    own_ms.append(clock.now_ms() - began_ms)
        return [median(own_ms[1:]) for own_ms in took_ms]

    def balanced(self, stages: int, clock: Clock) -> tuple[int, ...]:
        """The first layers of all stages but the first, by their measured times. Raises CutError for more stages than layers."""
        if stages > len(self.layers):
            raise CutError(
                f"it has {len(self.layers)} layers, which cannot be {stages} stages; at most {len(self.layers)}"
            )
        if self._layer_ms is None:
            self._layer_ms = self.times_ms(self.cut(range(1, len(self.layers))), clock)
        return balanced_cut(self._layer_ms, stages)

    def begun_at(self, names: Sequence[str]) -> tuple[int, ...]:
        """The first layers of all stages but the first, which begin with those modules. Raises CutError where they do not."""
        found = tuple(self._layer_of(name) for name in names)
        for name, before, after in zip(names, (0, *found), found, strict=False):
            if after <= before:
                raise CutError(f"no stage can begin at {name!r}: another one begins there, or behind it")
        return found

    def cut(self, first_layers: Sequence[int]) -> tuple[Stage, ...]:
        """The stages that begin at these layers, and the first one."""
        return self._stages([self.layers[first].first for first in first_layers])

    def _layer_of(self, name: str) -> int:
        for number, layer in enumerate(self.layers):
            if name in layer.modules:
                return number
        known = sorted({one for layer in self.layers for one in layer.modules})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there is {', '.join(known[:8])}, …"
        raise CutError(f"it has no module {name!r}{hint}")

    # ------------------------------------------------------------ narrow places

    def _last_uses(self) -> dict[Node, int]:
        """Of each value the last operation that needs it; of what the model gives, one behind the last."""
        last: dict[Node, int] = {}
        for node in self._graph.graph.nodes:
            place = len(self._nodes) if node.op == "output" else self._place.get(node)
            for used in node.all_input_nodes:
                if place is not None:
                    last[used] = max(last.get(used, -1), place)
        return last

    def _layers(self) -> list[Layer]:
        weighted = self._weighted()
        narrow = [0]
        for place in range(1, len(self._nodes)):
            crossing = [
                node for node in weighted if self._place[node] < place <= self._last_use.get(node, -1)
            ]
            if len(crossing) == 1 and any(node in weighted for node in self._nodes[narrow[-1] : place]):
                narrow.append(place)
        ends = [*narrow[1:], len(self._nodes)]
        return [Layer(first, end, self._modules(first, end)) for first, end in zip(narrow, ends, strict=True)]

    def _weighted(self) -> dict[Node, None]:
        """Values that follow from weights: activations. What follows from inputs alone is no part of any layer's work."""
        weights = {name for name, _ in self._graph.named_parameters(remove_duplicate=False)}
        found: dict[Node, None] = {}
        for node in self._nodes:
            if any(
                used in found or (used.op == "get_attr" and str(used.target) in weights)
                for used in node.all_input_nodes
            ):
                found[node] = None
        return found

    def _modules(self, first: int, end: int) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for node in self._nodes[first:end]:
            for path, _ in node.meta.get("nn_module_stack", {}).values():
                _, dot, name = str(path).partition(f"{_NET}.")  # what is before it is ours
                _, _, own = name.partition(".")  # the attribute that holds the module
                if dot and own:
                    names[own] = None
        return tuple(names)

    # ------------------------------------------------------------ stages

    def _stages(self, cuts: Sequence[int]) -> tuple[Stage, ...]:
        inputs = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        bounds = [0, *cuts, len(self._nodes)]
        values = (*inputs, *self._nodes)
        crossing = [
            inputs,
            *(
                [node for node in values if self._place.get(node, -1) < cut <= self._last_use.get(node, -1)]
                for cut in cuts
            ),
        ]
        return tuple(
            self._stage(bounds[k], bounds[k + 1], crossing[k], crossing[k + 1] if k < len(cuts) else None)
            for k in range(len(bounds) - 1)
        )

    def _stage(self, first: int, end: int, takes: Sequence[Node], gives: Sequence[Node] | None) -> Stage:
        """A module of those operations; `gives` None: what the model gives."""
        graph = Graph()
        copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in takes}

        def copy_of(node: Node) -> Node:
            if node not in copies:
                assert node.op == "get_attr", f"{node} is made in another stage"
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in self._nodes[first:end]:
            for used in node.all_input_nodes:
                copy_of(used)
            copies[node] = graph.node_copy(node, copy_of)
        if gives is None:
            (output,) = (node for node in self._graph.graph.nodes if node.op == "output")
            results = [copy_of(one) for one in output.args[0]]
            names = self.outputs
        else:
            results, names = [copies[node] for node in gives], tuple(node.name for node in gives)
        graph.output(tuple(results))
        module = GraphModule(self._graph, graph)  # keeps of the whole only what the graph names
        return Stage(module.eval(), tuple(node.name for node in takes), names)


class _Whole(nn.Module):
    """A user's model as a module from tensors to tensors."""

    def __init__(self, model: UserModel, inputs: Sequence[str]) -> None:
        super().__init__()
        self._model = (model,)  # a tuple, so that its modules are found under one name only
        self._inputs = inputs
        held = {"self": model} if isinstance(model, nn.Module) else vars(model)
        modules = {key.lstrip("_") or key: one for key, one in held.items() if isinstance(one, nn.Module)}
        setattr(self, _NET, nn.ModuleDict(modules))

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the order of their names."""
        return tuple(self._model[0].infer(dict(zip(self._inputs, values, strict=True))).values())


_NET: Final = "tenuto_net"
_COMPUTES: Final = ("call_function", "call_method", "call_module")


def _is_guard(node: Node) -> bool:
    """Checks of the inputs that export adds: ours are checked where they come in."""
    return node.op == "call_module" and "guard" in str(node.target)


def _settle(values: Sequence[Any]) -> None:
    """Wait for a device that works ahead."""
    if any(isinstance(value, Tensor) and value.device.type == "cuda" for value in values):
        torch.cuda.synchronize()
