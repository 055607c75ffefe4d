"""Two models on one GPU, with and without shares, beside what iGniter predicts for them on that very GPU.

    python -m benchmarks.colocation A.json B.json [--device cuda] [--batches 1,8,32] [--shares 50:50,20:70] [--json FILE]

A.json and B.json are what `tenuto profile --igniter` wrote on this GPU: loaders are those of their subjects, coefficients
those fitted there. For each batch size and pair of shares two processes under one MPS daemon run back to back; then
the same two without shares, taking turns. Medians are compared with iGniter's model (equations 1 to 11) and with
each alone. The prediction is "-" where a profile has no coefficients, and without shares, which iGniter does not model.
On a CPU there are no shares either: what is left is to see that it runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from benchmarks.figures import Figures, Line, add_json_option, tell
from fabric.messages import LoaderSpec
from profiles.igniter.performance_model import Resident, predict_ms, read_coefficients, read_hardware
from profiles.measured import MeasuredProfile
from profiles.store import read_measured
from roles.node_agent.discovery import NvmlUnavailable
from roles.node_agent.mps.control import MpsError
from roles.profiling.process import MeasuringProcess, MeasuringRequest
from roles.profiling.shares import Environment, mps_shares

WHOLE = 100.0
Pair = tuple[MeasuredProfile, MeasuredProfile]


def loader_of(profile: MeasuredProfile) -> LoaderSpec:
    """As `tenuto profile` understands a model's name."""
    zoo, _, arch = profile.subject.model.rpartition("/")
    if ":" in arch:
        return LoaderSpec(python=profile.subject.model)
    return LoaderSpec(zoo=zoo or "torchvision", arch=arch)


def measured_ms(
    profiles: Sequence[MeasuredProfile],
    device: str,
    batch_size: int,
    environments: Sequence[Mapping[str, str]],
    for_ms: float,
) -> list[float]:
    """The median run time of each while all of them run."""
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                MeasuringProcess(
                    MeasuringRequest(loader_of(profile), device, (batch_size,), for_ms=for_ms, is_group=True),
                    environment,
                )
            )
            for profile, environment in zip(profiles, environments, strict=True)
        ]
        for member in members:
            member.answer()  # ready
        for member in members:
            member.tell("go\n")
        seen = [float(member.answer()["p50_ms"]) for member in members]
        for member in members:
            member.tell("stop\n")
    return seen


def predicted_ms(pair: Pair, batch_size: int, shares: Sequence[float]) -> list[float] | None:
    """iGniter's, with the GPU's coefficients from the first profile; None where one has none."""
    residents = []
    for profile, share in zip(pair, shares, strict=True):
        if profile.igniter is None:
            return None
        residents.append(Resident(read_coefficients(profile.igniter["coefficients"]), batch_size, share))
    assert pair[0].igniter is not None, "looked at above"
    return predict_ms(read_hardware(pair[0].igniter["hardware"]), residents)


def compare(pair: Pair, options: argparse.Namespace, environment: Environment | None) -> Figures:
    """A row for each batch size, sharing and model."""
    figures = Figures(
        f"{pair[0].subject.model} beside {pair[1].subject.model} on {pair[0].subject.gpu or options.device}"
    )
    table = figures.table(
        "run times in ms, medians",
        *("batch", "shares", "model", "alone", "beside", "slowdown", "iGniter", "its error in %"),
    )
    batches = [int(word) for word in options.batches.split(",")]
    shares = [tuple(float(one) for one in word.split(":")) for word in options.shares.split(",")]
    sharings = [None, *(shares if environment is not None else [])]
    errors = []
    for batch_size, share in product(batches, sharings):
        device = options.device if environment is None or share is None else "cuda:0"
        around = [{}, {}] if share is None else [dict(environment(one)) for one in share if environment]
        alone = [
            measured_ms([profile], device, batch_size, [of], options.seconds * 1e3)[0]
            for profile, of in zip(pair, around, strict=True)
        ]
        beside = measured_ms(pair, device, batch_size, around, options.seconds * 1e3)
        predicted = None if share is None else predicted_ms(pair, batch_size, share)
        for place, profile in enumerate(pair):
            ms = None if predicted is None else predicted[place]
            error = None if ms is None else 100 * (ms / beside[place] - 1)
            errors.extend([] if error is None else [abs(error)])
            table.rows.append(
                (
                    batch_size,
                    "none" if share is None else ":".join(f"{one:g}" for one in share),
                    profile.subject.model,
                    alone[place],
                    beside[place],
                    beside[place] / alone[place],
                    ms,
                    error,
                )
            )
    if errors:
        # The authors' own are 0.04 to 7.61 % (Fig. 11).
        figures.lines.append(Line("iGniter's mean error in %", statistics.mean(errors), at_most=10.0))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", nargs=2, type=Path, metavar="PROFILE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--shares", default="50:50,20:70", help="in percent, first:second")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    add_json_option(parser)
    options = parser.parse_args()
    first, second = (read_measured(path) for path in options.profiles)
    with ExitStack() as stack:
        environment, why = None, "a CPU has no shares"
        if options.device != "cpu":
            gpu = int(options.device.partition(":")[2] or 0)
            try:
                environment = stack.enter_context(mps_shares(gpu, first.subject.gpu_type))
            except (MpsError, NvmlUnavailable) as error:
                why = str(error)
        figures = compare((first, second), options, environment)
    if environment is None:
        figures.remarks.append(f"without shares: {why}")
    tell(figures, options.json)


if __name__ == "__main__":
    main()
