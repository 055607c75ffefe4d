"""A model cut into stages that run one after the other, each with its own weights.

`torch.export` writes down what the model does as one list of operations, whatever its code looks like, for any size of batch. A
*layer* here is the part of that list between two narrow places: there a single activation is still needed, whose first axis is the
batch (beside what follows from the inputs alone, such as a mask: a stage that needs it gets the inputs and makes it again). Between
the blocks of transformers and residual networks the list is narrow, within a block it is not. Layers are measured, and stages
are those runs of layers whose slowest is fastest (`policies/balanced_cut.py`), or begin at the modules that the user names.
"""

from __future__ import annotations

import difflib
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, export
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fabric.clock import Clock
from policies.balanced_cut import balanced_cut
from roles.gpu_worker.executors.loaders.base import LoaderError, UserModel
from roles.gpu_worker.executors.rounding import is_same

MEASUREMENTS: Final = 5
_BATCH: Final = 2  # of the trace and the measurements: export takes a size of 1 for a constant


class CutError(LoaderError):
    """The model cannot be cut so; says why, and what could be."""


@dataclass(slots=True, frozen=True)
class Stage:
    """One part: it takes the tensors of these names, in this order, and gives those. The first axis of all is the batch."""

    module: GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def run(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What it gives for what it takes."""
        given: tuple[Tensor, ...] = self.module(*values)
        return given

    def move(self, device: torch.device) -> None:
        """Put its weights there, and whatever else it makes on a device."""
        self.module.to(device)
        for node in self.module.graph.nodes:
            node.args = map_aggregate(node.args, lambda one: _moved(one, device))
            node.kwargs = map_aggregate(node.kwargs, lambda one: _moved(one, device))
        self.module.recompile()


@dataclass(slots=True, frozen=True)
class Layer:
    """A part of the list of operations between two narrow places. `modules`: the model's modules in it, as `named_modules` has them."""

    first: int
    end: int
    modules: tuple[str, ...]


def add_tensor(found: hashlib._Hash, name: str, value: Tensor) -> None:
    """To a digest, each bit of it."""
    found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    flat = value.detach().cpu().contiguous().flatten()
    found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


class Traced:
    """A model as one list of operations. Raises CutError where it cannot be written down so."""

    def __init__(self, model: UserModel, example: Mapping[str, Tensor]) -> None:
        self.inputs = tuple(example)
        self._example = {key: torch.stack([value] * _BATCH) for key, value in example.items()}
        whole = _Whole(model, self.inputs)
        if not any(True for _ in whole.parameters()):
            raise CutError("it has no weights that can be found: nothing of it can be put elsewhere")
        if any(hasattr(model, name) for name in ("pre", "post")):
            raise CutError("it has pre or post, which run around a whole model; put them into infer")
        with torch.inference_mode():
            self._answer = dict(model.infer(self._batch()))
        self.outputs = tuple(self._answer)
        size = Dim("batch", min=1, max=1 << 20)
        shapes = (tuple({0: size} for _ in self.inputs),)
        try:
            with torch.no_grad():
                exported = export(whole.eval(), tuple(self._example.values()), dynamic_shapes=shapes)
                if any(map(_is_in_place, exported.graph.nodes)):
                    exported = _without_writes(exported)
                self._graph = exported.module()
        except Exception as error:  # whatever a model's code does under export, it cannot be cut
            raise CutError(
                f"torch.export cannot write it down: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        if exported.graph_signature.buffers_to_mutate:
            raise CutError("it changes its own buffers when it runs, which stages do not hand on")
        self._nodes = [
            node for node in self._graph.graph.nodes if node.op in _COMPUTES and not _is_guard(node)
        ]
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._inputs = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        self._weighted = self._find_weighted()
        self._last_use = self._last_uses()
        self.layers = self._layers()
        self._layer_ms: list[float] | None = None

    @property
    def digest(self) -> str:
        """Of its operations with their settings, weights, buffers and constants: two processes that loaded the same model have the same one."""
        found = hashlib.sha256()
        for node in self._nodes:
            found.update(f"{node.name} {node.args} {node.kwargs}".encode())
        for node in self._graph.graph.nodes:
            value = attrgetter(str(node.target))(self._graph) if node.op == "get_attr" else None
            if isinstance(value, Tensor):
                add_tensor(found, str(node.target), value)
        return found.hexdigest()

    def example(self, stages: Sequence[Stage]) -> dict[str, Tensor]:
        """What the stage behind these takes for one request: their weights must be where the model was loaded."""
        return {name: value[0].clone() for name, value in self._run(stages).items()}

    def check(self, stages: Sequence[Stage]) -> None:
        """Raises CutError where all stages together do not answer what the model does; as `example`."""
        given = self._run(stages)
        for name, value in self._answer.items():
            if not is_same(given[name], value, relative=1e-4, absolute=1e-5):
                raise CutError(
                    f"its stages do not give the same {name!r} as the whole: does it draw at random?"
                )

    def _batch(self) -> dict[str, Tensor]:
        """Of its own: models may write to their inputs."""
        return {key: value.clone() for key, value in self._example.items()}

    def _run(self, stages: Sequence[Stage]) -> dict[str, Tensor]:
        values: Sequence[Tensor] = tuple(self._batch().values())
        names: Sequence[str] = self.inputs
        with torch.inference_mode():
            for stage in stages:
                values, names = stage.run(values), stage.gives
        return dict(zip(names, values, strict=True))

    def times_ms(
        self, stages: Sequence[Stage], clock: Clock, device: torch.device | None = None
    ) -> list[float]:
        """What each takes for one request: the median of a few runs after one that nobody counts.

        On `device`, where only one of them is at a time; None: on the one that they are on.
        """
        took_ms = []
        values: Sequence[Tensor] = tuple(value[:1] for value in self._batch().values())
        home = values[0].device
        with torch.inference_mode():
            for stage in stages:
                if device is not None and device != home:
                    stage.move(device)
                    values = tuple(value.to(device) for value in values)
                own_ms = []
                for _ in range(1 + MEASUREMENTS):
                    _settle(values)
                    began_ms = clock.now_ms()
                    given = stage.run(values)
                    _settle(given)
                    own_ms.append(clock.now_ms() - began_ms)
                values = given
                took_ms.append(median(own_ms[1:]))
                if device is not None and device != home:
                    stage.move(home)
        return took_ms

    def balanced(self, stages: int, clock: Clock, device: torch.device | None = None) -> tuple[int, ...]:
        """The first layers of all stages but the first, by their times on `device`, as `times_ms` measures them.

        Raises CutError for more stages than layers.
        """
        if stages > len(self.layers):
            raise CutError(
                f"it has {len(self.layers)} layers, which cannot be {stages} stages; at most {len(self.layers)}"
            )
        if self._layer_ms is None:
            self._layer_ms = self.times_ms(self.cut(range(1, len(self.layers))), clock, device)
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
        narrow = [0]
        for place in range(1, len(self._nodes)):
            crossing = self._crossing(place)
            if len(crossing) != 1 or not self._is_of_the_batch(crossing[0]):
                continue
            if any(node in self._weighted for node in self._nodes[narrow[-1] : place]):
                narrow.append(place)
        ends = [*narrow[1:], len(self._nodes)]
        return [Layer(first, end, self._modules(first, end)) for first, end in zip(narrow, ends, strict=True)]

    def _crossing(self, place: int) -> list[Node]:
        """The activations that are made before that operation and still needed."""
        return [node for node in self._weighted if self._place[node] < place <= self._last_use.get(node, -1)]

    def _is_of_the_batch(self, node: Node) -> bool:
        """Whether its first axis is the batch, whatever size that has."""
        rows, given = self._inputs[0].meta.get("val"), node.meta.get("val")
        if not isinstance(given, Tensor) or not isinstance(rows, Tensor) or given.dim() == 0:
            return False
        return str(given.shape[0]) == str(rows.shape[0])

    def _find_weighted(self) -> dict[Node, None]:
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
        bounds = [0, *cuts, len(self._nodes)]
        results = [self._crossing(cut)[0] for cut in cuts]
        takes: list[list[Node]] = [list(self._inputs)]
        below: set[Node] = set()
        for k in range(len(results), 0, -1):  # an input that a later stage needs comes through those before
            below |= self._inputs_of(bounds[k], bounds[k + 1])
            takes.insert(1, [results[k - 1], *(one for one in self._inputs if one in below)])
        return tuple(
            self._stage(bounds[k], bounds[k + 1], takes[k], takes[k + 1] if k < len(cuts) else None)
            for k in range(len(bounds) - 1)
        )

    def _inputs_of(self, first: int, end: int) -> set[Node]:
        """The model's inputs from which these operations, or what they need besides activations, are made."""
        found: set[Node] = set()
        seen: set[Node] = set()
        asked = [node for node in self._nodes[first:end] if node in self._weighted]
        if end == len(self._nodes):
            asked += self._results()
        while asked:
            node = asked.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder":
                found.add(node)
            elif node not in self._weighted or first <= self._place[node] < end:
                asked += [] if self._is_batch_size(node) else node.all_input_nodes
        return found

    def _is_batch_size(self, node: Node) -> bool:
        """Every activation that goes from stage to stage tells it as well."""
        sized = node.args[0] if node.target is _SIZE and node.args[1:] == (0,) else None
        return isinstance(sized, Node) and sized.op == "placeholder"

    def _results(self) -> Sequence[Node]:
        (output,) = (node for node in self._graph.graph.nodes if node.op == "output")
        given = output.args[0]
        assert isinstance(given, tuple | list), "as `_Whole` gives"
        return [node for node in given if isinstance(node, Node)]

    def _stage(self, first: int, end: int, takes: Sequence[Node], gives: Sequence[Node] | None) -> Stage:
        """A module of those operations; `gives` None: what the model gives.

        What follows from the inputs alone, such as a mask, is made again where it is needed.
        """
        graph = Graph()
        copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in takes}
        rows = copies[takes[0]]

        def copy_of(node: Node) -> Node:
            if node not in copies:
                own = self._place.get(node, first)
                assert node not in self._weighted or first <= own < end, f"{node} is made in another stage"
                if self._is_batch_size(node):
                    copies[node] = graph.call_function(_SIZE, (rows, 0))
                else:
                    for used in node.all_input_nodes:
                        copy_of(used)
                    copies[node] = graph.node_copy(node, copies.__getitem__)
            return copies[node]

        for node in self._nodes[first:end]:
            if node in self._weighted:
                copy_of(node)
        results = self._results() if gives is None else gives
        names = self.outputs if gives is None else tuple(node.name for node in gives)
        graph.output(tuple(copy_of(one) for one in results))
        module = GraphModule(self._graph, graph)  # keeps of the whole only what the graph names
        taken = self.inputs if first == 0 else tuple(node.name for node in takes)
        return Stage(module.eval(), taken, names)


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
_SIZE: Final = torch.ops.aten.sym_size.int
_COMPUTES: Final = ("call_function", "call_method", "call_module")


def _is_in_place(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable  # noqa: SLF001  there is no public way


def _without_writes(exported: ExportedProgram) -> ExportedProgram:
    """The same with each write in place as a new value: who needs that is seen only so, since a write may go through a view."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # torch's own, of its copy
        written: ExportedProgram = exported.run_decompositions({})
    for node in written.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # another device may lay out the same value otherwise
            node.target = torch.ops.aten.reshape.default
    written.graph_module.recompile()
    return written


def _is_guard(node: Node) -> bool:
    """Checks of the inputs that export adds: ours are checked where they come in."""
    return node.op == "call_module" and "guard" in str(node.target)


def _moved(argument: Any, device: torch.device) -> Any:
    return device if isinstance(argument, torch.device) else argument


def _settle(values: Sequence[Any]) -> None:
    """Wait for a device that works ahead: for what this thread asked of it, as another one may capture (ADR 0070)."""
    for device in {value.device for value in values if isinstance(value, Tensor)}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
