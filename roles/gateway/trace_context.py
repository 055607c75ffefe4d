"""W3C Trace Context: the `traceparent` of a request, which its answer bears again so that both ends of a trace meet."""

from __future__ import annotations

import re
from typing import Final

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(header: str | None) -> str | None:
    """The header field if it is a valid one of version 00 and on; a wrong one is as none, as the standard says."""
    if header is None:
        return None
    text = header.strip()
    return text if _TRACEPARENT.fullmatch(text) else None
