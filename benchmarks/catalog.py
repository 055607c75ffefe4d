"""Which benchmarks `make bench` runs, with which arguments; and those that take longer, with their last figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Quick:
    """One that ends within about two minutes with these arguments. `--json FILE` is added."""

    name: str
    words: tuple[str, ...]
    """What follows `python`: a script or a module, and arguments."""


@dataclass(slots=True, frozen=True)
class Long:
    """One that does not."""

    command: str
    figures: str
    """Its last figures in a sentence, and where all of them are."""


def _script(name: str, *arguments: str) -> Quick:
    return Quick(name, (f"benchmarks/{name}.py", *arguments))


QUICK: tuple[Quick, ...] = (
    _script("latency", "--repeat", "5", "--requests", "300", "--seconds", "3"),
    _script("throughput", "--repeat", "3", "--seconds", "4"),
    _script("payload", "--repeat", "3", "--seconds", "1"),
    _script("lateness", "--timers", "500", "--repeat", "2"),
    _script("live_against_simulated", "--repeat", "1", "--seconds", "8"),
    _script("change_under_load", "--repeat", "3", "--quiet", "3"),
    _script("scheduler_core", "--seconds", "1"),
    _script("simulator_speed", "--seconds", "10", "--repeat", "3"),
    _script("scheduling_quality", "--seconds", "10", "--seeds", "1"),
    _script("subclusters", "--dispatchers"),
    _script("interference"),
    _script("igniter_planning", "--repeats", "1"),
    _script(
        "worker_throughput", "--device", "cpu", "--arch", "resnet18", "--batches", "1,8", "--turns", "10"
    ),
)

LONG: tuple[Long, ...] = (
    Long(
        "python benchmarks/disciplines.py run RESULTS.json && python benchmarks/disciplines.py table RESULTS.json",
        "Goodput of `tenuto` beside deferred and eager batching: docs/disciplines.md.",
    ),
    Long(
        "python benchmarks/placements.py run RESULTS.json --seconds 8 && python benchmarks/placements.py table RESULTS.json",
        "Every placement policy on the thesis' settings: docs/placement.md.",
    ),
    Long(
        "python benchmarks/gpulet_schedulability.py",
        "gpulet's grid of 19,682 scenarios: docs/gpulet.md.",
    ),
    Long("python benchmarks/subclusters.py", "Search beside HiGHS and CBC: docs/subclusters.md."),
    Long(
        "python benchmarks/scheduling_quality.py --batching tenuto --all",
        "Table 2 of the Symphony paper, flat top and load-proportional use, every discipline.",
    ),
    Long(
        "python benchmarks/live_against_simulated.py --repeat 5 --seconds 30",
        "The same as above with longer windows and five seeds.",
    ),
    Long(
        "python benchmarks/worker_throughput.py --device cuda --arch resnet50 --batches 1,8,32",
        "Needs a CUDA device: docs/worker.md.",
    ),
)
