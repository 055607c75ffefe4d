"""Interference models against the measured pairs of iGniter's authors, and `sm` against the thesis' observations.

    python -m benchmarks.interference [--json FILE]

750 pairs of four models on a V100, both latencies of each: 1500 relative errors per model. gpulet's coefficients were
fitted to these very pairs, iGniter's were not; `solo` is the latency without any interference model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from benchmarks.figures import Figures, add_json_option, tell
from fabric.ids import ModelId
from profiles.device_model import DeviceModel
from profiles.fit import batch_interpolation_error, share_interpolation_error
from profiles.interference import Running, interference_named
from profiles.model import TableProfile
from profiles.store import shipped_data, shipped_profile, shipped_refs

V100_MODELS = ("alexnet", "resnet50", "vgg19", "ssd")
THESIS_MODELS = ("resnet50", "alexnet", "bert", "densenet121", "efficientnet_b7")
Predict = Callable[[Running, Running], float]

# Where, the batch, its neighbours, what the thesis saw in ms, and the section that says so.
OBSERVED = (
    ("resnet50", 4, 17.55, (), 4 * 6.8, "6.2.1: about 4 times, mostly from the cap"),
    ("bert", 4, 31.83, (), 180.0, "6.2.2: about 180 ms when alone at its cap"),
    ("resnet50", 4, None, (("alexnet", 4),), 8.0, "6.2.1: about 8 ms without caps"),
)


def device(interference: str, family: str, models: tuple[str, ...]) -> DeviceModel:
    """The device model of a shipped family."""
    profiles = {ModelId(model): shipped_profile(f"{family}/{model}") for model in models}
    return DeviceModel(profiles, interference_named(interference, profiles, "v100"))


def pair_errors(predict: Predict) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Relative errors over both sides of every pair."""
    errors = []
    for row in shipped_data("igniter_gpulet_profiles_v100")["colocated_pairs"]:
        name_a, name_b, batch_a, batch_b, share_a, measured_a_ms, measured_b_ms = row
        a = Running(ModelId(name_a), batch_a, share_a)
        b = Running(ModelId(name_b), batch_b, 100 - share_a)
        errors += [abs(predict(a, b) / measured_a_ms - 1), abs(predict(b, a) / measured_b_ms - 1)]
    return np.array(errors)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("interference")
    igniter = device("igniter", "igniter-v100", V100_MODELS)
    linear = device("gpulet", "gpulet-v100", V100_MODELS)
    rows: dict[str, Predict] = {
        "igniter": lambda own, other: igniter.exec_ms(own, [other]),
        "gpulet linear": lambda own, other: linear.exec_ms(own, [other]),
        "solo, measured": lambda own, _: linear.exec_ms(own),
        "solo, by igniter": lambda own, _: igniter.exec_ms(own),
    }
    table = figures.table("750 co-located pairs, relative error in %", "model", "mean", "p90", "max")
    for name, predict in rows.items():
        errors = 100 * pair_errors(predict)
        table.rows.append((name, float(errors.mean()), float(np.percentile(errors, 90)), float(errors.max())))

    table = figures.table("thesis, ms", "model", "observed", "by sm", "where")
    by_sm = device("sm", "thesis-v100", THESIS_MODELS)
    for model, batch_size, share, beside, observed_ms, where in OBSERVED:
        neighbours = [Running(ModelId(name), size) for name, size in beside]
        modelled_ms = by_sm.exec_ms(Running(ModelId(model), batch_size, share), neighbours)
        table.rows.append((model, observed_ms, modelled_ms, where))

    table = figures.table(
        "leave-one-out error of interpolation, %", "profile", "batches", "largest", "shares", "largest"
    )
    for ref in shipped_refs():
        profile = shipped_profile(ref)
        if isinstance(profile, TableProfile):
            found = (batch_interpolation_error(profile.columns), share_interpolation_error(profile.columns))
            cells = [
                None if not error.points else 100 * value
                for error in found
                for value in (error.mean, error.largest)
            ]
            table.rows.append((ref, *cells))
    tell(figures, options.json)


if __name__ == "__main__":
    main()
