"""The fast simulator beside the one with every real core: whether requests meet the same fate, and how fast both are.

    python -m benchmarks.full_simulation [--settings 20000] [--first 0] [--requests 80] [--processes 2]

Random clusters without jitter (`tests/references/simulations.py`). A setting in which a stop crossed the end of its batch is
counted apart: docs/operate/replay.md says what differs then. Processor time of both, in requests a second and process.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from tests.references.simulations import Fate, fates_apart, play, random_cluster


class Compared(NamedTuple):
    """One setting: whose fates differ, how many requests there were, and how long both took."""

    seed: int
    batching: str
    apart: Sequence[Fate]
    is_crossed: bool
    requests: int
    fast_s: float
    full_s: float


def compared(seed: int, requests: int) -> Compared:
    """Play it twice."""
    document = random_cluster(seed)
    began_s = time.process_time()
    fast = play(document, seed, requests, is_full=False)
    middle_s = time.process_time()
    full = play(document, seed, requests, is_full=True)
    ended_s = time.process_time()
    count = sum(one.arrived_at_ms.size for one in fast.traffic)
    apart = fates_apart(fast, full)
    is_crossed = fast.late_preemptions > 0
    took_s = middle_s - began_s, ended_s - middle_s
    return Compared(seed, str(document["batching"]), apart, is_crossed, count, *took_s)


def main() -> None:
    """Compare, and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first setting's seed")
    parser.add_argument("--requests", type=int, default=80, help="about so many each")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.settings)
    requests = different = crossed = 0
    fast_s = full_s = 0.0
    with ProcessPoolExecutor(options.processes) as pool:
        for one in pool.map(partial(compared, requests=options.requests), seeds, chunksize=8):
            requests += one.requests
            fast_s += one.fast_s
            full_s += one.full_s
            crossed += one.is_crossed
            if one.apart and not one.is_crossed:
                different += 1
                print(
                    f"setting {one.seed}, {one.batching}: {len(one.apart)} differ, first {one.apart[0]}",
                    flush=True,
                )
    print(
        f"{different} of {options.settings} settings differ, in {crossed} more a stop crossed an end; "
        f"{requests} requests, {requests / fast_s:.0f} a second and {requests / full_s:.0f} with every core"
    )


if __name__ == "__main__":
    main()
