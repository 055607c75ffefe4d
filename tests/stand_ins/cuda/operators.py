"""Stands in for CUDA in a CPU build of torch: tensors that say `cuda:0` and lie in the host's memory.

Every operator is registered for CUDA, and computes on the CPU with the same memory. A tensor changes sides through DLPack, whose device
is overwritten on the way: so torch itself takes the tensors for a GPU's, in every thread, and what mixes them with the host's
is refused as on a GPU: an operator with both, `numpy()`, a `.item()` in a capture, a copy that a graph cannot hold.

Not imitated: times (only a share makes them longer), kernels that run beside the host or beside each other, how torch's allocator
rounds and keeps memory, backward passes, NCCL, and compiled kernels (Triton). Memory is what tensors hold.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tests.stand_ins.cuda import gpus
from tests.stand_ins.cuda.streams import current_stream, spoil

_StorageWeakRef: Any = reductions.StorageWeakRef  # which torch does not type
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

# What they give depends on values, which the host has to look at.
_LOOK_AT_VALUES = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "equal",
    "is_nonzero",
    "repeat_interleave",
}
# Their indices may lie on the host; those that are masks are looked at.
_TAKE_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Made of others, of which CUDA has its own.
_WHOLE = {"lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"}
_KEPT = {"_fused_sdp_choice": 0}  # attention out of plain operators: the fused ones have other names on CUDA


class Tracer:
    """Kernels since it was started: name, start and duration in ms, elements written."""

    active: Tracer | None = None

    def __init__(self) -> None:
        self.kernels: list[tuple[str, float, float, int]] = []


class _Memory:
    """What the tensors of a GPU hold. The most is seen where somebody asks, and at every 64th tensor."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: dict[int, list[tuple[Any, int]]] = {}
        self._most: dict[int, int] = {}
        self._counted = 0

    def add(self, number: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._held.setdefault(number, []).append((_StorageWeakRef(storage), storage.nbytes()))
            self._counted += 1
            if self._counted % 64 == 0:
                self.held(number)

    def held(self, number: int) -> int:
        with self._lock:
            self._held[number] = [one for one in self._held.get(number, []) if not one[0].expired()]
            held = sum(size for _, size in self._held[number])
            self._most[number] = max(held, self._most.get(number, 0))
            return held

    def most(self, number: int) -> int:
        self.held(number)
        return self._most[number]

    def forget_most(self, number: int) -> None:
        self._most[number] = 0


MEMORY = _Memory()
_pinned: dict[int, Any] = {}


def moved(tensor: Tensor, kind: int, number: int = 0) -> Tensor:
    """The same memory, as that device's tensor."""
    capsule = torch._C._to_dlpack(tensor)
    device = (ctypes.c_int32 * 2).from_address(_capsule_pointer(capsule, b"dltensor") + 8)
    device[0], device[1] = kind, number
    return torch._C._from_dlpack(capsule)


def on_host(tensor: Tensor) -> Tensor:
    return moved(tensor, _DLPACK_CPU)


def pin(tensor: Tensor) -> Tensor:
    """Remembered as pinned, with all its views."""
    for address in [address for address, storage in _pinned.items() if storage.expired()]:
        del _pinned[address]
    storage = tensor.untyped_storage()
    _pinned[storage.data_ptr()] = _StorageWeakRef(storage)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    if tensor.is_cuda:
        return False
    found = _pinned.get(tensor.untyped_storage().data_ptr())
    return found is not None and not bool(found.expired())


class _Call:
    """The arguments of one call with their memory on the host, and what that says of the call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.numbers: set[int] = set()
        self.has_host = False
        self.storages: set[int] = set()
        self.args = [self._taken(one) for one in args]
        self.kwargs = {key: self._taken(one) for key, one in kwargs.items() if key != "pin_memory"}
        asked = kwargs.get("device")
        self.gives_host = asked is not None and asked.type != "cuda"
        if asked is not None and asked.type == "cuda":
            self.number = gpus.device(asked).index
        else:
            self.number = next(iter(self.numbers), gpus.current())

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.is_cuda:
                self.numbers.add(value.device.index)
                value = on_host(value)
            elif value.ndim:
                self.has_host = True
            self.storages.add(value.untyped_storage().data_ptr())
            return value
        if isinstance(value, list | tuple):
            return [self._taken(one) for one in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value


def run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_view: bool) -> Any:
    """One call of an operator with a tensor on a GPU, or that makes one. A view of memory is nothing for a stream to do."""
    gpus.start()
    gpus.check()
    base, _, overload = name.partition(".")
    if base in _KEPT:
        return _KEPT[base]
    call = _Call(args, kwargs)
    if base == "copy_":
        return _copy(args[0], args[1], is_waited_for=not (len(args) > 2 and args[2]))
    if base == "_to_copy" and not args[0].is_cuda:
        form = kwargs.get("memory_format") or torch.preserve_format
        there = torch.empty_like(args[0], dtype=kwargs.get("dtype"), memory_format=form)
        MEMORY.add(call.number, there)
        return _copy(
            moved(there, _DLPACK_CUDA, call.number), args[0], is_waited_for=not kwargs.get("non_blocking")
        )
    if (call.has_host and base not in _TAKE_HOST_INDICES) or len(call.numbers) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices in aten::{name}"
        )
    stream = current_stream(call.number)
    if not is_view:
        stream.do()
    if stream.graph is not None and (base in _LOOK_AT_VALUES or call.gives_host or _has_mask(base, call)):
        stream.graph.refuse()
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
    if base == "as_strided" and len(call.args) > 3 and call.args[3] is not None:
        call.args[3] -= args[0].storage_offset()  # the memory on the host begins where the tensor does
    repeat = partial(_results, operator, call)
    began_ms = time.perf_counter() * 1e3
    try:
        results = repeat()
    except IndexError as error:
        if "out of" in str(error):
            raise gpus.breaks() from None
        raise
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise torch.OutOfMemoryError(f"CUDA out of memory. {error}") from None
        raise
    made = [
        (place, one)
        for place, one in enumerate(results)
        if isinstance(one, Tensor)
        and (not one.numel() or one.untyped_storage().data_ptr() not in call.storages)
    ]
    if made or operator._schema.is_mutable:
        if Tracer.active is not None:
            written = sum(one.numel() for _, one in made)
            Tracer.active.kernels.append((name, began_ms, time.perf_counter() * 1e3 - began_ms, written))
        if stream.graph is not None:
            stream.graph.record(repeat, made)
    return _given(operator, args, kwargs, results, call, {place for place, _ in made})


def _has_mask(base: str, call: _Call) -> bool:
    return base in _TAKE_HOST_INDICES and any(
        one is not None and one.dtype in (torch.bool, torch.uint8) for one in call.args[1]
    )


def _results(operator: Any, call: _Call) -> list[Any]:
    """Flat; a list of tensors is told by the operator's schema."""
    result = operator(*call.args, **call.kwargs)
    return list(result) if isinstance(result, list | tuple) else [result]


def _given(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: list[Any],
    call: _Call,
    made: set[int],
) -> Any:
    """What the caller gets: of an operator that writes into its arguments these very ones."""
    returns = operator._schema.returns
    if returns and all(one.alias_info is not None and one.alias_info.is_write for one in returns):
        written = [args[0]] if operator._schema.name.endswith("_") else _outs(operator, kwargs)
        for own, result in zip(written, results, strict=False):
            if own.shape != result.shape:
                raise NotImplementedError(f"the stand-in of CUDA changes no tensor's shape: {operator}")
        return written[0] if len(returns) == 1 else tuple(written)
    if not returns:
        return None
    if call.gives_host:
        given = results
    else:
        for place in made:
            MEMORY.add(call.number, results[place])
        given = [
            _on_gpu(one, call.number, None if place in made else args[0]) if isinstance(one, Tensor) else one
            for place, one in enumerate(results)
        ]
    if len(returns) > 1:
        return tuple(given)
    return given if str(returns[0].type).startswith("List") else given[0]


def _on_gpu(tensor: Tensor, number: int, base: Tensor | None) -> Tensor:
    """A view of a `base` is made for inference where that was, whatever is made now."""
    is_inference = torch.is_inference_mode_enabled() if base is None else base.is_inference()
    with torch.inference_mode(is_inference):
        return moved(tensor, _DLPACK_CUDA, number)


def _outs(operator: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    return [kwargs[one.name] for one in operator._schema.arguments if one.is_out]


def _copy(into: Tensor, source: Tensor, *, is_waited_for: bool) -> Tensor:
    """Between the host and a GPU, or on one. What need not wait is put off: see `streams.py`."""
    stream = current_stream((into if into.is_cuda else source).device)
    host = next((one for one in (into, source) if not one.is_cuda), None)
    target, origin = (on_host(one) if one.is_cuda else one for one in (into, source))
    copy = partial(_copied, target, origin)
    if stream.graph is not None:
        if host is not None and not is_pinned(host):
            stream.graph.refuse()
        copy()
        stream.graph.record(copy, [])
        return into
    if host is not None and is_pinned(host) and not is_waited_for:
        if not into.is_cuda:
            spoil(target)
        stream.put(copy)
        return into
    stream.do()
    copy()
    return into


def _copied(target: Tensor, origin: Tensor) -> list[Any]:
    with torch.inference_mode():
        target.copy_(origin)
    return []


def register() -> object:
    """Every operator that torch does not make of others.

    Device guards do nothing, as those of the CPU.
    """
    guards = (ctypes.c_void_p * 2).in_dll(
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")),
        "_ZN3c104impl26device_guard_impl_registryE",  # by kind of device: CPU, CUDA
    )
    guards[1] = guards[0]
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are there already, and cannot run
        for name in torch._C._dispatch_get_all_op_names():
            space, _, rest = name.partition("::")
            if space == "aten" and (rest in _WHOLE or not _is_common(name)):
                library.impl(rest, _registered(rest), "CUDA")
    return library


def _is_common(name: str) -> bool:
    """Whether torch does it the same way on all devices: out of other operators, or by looking at the same memory in another way."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") or (
        has_kernel(name, "CompositeExplicitAutograd") and _is_view(name)
    )


def _is_view(name: str) -> bool:
    base, _, overload = name.partition(".")
    returns = torch._C._get_schema(base, overload).returns
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def _registered(name: str) -> Callable[..., Any]:
    is_view = _is_view(f"aten::{name}")

    def operator(*args: Any, **kwargs: Any) -> Any:
        return run(name, args, kwargs, is_view=is_view)

    return operator
