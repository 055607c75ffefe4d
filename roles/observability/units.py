"""Times as people write them."""

from __future__ import annotations


def shown_ms(value_ms: float) -> str:
    """A duration: `0.4 ms`, `31 ms`, `2.5 s`."""
    if abs(value_ms) >= 1_000:
        return f"{value_ms / 1e3:.3g} s"
    if abs(value_ms) >= 9.95:
        return f"{value_ms:.0f} ms"
    return f"{value_ms:.2g} ms" if abs(value_ms) < 0.95 else f"{value_ms:.1f} ms"
