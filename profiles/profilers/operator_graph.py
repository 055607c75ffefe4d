"""A model's operator graph out of torch, without a device and without computing: fake tensors have only shapes.

What is recorded is what eager torch would launch, in that order, with what Python keeps alive. Inside the mode, loading
builds fake weights, so a model of any size takes no memory. A model whose path depends on values cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric.errors import ProfileError
from profiles.estimator.graph import Allocation, OperatorCall, OperatorGraph

_DEPENDS_ON_VALUES: Final = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
_NO_RULE: Final = (UnsupportedFakeTensorException, UnsupportedOperatorException)
# Kept whole although torch could take them apart: the records are of these.
_WHOLE: Final = frozenset(
    {
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "batch_norm",
        "layer_norm",
        "softmax",
        "scaled_dot_product_attention",
        "dropout",
        "dropout_",
        "feature_dropout",
        "max_pool2d",
        "adaptive_avg_pool2d",
    }
)
_HALF: Final = frozenset({torch.float16, torch.bfloat16})


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have shapes and no values. Raises ProfileError for a model that looks at values."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            yield
    except _DEPENDS_ON_VALUES as error:
        raise ProfileError(
            f"the model cannot be estimated: which operators it runs depends on values ({_where(error)}); "
            "measure it on the device instead"
        ) from error
    except _NO_RULE as error:
        raise ProfileError(
            f"the model cannot be estimated: an operator does not say what shape it gives ({_where(error)})"
        ) from error
    except RuntimeError as error:  # torch has no class of its own for a user's operator without a rule
        raise ProfileError(
            f"the model cannot be estimated: it does not run on shapes alone ({_where(error)})"
        ) from error


def operator_graph(
    infer: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], example: Mapping[str, Tensor], batch_size: int
) -> OperatorGraph:
    """The graph of a batch of so many examples; inside `fake_tensors()`."""
    batch = {
        name: torch.empty((batch_size, *value.shape), dtype=value.dtype) for name, value in example.items()
    }
    recorder = _Recorder()
    with recorder:
        outputs = infer(dict(batch))
    return recorder.graph(batch_size, list(batch.values()), list(outputs.values()))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[OperatorCall] = []
        self._made: dict[int, int] = {}  # storage -> the call that wrote it last
        self._alive: list[tuple[Any, int, int]] = []  # storage, bytes, born
        self._over: list[Allocation] = []
        self._weights: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        space, _, name = _schema(func).name.partition("::")
        if name not in _WHOLE and space == "aten":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        self._record(func, name, [*args, *kwargs.values()], args, kwargs, result)
        return result

    def _record(
        self,
        func: Any,
        name: str,
        given: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        self._end_of_life()
        inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs:
            return
        index = len(self._calls)
        read = {_storage(one): one for one in inputs}
        is_view = not _schema(func).is_mutable and all(_storage(one) in read for one in outputs)
        if is_view:
            return
        for key, one in read.items():
            if key not in self._made and key not in self._weights:
                self._weights[key] = one.untyped_storage().nbytes()
        reads = tuple(sorted({self._made[key] for key in read if key in self._made}))
        for one in outputs:
            key = _storage(one)
            if key not in self._made and key not in read:
                self._alive.append((_weak(one), _bytes(one), index))
            self._made[key] = index
        self._calls.append(
            OperatorCall(
                name,
                tuple(tuple(one.shape) for one in inputs),
                tuple(tuple(one.shape) for one in outputs),
                sum(_bytes(one) for one in inputs) + sum(_bytes(one) for one in outputs),
                _options(func, args, kwargs),
                reads,
                any(one.dtype in _HALF for one in outputs),
            )
        )

    def _end_of_life(self) -> None:
        last = len(self._calls) - 1
        still = []
        for storage, size, born in self._alive:
            if storage.expired():
                self._over.append(Allocation(size, born, max(born, last)))
                self._made.pop(storage.cdata, None)
            else:
                still.append((storage, size, born))
        self._alive = still

    def graph(self, batch_size: int, inputs: list[Tensor], outputs: list[Tensor]) -> OperatorGraph:
        """What was recorded."""
        self._end_of_life()
        kept = [Allocation(size, born, None) for _, size, born in self._alive]
        of_inputs = {_storage(one) for one in inputs}
        return OperatorGraph(
            batch_size,
            self._calls,
            sorted([*self._over, *kept], key=lambda one: one.born),
            [size for key, size in self._weights.items() if key not in of_inputs],
            [_bytes(one) for one in inputs],
            sum(_bytes(one) for one in outputs),
        )


def _options(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Stride and groups of a convolution, by the names of its schema."""
    names = [argument.name for argument in _schema(func).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found: dict[str, tuple[int, ...]] = {}
    for name in ("stride", "groups"):
        value = given.get(name)
        if isinstance(value, int):
            found[name] = (value,)
        elif isinstance(value, list | tuple) and all(isinstance(one, int) for one in value):
            found[name] = tuple(value)
    return found


def _schema(func: Any) -> Any:
    return func._schema  # noqa: SLF001  torch has no other word for what an operator takes and changes


def _storage(tensor: Tensor) -> int:
    return int(_weak(tensor).cdata)


def _weak(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _bytes(tensor: Tensor) -> int:
    """Of its own elements: an expanded dimension is there once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= 1 if stride == 0 else size
    return elements * tensor.element_size()


def _where(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
