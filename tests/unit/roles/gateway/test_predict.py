from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.client import InferResult
from fabric.errors import InvalidInput, TooLarge
from fabric.ids import ModelId
from fabric.messages import Ledger, ModelInfo, TensorInfo
from roles.gateway.http.predict import read_predict, write_predict
from roles.gateway.http.protocol_v2 import write_json
from roles.gateway.tensors import VALUES_MAX
from tests.unit.roles.gateway.test_inference import PICTURES, TWO

ONE = ModelInfo(ModelId("one"), 25.0, (TensorInfo("x", "int64", (2,)),))


def asked(document: Any, info: ModelInfo | None = ONE, query: str = "") -> Any:
    return read_predict("one", json.dumps(document).encode(), "application/json", query, info)


@pytest.mark.parametrize("document", [{"inputs": [1, 2]}, {"inputs": {"x": [1, 2]}}])
def test_one_item(document: Any) -> None:
    inference, rows = asked(document)
    assert not rows.is_stacked
    assert rows.rows[0]["x"].tolist() == [1, 2]
    assert rows.rows[0]["x"].dtype == np.int64
    assert (inference.budget_ms, inference.priority) == (None, None)


@pytest.mark.parametrize(
    "document", [{"instances": [[1, 2], [3, 4]]}, {"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}]
)
def test_several_items(document: Any) -> None:
    _, rows = asked(document)
    assert rows.is_stacked
    assert [row["x"].tolist() for row in rows.rows] == [[1, 2], [3, 4]]


def test_a_picture_as_its_file() -> None:
    for content_type in ("image/png", "image/jpeg", "application/octet-stream"):
        inference, rows = read_predict(
            "pictures", b"\x89PNG", content_type, "deadline_ms=30&priority=1", PICTURES
        )
        assert rows.rows[0]["image"].tobytes() == b"\x89PNG"
        assert (inference.budget_ms, inference.priority) == (30.0, 9)
    text = base64.b64encode(b"\x89PNG").decode()
    _, rows = asked({"inputs": {"b64": text}}, PICTURES)
    assert rows.rows[0]["image"].tobytes() == b"\x89PNG"


def test_a_model_that_declares_nothing_gets_float32() -> None:
    _, rows = asked({"inputs": [[1, 2]]}, None)
    assert rows.rows[0]["input"].dtype == np.float32


def test_null_for_what_may_be_left_out_is_as_if_it_was() -> None:
    nulls = {"instances": None, "id": None, "deadline_ms": None, "priority": None}
    inference, rows = asked({"inputs": [1, 2], **nulls}, query="deadline_ms=30&priority=1")
    assert (inference.request_id, inference.budget_ms, inference.priority) == ("", 30.0, 9)
    assert not rows.is_stacked


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"inputs": None},
        {"input": [1, 2]},
        {"inputs": [1, 2], "instances": [[1, 2]]},
        {"instances": []},
        {"instances": {"x": 1}},
        {"inputs": [1.5, 2]},
        {"inputs": {"b64": "§"}},
        {"inputs": {"x": {"b64": "", "c": 1}}},
        {"inputs": [1, 2], "id": 7},
        {"inputs": [1, 2], "deadline_ms": -1},
    ],
)
def test_what_is_wrong_is_said(document: Any) -> None:
    with pytest.raises(InvalidInput, match=r".{10}"):
        asked(document)


@pytest.mark.parametrize("query", ["deadline_ms=soon", "dealine_ms=3", "priority=1.5", "a=b&" * 40, "%ff=1"])
def test_a_wrong_query_is_said(query: str) -> None:
    with pytest.raises(InvalidInput):
        asked({"inputs": [1, 2]}, query=query)


def test_which_of_several_inputs_must_be_said() -> None:
    with pytest.raises(InvalidInput, match="name each one"):
        asked({"inputs": [1, 2]}, TWO)


@given(
    st.binary(max_size=200),
    st.sampled_from(["application/json", "image/png", "", "text/plain"]),
    st.text(max_size=40),
)
def test_any_body_is_read_or_refused(body: bytes, content_type: str, query: str) -> None:
    with contextlib.suppress(InvalidInput, TooLarge):
        read_predict("one", body, content_type, query, ONE)


def test_the_answer_is_plain_json_with_its_ledger() -> None:
    inference, rows = asked({"inputs": [1, 2], "id": "7"})
    result = InferResult({"y": np.array([[1.5, np.nan]], np.float32)}, Ledger(gpu_ms=3.0))
    document = json.loads(write_json(write_predict(inference, [result], is_stacked=rows.is_stacked)))
    assert document["outputs"] == {"y": [[1.5, None]]}
    assert (document["model"], document["id"], document["ledger"]["gpu_ms"]) == ("one", "7", 3.0)


def test_an_answer_has_an_end() -> None:
    inference, rows = asked({"instances": [[1, 2], [1, 2]]})
    half = InferResult({"y": np.zeros(VALUES_MAX // 2 + 1, np.uint8)}, Ledger())
    with pytest.raises(TooLarge, match=r"ask .* for binary data"):
        write_predict(inference, [half, half], is_stacked=rows.is_stacked)


def test_a_model_that_takes_no_pictures_says_what_it_takes() -> None:
    reason = r"model 'one' takes no file for 'x': it takes int64 of shape \[2\]"
    with pytest.raises(InvalidInput, match=reason):
        read_predict("one", b"\x89PNG", "image/png", "", ONE)
    with pytest.raises(InvalidInput, match=reason):
        asked({"inputs": {"b64": base64.b64encode(b"\x89PNG").decode()}})


@pytest.mark.parametrize("deadline_ms", [-5, "soon", True])
def test_a_deadline_that_is_none_is_told_what_would_be(deadline_ms: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        asked({"inputs": [1, 2], "deadline_ms": deadline_ms})
    assert str(caught.value) == (
        f"deadline_ms is {deadline_ms!r}; it must be a number of ms, over 0 and at most 1,000,000,000"
    )


@pytest.mark.parametrize("rows", [1, 100])
def test_more_tensors_than_a_message_takes_are_not_even_made(rows: int) -> None:
    one = {str(at): 0 for at in range(4_200 // rows)}
    asked = {"inputs": one} if rows == 1 else {"instances": [one] * rows}
    with pytest.raises(InvalidInput, match="4200 tensors; one inference may have 4096"):
        read_predict("m", json.dumps(asked).encode(), "", "", None)


def test_a_content_type_has_no_case() -> None:
    for written in ("image/jpeg", "Image/JPEG", "APPLICATION/Octet-Stream"):
        _, rows = read_predict("m", b"\xff\xd8", written, "", None)
        assert rows.rows[0]["input"].tolist() == [0xFF, 0xD8]
