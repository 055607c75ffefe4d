"""What became of a request that has no outputs, in the words of HTTP and gRPC.

`code` is the stable name that programs go by, the same as in the SDK (`fabric/errors.py`); those that only a gateway can say are here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabric.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidInput,
    ModelNotFound,
    NoReplica,
    Overloaded,
    PeerLost,
    RequestError,
    TooLarge,
    Unauthorised,
    WorkerLost,
)
from fabric.limits import written_out

RETRY_AFTER_MS: Final = 1_000.0
"""What a 503 says where nobody could tell how long it takes."""
PEER_LOST: Final = "PeerLost"


class Unsupported(RequestError):
    """A part of the protocol that this gateway does not do."""

    code = "Unsupported"


class NotFound(RequestError):
    """No such path."""

    code = "NotFound"


class MethodNotAllowed(RequestError):
    """That path, but not so. `allowed`: with which methods."""

    code = "MethodNotAllowed"

    def __init__(self, reason: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.allowed = tuple(allowed)


class TooSlow(RequestError):
    """The request did not come in time."""

    code = "TooSlow"


class HeaderTooLarge(RequestError):
    """The head of the request is over the limit."""

    code = "HeaderTooLarge"


class Refused(RequestError):
    """The cluster was asked for a change and did not make it, or may not be asked from here."""

    code = "Refused"


STATUS: Final = {
    InvalidInput.code: 400,
    Unauthorised.code: 401,
    Refused.code: 403,
    ModelNotFound.code: 404,
    NotFound.code: 404,
    MethodNotAllowed.code: 405,
    TooSlow.code: 408,
    TooLarge.code: 413,
    HeaderTooLarge.code: 431,
    Cancelled.code: 499,  # nginx's: the client has gone, nobody reads it
    Internal.code: 500,
    Unsupported.code: 501,
    Overloaded.code: 503,
    NoReplica.code: 503,
    WorkerLost.code: 503,
    PEER_LOST: 503,
    DeadlineExceeded.code: 504,
}
"""HTTP's status by code."""

GRPC_STATUS: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",  # not CANCELLED, which in a client looks like its own doing
    413: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""gRPC's by HTTP's."""


@dataclass(slots=True, frozen=True)
class Failure:
    """`retry_after_ms`: not sooner than that; None where asking again is of no use."""

    code: str
    reason: str
    retryable: bool = False
    retry_after_ms: float | None = None
    allowed: Sequence[str] = ()
    """HTTP's methods, where that is what was wrong."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", written_out(self.reason))

    @property
    def status(self) -> int:
        """HTTP's."""
        return STATUS[self.code]

    @property
    def grpc_status(self) -> str:
        """The name of gRPC's."""
        return GRPC_STATUS.get(self.status, "INTERNAL")

    @property
    def retry_after_s(self) -> int | None:
        """For the header of that name, which knows whole seconds only."""
        return None if self.retry_after_ms is None else max(1, math.ceil(self.retry_after_ms / 1e3))

    def as_plain(self) -> dict[str, Any]:
        """The body of an HTTP answer. Clients of the protocol read `error`."""
        plain: dict[str, Any] = {"error": self.reason, "code": self.code, "retryable": self.retryable}
        if self.retry_after_ms is not None:
            plain["retry_after_ms"] = self.retry_after_ms
        return plain


GONE: Final = Failure(Cancelled.code, "the client has gone")


def failure_of(error: BaseException) -> Failure:
    """What the client is told of an error of the SDK or of ours; nothing of what is not meant for strangers."""
    match error:
        case Unauthorised() if not isinstance(error, NoToken):
            # It is our key that a frontend did not let in: nothing that this client could mend.
            return Failure(PEER_LOST, f"the gateway is not let in: {error}", True, RETRY_AFTER_MS)
        case RequestError():
            retry_after_ms = error.retry_after_ms
            if STATUS.get(error.code) == STATUS[Overloaded.code] and retry_after_ms is None:
                retry_after_ms = RETRY_AFTER_MS
            code = error.code if error.code in STATUS else Internal.code
            allowed = error.allowed if isinstance(error, MethodNotAllowed) else ()
            return Failure(code, error.reason, error.retryable, retry_after_ms, allowed)
        case PeerLost():
            return Failure(PEER_LOST, str(error), True, RETRY_AFTER_MS)
        case _:
            return Failure(Internal.code, f"the gateway failed: {type(error).__name__}")


class NoToken(Unauthorised):
    """The client's token is missing or wrong."""
