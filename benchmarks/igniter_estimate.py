"""Estimate iGniter's coefficients for the models of the thesis' Table A.1, and write them where profiles are shipped.

No co-location data, no latency by share and no power were published for these models, so iGniter can take part in the
thesis' settings only with estimates; `docs/guides/profiles.md` says how each is made. Run it again when Table A.1's
transcription or the share assumption changes:

    python -m benchmarks.igniter_estimate
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from scipy.optimize import nnls

from profiles.model import ModelProfile
from profiles.store import shipped_data, shipped_profile

TARGET = Path(__file__).resolve().parent.parent / "profiles" / "data" / "thesis_igniter_estimate_v100.json"
SHARES = (20, 30, 40, 50, 60, 70, 80, 90, 100)
WHOLE_GPU_WEIGHT = 3.0  # the whole GPU is what was measured
Point = tuple[int, int, float]  # batch size, share in percent, active time in ms
IMAGE_BYTES = 602112  # 3 x 224 x 224 floats, as in iGniter's own profiles
CLASSES_BYTES = 4000
TOKENS_BYTES = 2 * 512 * 8  # 512 token ids and their mask
HIDDEN_BYTES = 512 * 4  # per hidden unit: the last layer's states of 512 tokens

# Kernels of one forward pass in eager mode, counted over the layers of each architecture: a convolution, a
# normalisation, an activation, a sum, a concatenation, a pooling and a matrix product are one each. Then what a
# result has: its bytes for vision, its hidden units for language.
KERNELS = {
    "alexnet": 21,  # 5 convolutions, 3 linear, 7 activations, 3 + 1 poolings, 2 copies
    "densenet121": 429,  # 120 convolutions, 121 normalisations and activations, 58 concatenations, the rest
    "efficientnet_b7": 830,  # 55 blocks of 15, stem and head
    "inception_v3": 312,  # 94 convolutions, normalisations and activations, 30 poolings and concatenations
    "mobilenet_v2": 151,  # 52 convolutions and normalisations, 35 activations, 10 sums, 2
    "resnet50": 174,  # 53 convolutions and normalisations, 49 activations, 16 sums, 3
    "resnext50_32x4d": 174,
    "vgg19": 43,  # 16 convolutions, 3 linear, 18 activations, 6 poolings
    "bert": 210,  # 12 layers of 17, embedding
    "bloom_560": 580,  # 24 layers of 24, embedding
    "gpt2": 306,  # 12 layers of 25, embedding
    "t5": 400,  # 6 layers of 26, 6 of 40 with cross attention, embedding
    "xlnet": 426,  # 12 layers of 35, embedding
}
HIDDEN_UNITS = {"bert": 768, "bloom_560": 1024, "gpt2": 768, "t5": 512, "xlnet": 768}


def measured_means() -> dict[str, float]:
    """What iGniter's four measured models have in common, per ms of busy GPU at batch 16 and 100 %."""
    rows: list[dict[str, float]] = []
    for entry in shipped_data("igniter_v100")["workload_coefficients"].values():
        work = entry["k1_ms_pct"] * 256 + entry["k2_ms_pct"] * 16 + entry["k3_ms_pct"]
        busy_ms = (work / (100 + entry["k4_pct"]) + entry["k5_ms"]) / 16
        rows.append(
            {
                "power_w_per_rps_and_ms": entry["alpha_power_w_per_rps"] / busy_ms,
                "beta_power_w": entry["beta_power_w"],
                "cache_pct_per_rps_and_ms": entry["alpha_cacheutil_pct_per_rps"] / busy_ms,
                "beta_cacheutil_pct": entry["beta_cacheutil_pct"],
                "alpha_cache_per_pct": entry["alpha_cache_per_pct"],
                "k_sch_ms_per_kernel": entry["k_sch_ms_per_kernel"],
            }
        )
    return {key: mean(row[key] for row in rows) for key in rows[0]}


