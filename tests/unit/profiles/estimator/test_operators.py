"""Which records an operator belongs to."""

from __future__ import annotations

import pytest

from fabric.errors import ProfileError
from profiles.estimator.graph import OperatorCall, Shape
from profiles.estimator.operators import FREE, work_of


def call(
    name: str, inputs: tuple[Shape, ...], output: Shape, *, is_half: bool = False, **options: int
) -> OperatorCall:
    return OperatorCall(
        name, inputs, (output,), 4, {key: (value,) for key, value in options.items()}, (), is_half
    )


def conv(window: int, stride: int, groups: int, side: int = 56, out_side: int | None = None) -> OperatorCall:
    out = side // stride if out_side is None else out_side
    return call(
        "conv2d", ((4, 64, side, side), (64, 64 // groups, window, window)), (4, 64, out, out),
        stride=stride, groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("convolution", "op", "dims", "basis"),
    [
        (conv(3, 1, 1), "conv", (4, 64, 64, 56), "recorded"),
        (conv(3, 2, 1), "linear", (1, 4 * 28 * 28, 64, 9 * 64), "alike"),
        (conv(3, 1, 1, out_side=54), "linear", (1, 4 * 54 * 54, 64, 9 * 64), "alike"),  # no padding
        (conv(1, 1, 1), "linear", (1, 4 * 56 * 56, 64, 64), "alike"),
        (conv(3, 1, 32), "bmm", (32, 4 * 56 * 56, 2, 9 * 2), "alike"),
        (conv(3, 1, 64), "other", (1, 4 * 64 * 56 * 56, 1, 1), "roofline"),  # depthwise: bound by memory
    ],
)
def test_a_convolution_is_what_its_kernels_are(
    convolution: OperatorCall, op: str, dims: tuple[int, ...], basis: str
) -> None:
    (work,) = work_of([convolution])
    (piece,) = work.pieces
    assert (piece.op, piece.dims, work.basis) == (op, dims, basis)


def test_a_matrix_product_has_its_operations_and_bytes() -> None:
    (work,) = work_of([call("linear", ((4, 512, 768), (3072, 768), (3072,)), (4, 512, 3072))])
    (piece,) = work.pieces
    assert piece.dims == (1, 2048, 3072, 768)
    assert piece.flops == 2 * 2048 * 3072 * 768
    assert piece.size_bytes == 4 * (2048 * 768 + 768 * 3072 + 3072 + 2048 * 3072)


def test_a_fused_attention_is_two_products_of_one_launch() -> None:
    heads: Shape = (2, 12, 128, 64)
    (work,) = work_of([call("scaled_dot_product_attention", (heads, heads, heads), heads)])
    assert [(piece.op, piece.dims) for piece in work.pieces] == [
        ("bmm", (24, 128, 128, 64)),
        ("bmm", (24, 128, 64, 128)),
    ]
    assert (work.basis, work.launches) == ("alike", 1)


def test_what_only_changes_shapes_asks_nothing() -> None:
    works = work_of([call(name, ((4, 4),), (4, 4)) for name in sorted(FREE)])
    assert all(work.pieces == () and work.basis == "free" for work in works)


def test_an_unknown_operator_falls_back_to_the_roofline_and_is_counted() -> None:
    (work,) = work_of([call("my_new_thing", ((4, 4),), (4, 4))])
    assert (work.basis, work.pieces[0].op, work.launches) == ("roofline", "other", 1)


def test_half_precision_is_refused_where_it_would_be_computed_with() -> None:
    with pytest.raises(ProfileError, match="float32"):
        work_of([call("linear", ((4, 8), (8, 8)), (4, 8), is_half=True)])
