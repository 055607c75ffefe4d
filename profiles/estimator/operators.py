"""From torch's operators to `Work`: which class of records an operator belongs to, and how near it is to it.

`RECORDED`: records of this very operator. `ALIKE`: another operator moves the same bytes in the same way, or the
convolution is a matrix product for the GPU (every one that is not 3 x 3 with stride 1). `ROOFLINE`: no record is like it;
its time is its bytes at the bandwidth that elementwise records reach. `FREE`: only the host does anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from fabric.errors import ProfileError
from profiles.estimator.graph import OperatorCall
from profiles.estimator.work import (
    OTHER,
    Work,
    convolution_work,
    elementwise_work,
    matrix_work,
    memory_work,
    square_side,
)

Basis = Literal["recorded", "alike", "roofline", "free"]


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """What a call asks of the GPU: nothing (`FREE`), or one or more pieces one after another.

    A fused attention is two products without what lies between them; it is one launch.
    """

    call: int
    pieces: tuple[Work, ...]
    basis: Basis
    launches: int = 1


_Give = Callable[[OperatorCall], tuple[tuple[Work, ...], Basis]]

_EXACT: Final[Mapping[str, str]] = {
    "add": "add", "add_": "add", "mul": "mul", "mul_": "mul", "div": "div", "div_": "div", "pow": "pow",
    "relu": "relu", "relu_": "relu", "gelu": "gelu", "tanh": "tanh",
}  # fmt: skip
_LIKE: Final[Mapping[str, str]] = {
    "sub": "add", "sub_": "add", "rsub": "add", "maximum": "add", "minimum": "add", "where": "add",
    "masked_fill": "add", "masked_fill_": "add", "hardtanh": "relu", "hardtanh_": "relu", "clamp": "relu",
    "clamp_": "relu", "neg": "relu", "abs": "relu", "sqrt": "relu", "rsqrt": "relu", "sigmoid": "tanh",
    "sigmoid_": "tanh", "silu": "tanh", "silu_": "tanh", "hardswish": "relu", "hardswish_": "relu",
    "hardsigmoid": "relu", "exp": "tanh", "sin": "tanh", "cos": "tanh", "batch_norm": "mul",
    "leaky_relu": "relu", "leaky_relu_": "relu", "elu": "tanh", "mish": "gelu",
}  # fmt: skip
_ATTENTION: Final = frozenset({
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
})  # fmt: skip
FREE: Final = frozenset({
    "view", "_unsafe_view", "reshape_alias", "transpose", "t", "permute", "expand", "expand_as", "unsqueeze", "squeeze",
    "select", "slice", "split", "split_with_sizes", "chunk", "unbind", "narrow", "alias", "detach", "detach_", "unfold",
    "as_strided", "flatten", "dropout", "dropout_", "feature_dropout", "lift_fresh", "device", "_to_cpu", "empty",
    "empty_like", "new_empty", "diagonal", "view_as", "movedim", "numpy_T", "mT", "T", "swapaxes", "unflatten",
    "alpha_dropout", "real", "imag", "is_same_size", "sym_size", "sym_stride", "sym_numel", "dim", "layout", "dtype",
})  # fmt: skip


def work_of(calls: Sequence[OperatorCall]) -> list[OperatorWork]:
    """The work of every call, in order. Raises ProfileError for arithmetic that is not of float32."""
    return [_work_of(index, call) for index, call in enumerate(calls)]


def _work_of(index: int, call: OperatorCall) -> OperatorWork:
    if call.name in FREE or not call.outputs or not any(math.prod(shape) for shape in call.outputs):
        return OperatorWork(index, (), "free", 0)
    give = _HEAVY.get(call.name)
    if give is None and call.name in _ATTENTION:
        give = _attention
    if give is not None:
        if call.is_half:
            raise ProfileError(
                f"operator {call.name} computes in half precision, but all kernel records are of float32: nothing "
                "is known of its run time; measure it, or estimate the model in float32"
            )
        pieces, basis = give(call)
        return OperatorWork(index, pieces, basis)
    op = _EXACT.get(call.name) or _LIKE.get(call.name)
    if op is None:
        return OperatorWork(index, (_moved(call, OTHER),), "roofline")
    return OperatorWork(index, (_moved(call, op),), "recorded" if call.name in _EXACT else "alike")


def _moved(call: OperatorCall, op: str) -> Work:
    out = math.prod(call.outputs[0])
    given = sum(math.prod(shape) for shape in call.inputs)
    return memory_work(given, out, call.size_bytes, op)


def _linear(call: OperatorCall) -> tuple[tuple[Work, ...], Basis]:
    """Input [..., K], weight [N, K], bias [N] or nothing."""
    *rows, inner = call.inputs[0]
    columns = call.inputs[1][0]
    bias = len(call.inputs) > 2
    return (matrix_work("linear", 1, math.prod(rows), columns, inner, has_bias=bias),), "recorded"


def _addmm(call: OperatorCall) -> tuple[tuple[Work, ...], Basis]:
    (rows, inner), (_, columns) = call.inputs[-2:]
    return (matrix_work("linear", 1, rows, columns, inner, has_bias=len(call.inputs) > 2),), "recorded"


def _bmm(call: OperatorCall) -> tuple[tuple[Work, ...], Basis]:
    (batch, rows, inner), (_, _, columns) = call.inputs[-2:]
    return (matrix_work("bmm", batch, rows, columns, inner),), "recorded"


def _convolution(call: OperatorCall) -> tuple[tuple[Work, ...], Basis]:
    """Input [B, C, spatial ...], weight [out, in / groups, window ...], NCHW."""
    (batch, channels_in, *space), (channels_out, _, *window) = call.inputs[:2]
    (groups,) = call.options.get("groups", (1,))
    _, _, *out_space = call.outputs[0]
    stride = call.options.get("stride", (1,))
    if groups > 1 and groups == channels_in:  # depthwise: a few products an element, bounded by memory
        return (_moved(call, OTHER),), "roofline"
    if groups == 1 and window == [3, 3] and set(stride) == {1} and space == out_space:
        side = square_side(*space)
        return (convolution_work(batch, channels_in, channels_out, side),), "recorded"
    points = batch * math.prod(out_space)
    inner = channels_in // groups * math.prod(window)
    if groups > 1:
        return (matrix_work("bmm", groups, points, channels_out // groups, inner),), "alike"
    return (matrix_work("linear", 1, points, channels_out, inner),), "alike"


def _rows(op: str) -> _Give:
    def give(call: OperatorCall) -> tuple[tuple[Work, ...], Basis]:
        *rows, columns = call.inputs[0]
        return (elementwise_work(op, math.prod(rows), columns, 1),), "recorded"

    return give


def _attention(call: OperatorCall) -> tuple[tuple[Work, ...], Basis]:
    """query, key and value [..., tokens, width]: both products, nothing of the scores is written."""
    (*heads, rows, width), (*_, columns, _), (*_, value_width) = call.inputs[:3]
    batch = math.prod(heads)
    return (
        matrix_work("bmm", batch, rows, columns, width),
        matrix_work("bmm", batch, rows, value_width, columns),
    ), "alike"


_HEAVY: Final[Mapping[str, _Give]] = {
    "linear": _linear,
    "addmm": _addmm,
    "mm": _addmm,
    "bmm": _bmm,
    "baddbmm": _bmm,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convolution": _convolution,
    "softmax": _rows("softmax"),
    "_softmax": _rows("softmax"),
    "layer_norm": _rows("ln"),
    "native_layer_norm": _rows("ln"),
}
