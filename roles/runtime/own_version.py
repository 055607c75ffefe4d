"""Which Tenuto this is."""

from __future__ import annotations

from functools import cache


@cache
def own_version() -> str:
    """The installed version; `unknown` where the code runs from a source tree that nobody installed."""
    # It takes email and zipfile along, which no role needs to start.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("tenuto")
    except PackageNotFoundError:
        return "unknown"
