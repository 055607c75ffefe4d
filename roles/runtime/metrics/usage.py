"""What this process uses of its host."""

from __future__ import annotations

import os
import resource


def cpu_ms() -> float:
    """CPU time of this process and its threads, in ms."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 1e3


def resident_bytes() -> float:
    """Resident memory of this process; 0 where the kernel does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  no path object for every scrape
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0