def coefficients(model: str, profile: ModelProfile, means: dict[str, float]) -> dict[str, Any]:
    """One model's entry, in the form of iGniter's own files."""
    pcie_bytes_per_ms = shipped_data("igniter_v100")["hardware"]["B_pcie_bytes_per_ms"]
    is_language = model in HIDDEN_UNITS
    load_bytes = TOKENS_BYTES if is_language else IMAGE_BYTES
    feedback_bytes = HIDDEN_BYTES * HIDDEN_UNITS[model] if is_language else CLASSES_BYTES
    kernels, k_sch = KERNELS[model], means["k_sch_ms_per_kernel"]
    fixed_ms = kernels * k_sch
    points: list[Point] = []
    need = 0.0
    for b, known in sorted(profile.requirements.items()):
        need = max(need, known.weighted_sm_percent or 0.0)
        copies_ms = b * (load_bytes + feedback_bytes) / pcie_bytes_per_ms
        points += [(b, r, profile.exec_ms(b) * max(1.0, need / r) - copies_ms - fixed_ms) for r in SHARES]
    (k1, k2, k3, k5), k4, error = fit(points)
    largest = max(profile.requirements)
    busy_ms = profile.exec_ms(largest) * need / 100 / largest
    return {
        "d_load_bytes": load_bytes,
        "d_feedback_bytes": feedback_bytes,
        "n_k": kernels,
        "k_sch_ms_per_kernel": k_sch,
        "k1_ms_pct": k1,
        "k2_ms_pct": k2,
        "k3_ms_pct": k3,
        "k4_pct": k4,
        "k5_ms": k5,
        "alpha_power_w_per_rps": means["power_w_per_rps_and_ms"] * busy_ms,
        "beta_power_w": means["beta_power_w"],
        "alpha_cacheutil_pct_per_rps": means["cache_pct_per_rps_and_ms"] * busy_ms,
        "beta_cacheutil_pct": means["beta_cacheutil_pct"],
        "alpha_cache_per_pct": means["alpha_cache_per_pct"],
        "fit_mean_error": error,
        "fit_mean_error_whole_gpu": mean_error([p for p in points if p[1] == 100], (k1, k2, k3, k4, k5)),
    }


def fit(points: list[Point]) -> tuple[tuple[float, ...], float, float]:
    """k1, k2, k3 and k5 by non-negative least squares of the relative error, k4 by a scan; and the mean error."""
    weights = np.array([WHOLE_GPU_WEIGHT if r == 100 else 1.0 for _, r, _ in points])
    found: list[tuple[float, float, tuple[float, ...]]] = []
    for k4 in np.arange(-2.0, 60.0, 0.5):
        rows = np.array(
            [[b * b / (r + k4) / t, b / (r + k4) / t, 1 / (r + k4) / t, 1 / t] for b, r, t in points]
        )
        solution, residual = nnls(rows * weights[:, None], weights)
        found.append((float(residual), float(k4), tuple(float(k) for k in solution)))
    _, k4, (k1, k2, k3, k5) = min(found)
    return (k1, k2, k3, k5), k4, mean_error(points, (k1, k2, k3, k4, k5))


def mean_error(points: list[Point], k: tuple[float, float, float, float, float]) -> float:
    """Of the active time by equation 11."""
    return mean(abs(((k[0] * b * b + k[1] * b + k[2]) / (r + k[3]) + k[4]) / t - 1) for b, r, t in points)


def main() -> None:
    """Write the file."""
    means = measured_means()
    models = {
        model: {
            key: value if isinstance(value, int) else float(f"{value:.6g}")
            for key, value in coefficients(model, shipped_profile(f"thesis-v100/{model}"), means).items()
        }
        for model in KERNELS
    }
    document = {
        "source": "ESTIMATE, not measured: iGniter's coefficients for the models of the thesis' Table A.1",
        "warning": "Table A.1 has no latency by share, no power, no cache use and no co-location data.",
        "method": "docs/guides/profiles.md, 'iGniter's coefficients for Table A.1'; made by benchmarks/igniter_estimate.py",
        "hardware": "that of igniter_v100.json",
        "workload_coefficients": models,
    }
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for model, entry in models.items():
        print(
            f"{model:16} mean error {100 * entry['fit_mean_error']:5.1f} % over batches and shares,"
            f" {100 * entry['fit_mean_error_whole_gpu']:5.1f} % on the whole GPU"
        )


if __name__ == "__main__":
    main()
