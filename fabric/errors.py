"""The error tree. A request's error has a wire code; everything else stays inside one process.

What a caller can expect (a dropped request, a full queue) is a value, not an error; these are raised where
the caller could not have foreseen it, or where the SDK hands a refusal to the user.
"""

from __future__ import annotations

from typing import ClassVar, Final


def error_text(error: BaseException) -> str:
    """The type of somebody else's error and its text; the type alone where its text raises, as a user's class may."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001  whatever it raises
        return name


class FabricError(Exception):
    """Root of everything Tenuto raises on purpose."""


class ConfigError(FabricError):
    """A configuration is wrong; the message says where, what, and what would be right."""


class UntrustedKey(ConfigError):
    """No key of a server is trusted here, or another one is wanted of it: of a running cluster, perhaps not yet."""


class ProfileError(FabricError):
    """A profile is missing, malformed, or silent about what was asked."""


class ProtocolError(FabricError):
    """A frame or message breaks the rules of the wire."""


class LocalProtocolError(ProtocolError):
    """We tried to send what the wire does not allow: a bug on our side."""


class PayloadTooLarge(LocalProtocolError):
    """The tensors of a message, or its header, have more bytes than may go with it."""


class RemoteProtocolError(ProtocolError):
    """Somebody sent us what is not allowed: count it by its `reason`, one constant word, and carry on."""

    def __init__(self, text: str, reason: str = "garbage") -> None:
        super().__init__(text)
        self.reason = reason


class PeerLost(FabricError):
    """The other side of a link is gone."""


class WrongThread(FabricError):
    """A client was asked where its answer can never come.

    A `Client` on another asyncio loop, thread or process than the one that opened it; a `BlockingClient` to wait on its own thread, in a callback of
    one of its futures.
    """


class RequestError(FabricError):
    """A request's final answer when it is not an output. `retryable`: the same request may succeed later.

    `retry_after_ms`: not sooner than that, where the one who refused it could tell.
    """

    code: ClassVar[str] = "Internal"
    retryable: ClassVar[bool] = False

    def __init__(self, reason: str, retry_after_ms: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_ms = retry_after_ms


class ModelNotFound(RequestError):
    """No model of that name is configured."""

    code = "ModelNotFound"


class InvalidInput(RequestError):
    """Names, dtypes or shapes do not match the model's signature, or an input cannot be decoded."""

    code = "InvalidInput"


class TooLarge(RequestError):
    """Inputs have more bytes than a frontend takes of a request (64 MiB), or outputs more than may be sent (256 MiB)."""

    code = "TooLarge"


class Overloaded(RequestError):
    """More is asked than can be served: never taken on, or given up to protect a batch, or a queue is full."""

    code = "Overloaded"
    retryable = True


class DeadlineExceeded(RequestError):
    """The budget ran out before there was an answer."""

    code = "DeadlineExceeded"


class NoReplica(RequestError):
    """The model is known but nothing that serves it is ready."""

    code = "NoReplica"
    retryable = True


class WorkerLost(RequestError):
    """The worker died with the batch and the budget did not allow another try."""

    code = "WorkerLost"
    retryable = True


class Cancelled(RequestError):
    """The client asked to forget it."""

    code = "Cancelled"


class Unauthorised(RequestError):
    """The client may not ask this."""

    code = "Unauthorised"


class Internal(RequestError):
    """The model raised, or something of ours broke."""

    code = "Internal"


REQUEST_ERRORS: Final[dict[str, type[RequestError]]] = {
    error.code: error
    for error in (
        ModelNotFound,
        InvalidInput,
        TooLarge,
        Overloaded,
        DeadlineExceeded,
        NoReplica,
        WorkerLost,
        Cancelled,
        Unauthorised,
        Internal,
    )
}


def nothing_ready(model_id: str) -> str:
    """The words of a `NoReplica`, whoever refuses."""
    return f"nothing that serves model {model_id!r} is ready; why: tenuto models list"


def code_of_unsendable(error: LocalProtocolError) -> str:
    """The wire code for a request whose inputs or outputs the wire does not allow."""
    return TooLarge.code if isinstance(error, PayloadTooLarge) else Internal.code


def request_error(code: str, reason: str, retry_after_ms: float | None = None) -> RequestError:
    """The typed error for a wire code; an unknown code (a newer peer) becomes `Internal`."""
    return REQUEST_ERRORS.get(code, Internal)(reason, retry_after_ms)
