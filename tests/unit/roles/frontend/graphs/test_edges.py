"""The inputs of a stage without glue: by name, from what is before it or from the request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fabric.errors import Internal, InvalidInput
from fabric.link import NamedTensor
from roles.frontend.graphs.edges import plain_inputs

REQUEST = [NamedTensor("picture", np.arange(4.0))]


def outputs(**named: object) -> list[NamedTensor]:
    return [NamedTensor(name, np.asarray(value)) for name, value in named.items()]


def named(inputs: Sequence[NamedTensor]) -> dict[str, object]:
    return {tensor.name: tensor.array.tolist() for tensor in inputs}


def test_names_are_looked_for_before_the_stage_then_in_the_request() -> None:
    answers = [("detect", [outputs(boxes=[1, 2], picture=[9.0])])]
    (made,) = plain_inputs(answers, REQUEST, ["boxes", "picture"], 1, "")
    assert named(made) == {"boxes": [1, 2], "picture": [9.0]}
    (made,) = plain_inputs([("detect", [outputs(boxes=[1, 2])])], REQUEST, ["boxes", "picture"], 1, "")
    assert made[1] is REQUEST[0], "passed on as it is, wherever it lies"


def test_a_lone_output_is_the_input_that_has_no_other_name() -> None:
    (made,) = plain_inputs([("a", [outputs(features=[3.0])])], REQUEST, ["x"], 1, "")
    assert named(made) == {"x": [3.0]}


def test_a_model_that_declares_nothing_gets_what_is_before_it_or_else_the_request() -> None:
    made = plain_inputs([("a", [outputs(x=1, y=2)])], REQUEST, [], 2, "")
    assert [named(one) for one in made] == [{"x": 1, "y": 2}] * 2
    assert plain_inputs([], REQUEST, [], 1, "") == [REQUEST]


def test_a_number_says_how_many_follow() -> None:
    answers = [("a", [outputs(cars=3, x=[1.0])])]
    assert [named(one) for one in plain_inputs(answers, REQUEST, ["x"], None, "cars")] == [{"x": [1.0]}] * 3
    assert plain_inputs([("a", [outputs(cars=0)])], REQUEST, ["cars"], None, "cars") == []


def test_of_an_array_each_row_makes_one() -> None:
    answers = [("a", [outputs(crops=[[1.0, 2.0], [3.0, 4.0]], size=7)])]
    made = plain_inputs(answers, REQUEST, ["crops", "size"], None, "crops")
    assert [named(one) for one in made] == [
        {"crops": [1.0, 2.0], "size": 7},
        {"crops": [3.0, 4.0], "size": 7},
    ]
    assert [named(one) for one in plain_inputs(answers, REQUEST, [], None, "crops")] == [
        {"crops": [1.0, 2.0]},
        {"crops": [3.0, 4.0]},
    ]
    # Under another name, where only that one is open.
    assert named(plain_inputs(answers, REQUEST, ["image"], None, "crops")[1]) == {"image": [3.0, 4.0]}


def test_a_join_gets_all_answers_of_a_stage_one_over_the_other() -> None:
    answers = [("a", [outputs(x=[1.0])]), ("b", [outputs(y=[2.0]), outputs(y=[3.0])]), ("c", [])]
    (made,) = plain_inputs(answers, REQUEST, ["x", "y"], 1, "")
    assert named(made) == {"x": [1.0], "y": [[2.0], [3.0]]}


@pytest.mark.parametrize(
    ("answers", "names", "count", "source", "error", "message"),
    [
        ([("a", [outputs(x=1, y=2)])], ["x", "z"], 1, "", Internal, "'z' is neither an output before it"),
        ([], ["z"], 1, "", InvalidInput, "'z' is neither"),
        # What is an input by its own name is not another one too, such as that of a stage that was lost.
        (
            [("text", []), ("image", [outputs(image_vec=[1.0])])],
            ["text_vec", "image_vec"],
            1,
            "",
            Internal,
            "'text_vec' is neither an output before it .image_vec.",
        ),
        ([("a", [outputs(x=[1.0])])], ["x", "y"], 1, "", Internal, "'y' is neither an output before it"),
        ([("a", [outputs(x=[[1.0]], z=2)])], ["x", "y"], None, "x", Internal, "'y' is neither an output"),
        ([("a", [outputs(x=1)])], ["x"], None, "cars", Internal, "no output 'cars'.*there is x"),
        ([("a", [outputs(x=1.5)])], ["x"], None, "x", Internal, "how many requests follow, and is float64"),
        ([("a", [outputs(x=10_000)])], ["x"], None, "x", Internal, "asks for 10000 requests.*at most 64"),
        ([("a", [outputs(x=-1)])], ["x"], None, "x", Internal, "asks for -1 requests"),
        ([("a", [outputs(x=np.zeros(65))])], ["x"], None, "x", Internal, "asks for 65 requests"),
        ([("a", [outputs(x=1)]), ("b", [outputs(x=2)])], ["x"], 1, "", Internal, "several stages.*'x'"),
        (
            [("a", [outputs(x=[1]), outputs(x=[1, 2])])],
            ["x"],
            1,
            "",
            Internal,
            "answers of stage a are not alike",
        ),
    ],
)
def test_what_cannot_be_made_is_said(
    answers: list[tuple[str, list[list[NamedTensor]]]],
    names: list[str],
    count: int | None,
    source: str,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        plain_inputs(answers, REQUEST, names, count, source)
