from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import Internal, InvalidInput, ModelNotFound, TooLarge
from fabric.ids import ModelId
from fabric.messages import ImagePreprocess, ModelInfo, TensorInfo
from roles.gateway.inference import (
    ROWS_MAX,
    Inference,
    InputTensor,
    OutputWanted,
    budget_of,
    check_version,
    outputs_of,
    priority_of,
    rows_of,
)

ANY = Inference("any", [])
TWO = ModelInfo(
    ModelId("two"), 25.0, (TensorInfo("a", "float32", (3,)), TensorInfo("b", "int64", (-1, 2))), replicas=1
)
PICTURES = ModelInfo(
    ModelId("pictures"),
    25.0,
    (TensorInfo("image", "float32", (3, 8, 8)),),
    image=ImagePreprocess("image", 8, 8, (0, 0, 0), (1, 1, 1)),
)


def of(name: str, *shape: int) -> InputTensor:
    return InputTensor(name, shape, np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape))


def test_declared_shapes_are_one_request() -> None:
    rows = rows_of(TWO, [of("a", 3), of("b", 5, 2)])
    assert not rows.is_stacked
    assert [{name: one.shape for name, one in row.items()} for row in rows.rows] == [{"a": (3,), "b": (5, 2)}]


def test_one_axis_more_is_a_request_for_each_row_and_answers_are_stacked() -> None:
    rows = rows_of(TWO, [of("a", 4, 3), of("b", 4, 5, 2)])
    assert rows.is_stacked
    assert len(rows.rows) == 4
    np.testing.assert_array_equal(rows.rows[2]["a"], [6, 7, 8])
    stacked = outputs_of(ANY, [{"y": np.full(2, at)} for at in range(4)], is_stacked=True)
    assert stacked["y"].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(
    ("info", "shapes"),
    [
        (TWO, {"a": (4, 3), "b": (5, 5, 2)}),
        (TWO, {"a": (4, 3), "b": (5, 2)}),
        (TWO, {"a": (4, 3), "c": (4, 5, 2)}),
        (TWO, {"a": (4, 4, 3)}),
        (None, {"a": (4, 3)}),
        (ModelInfo(ModelId("any"), 25.0), {"a": (4, 3)}),
    ],
)
def test_all_else_goes_to_the_frontend_as_it_came(info: ModelInfo | None, shapes: Any) -> None:
    rows = rows_of(info, [of(name, *shape) for name, shape in shapes.items()])
    assert not rows.is_stacked
    assert {name: one.shape for name, one in rows.rows[0].items()} == shapes


def test_a_picture_is_one_element_of_bytes() -> None:
    single = rows_of(PICTURES, [InputTensor("image", (1,), (b"\x89PNG",))])
    assert not single.is_stacked
    assert single.rows[0]["image"].tobytes() == b"\x89PNG"
    several = rows_of(PICTURES, [InputTensor("image", (2, 1), (b"\x89PNG", b""))])
    assert several.is_stacked
    assert [row["image"].tobytes() for row in several.rows] == [b"\x89PNG", b""]
    with pytest.raises(InvalidInput, match=r"shape \[1\], or \[rows, 1\]"):
        rows_of(PICTURES, [InputTensor("image", (2,), (b"a", b"b"))])
    with pytest.raises(InvalidInput, match=r"shape \[1\], or \[rows, 1\]"):
        rows_of(PICTURES, [InputTensor("image", (1, 2), (b"a", b"b"))])


@pytest.mark.parametrize("info", [None, ModelInfo(ModelId("any"), 25.0), TWO])
@pytest.mark.parametrize("count", [0, 2])
def test_files_that_are_not_one_request_each_are_never_left_out(info: ModelInfo | None, count: int) -> None:
    """Only of a model that says what it takes is the first axis known to be the batch's."""
    with pytest.raises(InvalidInput, match=f"{count} elements of BYTES"):
        rows_of(info, [InputTensor("a", (count, 1), (b"file",) * count), of("b", 4, 5, 2)])


