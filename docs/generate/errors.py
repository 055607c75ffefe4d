"""docs/reference/errors.md: errors of requests with their codes, other errors, and exit codes."""

from __future__ import annotations

from collections.abc import Iterator

from docs.generate.text import attribute_docstrings, table
from fabric import errors
from fabric.errors import REQUEST_ERRORS, FabricError, RequestError
from roles.gateway.failures import GRPC_STATUS, STATUS
from roles.runtime import exit_codes

HEAD = """# Errors and exit codes

## Errors of a request

A request ends with its outputs, or with one of these. The SDK raises them (`from fabric.errors import Overloaded`); `code`, `retryable` and, where it
is known, `retry_after_ms` go with each. *Retryable*: the same request may succeed later. The gateway answers with the HTTP status, and in gRPC with the status beside it.
"""
OTHERS = """
## Other errors

What else the SDK and the commands raise. All are `FabricError`.
"""
EXITS = """
## Exit codes
"""


def errors_page() -> str:
    """The page."""
    return "\n".join(
        [
            HEAD,
            table(
                ("code", "retryable", "HTTP", "gRPC", "meaning"),
                (
                    (
                        f"`{code}`",
                        "yes" if error.retryable else "no",
                        str(STATUS[code]),
                        GRPC_STATUS.get(STATUS[code], ""),
                        error.__doc__ or "",
                    )
                    for code, error in REQUEST_ERRORS.items()
                ),
            ),
            OTHERS,
            table(
                ("error", "meaning"),
                ((f"`{one.__name__}`", one.__doc__ or "") for one in _others(FabricError)),
            ),
            EXITS,
            table(("code", "meaning"), _exit_codes()),
        ]
    )


def _others(root: type[Exception]) -> Iterator[type[Exception]]:
    for one in root.__subclasses__():
        if one.__module__ == errors.__name__ and not issubclass(one, RequestError):
            yield one
            yield from _others(one)


def _exit_codes() -> Iterator[tuple[str, str]]:
    told = attribute_docstrings(exit_codes)[""]
    values = {0: "A result, also in overload and with models that found no place.", 2: "Wrong usage."}
    for name in vars(exit_codes):
        code = getattr(exit_codes, name)
        if name.startswith("EXIT_") and code <= 255:  # more is no process's
            values.setdefault(code, told[name])
    yield from ((str(code), meaning) for code, meaning in sorted(values.items()))
