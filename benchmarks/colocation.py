"""Models side by side on one GPU, with shares and taking turns, beside what is predicted for them on that very GPU.

    python -m benchmarks.colocation A.json B.json [C.json …] [--device cuda] [--batches 1,8,32] [--shares 50:50,20:70] [--json FILE]

The files are what `tenuto profile --igniter` wrote on this GPU: models are loaded by their subjects' names with a zoo's defaults, in float32; coefficients are those fitted
there. For each batch size and set of shares a process for each model runs back to back under one MPS daemon; then the same
without shares, taking turns. Medians are compared with each alone at the same share, and with predictions
(`colocation_predictions.py`): iGniter's, Tenuto's by SM utilisation, and a line of gpulet's form. What cannot be predicted is
"-". On a CPU there are no shares and no kernels: what is left is to see that it runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.colocation_predictions import Group, Predicted, by_igniter, by_line, by_sm
from benchmarks.device import described, loader_named
from benchmarks.figures import Cell, Figures, Line, add_json_option, tell
from fabric.messages import LoaderSpec
from profiles.measured import MeasuredProfile
from profiles.store import read_measured
from roles.node_agent.discovery import NvmlUnavailable
from roles.node_agent.mps.control import MpsError
from roles.profiling.process import MeasuringProcess, MeasuringRequest
from roles.profiling.shares import Environment, mps_shares

SHARES = {2: "50:50,20:70", 3: "40:30:30"}
Shares = tuple[float, ...] | None


class Measuring:
    """Runs the models of `profiles`, alone or beside each other; `environment` None: there are no shares."""

    def __init__(
        self,
        profiles: Sequence[MeasuredProfile],
        device: str,
        environment: Environment | None,
        for_ms: float,
    ) -> None:
        self._profiles = profiles
        self._device = device
        self._environment = environment
        self._for_ms = for_ms

    def alone_ms(self, place: int, share: float | None, batch_sizes: Sequence[int]) -> dict[int, float]:
        """The median run time of one model at that share, by batch size; sizes that there is no memory for are left out."""
        request = MeasuringRequest(
            self._loader(place), self._device_of(share), batch_sizes, for_ms=self._for_ms
        )
        found: dict[int, float] = {}
        with MeasuringProcess(request, self._around(share)) as process:
            while (said := process.answer())["event"] != "end":
                if said["event"] == "point":
                    found[int(said["batch_size"])] = float(said["p50_ms"])
        return found

    def beside_ms(self, shares: Shares, batch_size: int) -> tuple[float, ...]:
        """The median run time of each while all of them run."""
        with ExitStack() as stack:
            members = [
                stack.enter_context(
                    MeasuringProcess(
                        MeasuringRequest(
                            self._loader(place),
                            self._device_of(share),
                            (batch_size,),
                            for_ms=self._for_ms,
                            is_group=True,
                        ),
                        self._around(share),
                    )
                )
                for place, share in enumerate(shares or (None,) * len(self._profiles))
            ]
            for member in members:
                member.answer()  # ready
            for member in members:
                member.tell("go\n")
            seen = [float(member.answer()["p50_ms"]) for member in members]
            for member in members:
                member.tell("stop\n")
        return tuple(seen)

    def _loader(self, place: int) -> LoaderSpec:
        return loader_named(self._profiles[place].subject.model)

    def _around(self, share: float | None) -> Mapping[str, str]:
        return {} if share is None or self._environment is None else self._environment(share)

    def _device_of(self, share: float | None) -> str:
        """A process that may see one GPU only knows it as the first."""
        return self._device if share is None else "cuda:0"


def measured(
    profiles: tuple[MeasuredProfile, ...],
    measuring: Measuring,
    batch_sizes: Sequence[int],
    sharings: Sequence[Shares],
) -> list[Group]:
    """Every sharing with every batch size that each model has memory for alone."""
    alone: dict[tuple[int, float | None], dict[int, float]] = {}
    groups = []
    for shares in sharings:
        of_each = list(enumerate(shares or (None,) * len(profiles)))
        for place, share in of_each:
            if (place, share) not in alone:
                alone[place, share] = measuring.alone_ms(place, share, batch_sizes)
        for batch_size in batch_sizes:
            if all(batch_size in alone[one] for one in of_each):
                alone_ms = tuple(alone[one][batch_size] for one in of_each)
                beside_ms = measuring.beside_ms(shares, batch_size)
                groups.append(Group(profiles, batch_size, shares, alone_ms, beside_ms))
    return groups


def add_groups(figures: Figures, groups: Sequence[Group]) -> None:
    """A row for each group and model, and how far off each prediction is."""
    predictions: dict[str, list[Predicted]] = {
        "iGniter": [by_igniter(group) for group in groups],
        "sm": [by_sm(group) for group in groups],
        "line by SM": by_line(groups),
    }
    table = figures.table(
        "run times in ms, medians; predictions, and their errors in %",
        *("batch", "shares", "model", "alone", "beside", "slowdown"),
        *(word for name in predictions for word in (name, "%")),
    )
    errors: dict[str, list[float]] = {name: [] for name in predictions}
    for number, group in enumerate(groups):
        for place, profile in enumerate(group.profiles):
            beside_ms = group.beside_ms[place]
            cells: list[Cell] = []
            for name, predicted in predictions.items():
                of_group = predicted[number]
                ms = None if of_group is None else of_group[place]
                error = None if ms is None else 100 * (ms / beside_ms - 1)
                cells += [ms, error]
                if error is not None:
                    errors[name].append(abs(error))
            table.rows.append(
                (
                    group.batch_size,
                    "turns" if group.shares is None else ":".join(f"{one:g}" for one in group.shares),
                    profile.subject.model,
                    group.alone_ms[place],
                    beside_ms,
                    beside_ms / group.alone_ms[place],
                    *cells,
                )
            )
    summary = figures.table("errors in %", "prediction", "of runs", "mean", "largest")
    for name, of_name in errors.items():
        worst = max(of_name, default=None)
        summary.rows.append((name, len(of_name), statistics.mean(of_name) if of_name else None, worst))
    if errors["iGniter"]:
        # The authors' own are 0.04 to 7.61 % (Fig. 11).
        figures.lines.append(
            Line("iGniter's mean error in %", statistics.mean(errors["iGniter"]), at_most=10.0)
        )
    figures.remarks.append(
        "gpulet's own model is not fitted: it takes each model's use of L2 and DRAM bandwidth, which profiles from torch do not hold;"
        " `line by SM` is a line of its form through the other groups of this run, by the SM use of the profiles' kernels"
    )


def shares_of(words: str | None, count: int) -> list[Shares]:
    """What `--shares` says, by default the usual ones for so many models. Raises ValueError for another number of models."""
    if words is None:
        words = SHARES.get(count, ":".join([f"{100 // count}"] * count))
    found: list[Shares] = [tuple(float(one) for one in word.split(":")) for word in words.split(",")]
    for shares in found:
        if shares is None or len(shares) != count or not all(0 < share <= 100 for share in shares):
            raise ValueError(
                f"--shares {words}: each set has {count} percentages, as many as there are profiles"
            )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE", help="two or more")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--shares", help="in percent, in the order of the files: 50:50,20:70 or 40:30:30")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    add_json_option(parser)
    options = parser.parse_args()
    profiles = tuple(read_measured(path) for path in options.profiles)
    if len(profiles) < 2:
        parser.error("two profiles at least: what runs beside the first one?")
    try:
        sharings = shares_of(options.shares, len(profiles))
    except ValueError as error:
        parser.error(str(error))
    names = " beside ".join(profile.subject.model for profile in profiles)
    figures = Figures(
        f"{names} on {profiles[0].subject.gpu or options.device}", device=described(options.device)
    )
    with ExitStack() as stack:
        environment, why = None, "a CPU has none"
        if options.device != "cpu":
            gpu = int(options.device.partition(":")[2] or 0)
            try:
                environment = stack.enter_context(mps_shares(gpu, profiles[0].subject.gpu_type))
            except (MpsError, NvmlUnavailable) as error:
                why = str(error)
        if environment is None:
            sharings = []
            figures.remarks.append(f"without shares: {why}")
        measuring = Measuring(profiles, options.device, environment, 1e3 * options.seconds)
        batch_sizes = [int(word) for word in options.batches.split(",")]
        add_groups(figures, measured(profiles, measuring, batch_sizes, [*sharings, None]))
    tell(figures, options.json)


if __name__ == "__main__":
    main()