def test_rows_are_bounded_and_there_is_one_at_least() -> None:
    with pytest.raises(TooLarge, match=str(ROWS_MAX)):
        rows_of(TWO, [of("a", ROWS_MAX + 1, 3), of("b", ROWS_MAX + 1, 5, 2)])
    with pytest.raises(InvalidInput):
        rows_of(TWO, [of("a", 0, 3), of("b", 0, 5, 2)])
    with pytest.raises(InvalidInput):
        rows_of(TWO, [of("a", 3), of("a", 3)])


def test_rows_that_cannot_be_stacked_are_said_to() -> None:
    with pytest.raises(Internal, match="one by one"):
        outputs_of(ANY, [{"y": np.zeros(1)}, {"y": np.zeros(2)}], is_stacked=True)
    for rows in (
        [{"0": np.zeros(1)}, {"0": np.zeros(1), "1": np.zeros(1)}],
        [{"0": np.zeros(1), "1": np.zeros(1)}, {"0": np.zeros(1)}],
    ):
        with pytest.raises(Internal, match="one by one"):
            outputs_of(ANY, rows, is_stacked=True)


def test_of_rows_with_different_outputs_those_that_all_have_are_asked_for_by_name() -> None:
    rows = [{"0": np.zeros(1)}, {"0": np.ones(1), "1": np.zeros(2)}]

    def asked_for(name: str) -> Inference:
        return replace(ANY, outputs=[OutputWanted(name, is_binary=False)])

    stacked = outputs_of(asked_for("0"), rows, is_stacked=True)
    assert {name: array.tolist() for name, array in stacked.items()} == {"0": [[0], [1]]}
    with pytest.raises(Internal, match="name outputs that all have"):
        outputs_of(asked_for("1"), rows, is_stacked=True)
    with pytest.raises(InvalidInput, match="no output '2'; it has 0, 1"):
        outputs_of(asked_for("2"), rows, is_stacked=True)


@pytest.mark.parametrize(
    ("parameters", "budget_ms"),
    [
        ({}, None),
        ({"timeout": 0}, None),
        ({"timeout": 25_000}, 25.0),
        ({"deadline_ms": 30}, 30.0),
        ({"deadline_ms": 0.5, "timeout": 25_000}, 0.5),
        ({"deadline_ms": 30, "timeout": 25_000}, 25.0),
    ],
)
def test_a_deadline_is_ms_and_a_timeout_us(parameters: Any, budget_ms: float | None) -> None:
    assert budget_of(parameters) == budget_ms


@pytest.mark.parametrize("value", [-1, "25", True, float("nan"), float("inf"), 1e300, 10**400, [1]])
@pytest.mark.parametrize("name", ["deadline_ms", "timeout"])
def test_a_deadline_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidInput):
        budget_of({name: value})


def test_a_deadline_of_0_is_refused() -> None:
    with pytest.raises(InvalidInput):
        budget_of({"deadline_ms": 0})


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_tritons_priorities_keep_their_order(one: int, other: int) -> None:
    ours, theirs = priority_of({"priority": one}), priority_of({"priority": other})
    assert ours is not None
    assert theirs is not None
    assert 0 <= ours <= 9
    assert (ours >= theirs) if one <= other else (ours <= theirs)


def test_the_ends_of_tritons_priorities() -> None:
    asked = [priority_of({"priority": one}) for one in (0, 1, 2, 9, 10, 11, 1_000)]
    assert asked == [None, 9, 8, 1, 0, 0, 0]
    assert priority_of({}) is None
    for wrong in (-1, 1.5, "1", True):
        with pytest.raises(InvalidInput):
            priority_of({"priority": wrong})


def test_there_is_one_version() -> None:
    check_version("m", "")
    check_version("m", "1")
    with pytest.raises(ModelNotFound):
        check_version("m", "2")
