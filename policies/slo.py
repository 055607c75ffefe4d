"""What it means that a model keeps its SLO."""

from typing import Final

BAD_RATE_ALLOWED: Final = 0.01
"""Of its requests, refused or late: p99 within the SLO."""
