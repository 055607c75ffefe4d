"""What floats that should be equal differ by: sums of shares, of rates, of run times."""

from typing import Final

ROUNDING: Final = 1e-9
"""Relative, or of quantities near one."""
