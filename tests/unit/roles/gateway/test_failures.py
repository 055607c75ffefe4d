from __future__ import annotations

import json

import grpc
import pytest

from fabric.errors import (
    REQUEST_ERRORS,
    NoReplica,
    Overloaded,
    PeerLost,
    RequestError,
    Unauthorised,
    nothing_ready,
    request_error,
)
from roles.gateway import failures
from roles.gateway.failures import GRPC_STATUS, STATUS, NoToken, failure_of
from roles.gateway.http.messages import REASONS, head_of, retry_headers
from roles.gateway.http.protocol_v2 import failed
from roles.gateway.rpc.messages import ModelStreamInferResponse


@pytest.mark.parametrize("code", sorted(REQUEST_ERRORS))
def test_every_error_of_the_sdk_has_a_status_and_keeps_its_code(code: str) -> None:
    error = request_error(code, "so it is")
    failure = failure_of(error)
    assert failure.code == ("PeerLost" if code == "Unauthorised" else code)
    assert failure.retryable == (error.retryable or code == "Unauthorised")
    assert failure.status in REASONS
    assert (failure.status == 503) == (failure.retry_after_s is not None)


def test_every_code_that_can_be_said_has_a_status_and_every_status_its_words() -> None:
    said = {
        getattr(failures, name).code for name in dir(failures) if hasattr(getattr(failures, name), "code")
    } - {None}
    assert {code for code in said if isinstance(code, str)} <= set(STATUS)
    assert set(STATUS.values()) | {200} == set(REASONS)
    assert all(hasattr(grpc.StatusCode, name) for name in GRPC_STATUS.values())


def test_retry_after_is_in_whole_seconds_and_never_too_early() -> None:
    failure = failure_of(Overloaded("full", 1_200.0))
    assert failure.as_plain() == {
        "error": "full",
        "code": "Overloaded",
        "retryable": True,
        "retry_after_ms": 1_200.0,
    }
    assert retry_headers(failure) == [("Retry-After", "2")]
    assert failure_of(Overloaded("full", 3.0)).retry_after_s == 1
    starting = failure_of(NoReplica(nothing_ready("echo"), 11_400.0))
    assert (starting.retry_after_s, starting.as_plain()["retry_after_ms"]) == (12, 11_400.0)


def test_our_own_key_is_not_the_clients_fault_and_a_missing_token_is() -> None:
    assert failure_of(Unauthorised("no such key")).status == 503
    failure = failure_of(NoToken("give a token"))
    assert failure.status == 401
    assert retry_headers(failure) == [("WWW-Authenticate", 'Bearer realm="tenuto"')]


def test_a_defect_says_nothing_of_the_inside() -> None:
    assert "secret" not in failure_of(ValueError("secret")).reason
    assert failure_of(PeerLost("no frontend answers")).status == 503


def test_a_head_cannot_be_split_by_what_is_in_it() -> None:
    reply = failed(failure_of(Overloaded("a\r\nSet-Cookie: b")))
    assert b"Set-Cookie" not in head_of(reply, is_last=False)


@pytest.mark.parametrize(
    "error",
    [
        *(request_error(code, "no \ud800.json here") for code in sorted(REQUEST_ERRORS)),
        *(
            made("no \ud800.json here")
            for made in vars(failures).values()
            if isinstance(made, type) and issubclass(made, RequestError) and made is not RequestError
        ),
        PeerLost("no \ud800.json here"),
    ],
    ids=lambda error: type(error).__name__.encode(errors="replace").decode(),
)
def test_half_a_character_in_a_reason_goes_out_written_as_python_does(error: Exception) -> None:
    """In a callback an error ends the gateway, so there must be none."""
    failure = failure_of(error)
    assert "\\ud800" in json.loads(bytes(failed(failure).body[0]))["error"]
    assert "\\ud800" in ModelStreamInferResponse(error_message=failure.reason).error_message
