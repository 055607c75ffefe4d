"""Symphony's figures 9, 10 and 11: its scheduling beside Clockwork, Nexus and Shepherd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from roles.lab.reproduce.report import Grid, Range, Reproduction, Row, Value
from roles.lab.reproduce.symphony.workloads import (
    IDEAL,
    OURS,
    SYSTEMS,
    Effort,
    System,
    copies,
    effort_of,
    goodputs_of,
    model_of,
    table,
)
from roles.lab.scheduler_only import Case, Model, is_good, made

DISCIPLINES: Mapping[str, System] = {
    "deferred": ("deferred", {}),
    "deferred, simple drop": ("deferred", {"drop": "simple"}),
    "eager, window drop": ("eager", {"drop": "window"}),
    "eager": ("eager", {}),
    "tenuto": OURS,
    "timeout 30 %": ("timeout", {"slo_percent": 30}),
    "nexus": SYSTEMS["Nexus"],
    "clockwork": SYSTEMS["Clockwork"],
    "shepherd": SYSTEMS["Shepherd"],
}
RIVALS = ("clockwork", "nexus", "shepherd")
GPU_NAMES = {"gtx1080ti": "1080Ti", "a100": "A100"}
FIGURE_9_GPUS = 64
PARTS: Mapping[str, Callable[[float], bool]] = {
    "mixed": lambda _: True,
    "strong": lambda ratio: ratio > 2,
    "weak": lambda ratio: ratio < 2,
}
STATED_9: Mapping[tuple[str, str], float | Range] = {
    ("gtx1080ti", "mixed"): Range(2.0, 2.4),
    ("a100", "mixed"): Range(2.0, 2.4),
    ("gtx1080ti", "strong"): 3.5,
    ("a100", "strong"): 5.7,
    ("gtx1080ti", "weak"): 1.23,
    ("a100", "weak"): 1.10,
}
"""Symphony's goodput over the baselines' (section 5.1)."""

SHORT = Effort((1,), 1500.0, 2000.0, 4000.0, 500, 1.01)
"""54 searches at up to 60,000 requests per second."""

RATE_RPS = 15_000.0
GPUS_MAX = 512
TIGHT_MS, LOOSE_MS = 20.0, 100.0


def figure_9(*, is_full: bool = False) -> Reproduction:
    """The zoo of each GPU on 64 of them: whole, its strongly and its weakly batching part; nine disciplines."""
    effort = effort_of(is_full=True) if is_full else SHORT
    rows, bars = [], []
    for gpu, label in GPU_NAMES.items():
        for part, is_in in PARTS.items():
            models = tuple(model for model in table(gpu) if is_in(model.beta_ms / model.alpha_ms))
            case = Case(f"{label} {part}", models, FIGURE_9_GPUS)
            found = goodputs_of(case, DISCIPLINES, effort)
            best = max(found[rival] for rival in RIVALS)
            rows.append(
                Row(
                    f"{label} {part}, {len(models)} models: deferred over the best of Clockwork, Nexus and Shepherd",
                    STATED_9[gpu, part],
                    round(found["deferred"] / best, 3) if best else None,
                    IDEAL,
                )
            )
            bars.append((f"{label} {part}", tuple(round(found[name]) for name in DISCIPLINES)))
    return Reproduction(
        "symphony-figure-9",
        "Symphony: mixed models on 64 GPUs",
        "Symphony, figure 9 (section 5.1): tables 3 and 4, equally popular, Poisson; strong: beta/alpha > 2, weak: beta/alpha < 2.",
        tuple(rows),
        (Grid("Goodput, requests/s:", tuple(DISCIPLINES), tuple(bars)),),
    )


def fewest_gpus(
    models: Sequence[Model], system: System, rate_rps: float, effort: Effort, limit: int = GPUS_MAX
) -> int | None:
    """The fewest GPUs on which every model loses under 1 % at that total rate; None where `limit` are too few."""

    def is_enough(gpus: int) -> bool:
        case = Case("", tuple(models), gpus)
        window = effort.window(case, rate_rps)
        return all(is_good(case, made(case, *system), seed, rate_rps, window) for seed in effort.seeds)

    low, high = 0, 1
    while not is_enough(high):
        low, high = high, high * 2
        if high > limit:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def figure_10(*, is_full: bool = False) -> Reproduction:
    """The fewest A100s for 15,000 requests per second: ResNet50 at 25 ms, and all 37 models."""
    effort = effort_of(is_full=is_full)
    systems = {**SYSTEMS, "tenuto": OURS}
    workloads = {"ResNet50, 25 ms": [model_of("a100", "ResNet50", 25.0)], "37 mixed models": table("a100")}
    needed = {
        name: {label: fewest_gpus(models, system, RATE_RPS, effort) for label, system in systems.items()}
        for name, models in workloads.items()
    }
    one, mixed = needed["ResNet50, 25 ms"], needed["37 mixed models"]
    rows = [
        Row(
            f"ResNet50: GPUs that {rival} needs more than Symphony",
            Range(2, 6),
            _less(one[rival], one["Symphony"]),
            IDEAL,
        )
        for rival in ("Shepherd", "Nexus")
    ]
    others = max(one[name] or 0 for name in ("Symphony", "Nexus", "Shepherd"))
    rows.append(
        Row(
            "ResNet50: Clockwork's GPUs over the most of the other three",
            "more than 2",
            _over(one["Clockwork"], others),
            IDEAL,
        )
    )
    for rival, percent in (("Nexus", 166), ("Shepherd", 90)):
        over = _over(mixed[rival], mixed["Symphony"])
        ours = None if over is None else round(100 * (over - 1), 1)
        rows.append(Row(f"mixed: GPUs of {rival} over Symphony's, % more", percent, ours, IDEAL))
    rows.append(
        Row(
            "mixed: Clockwork's GPUs over Symphony's",
            "cannot, its decisions take too long",
            _over(mixed["Clockwork"], mixed["Symphony"]),
            IDEAL,
        )
    )
    return Reproduction(
        "symphony-figure-10",
        "Symphony: the fewest GPUs for 15,000 requests per second",
        "Symphony, figure 10 (section 5.2), table 4's profiles, equally popular, Poisson.",
        tuple(rows),
        (
            Grid(
                f"GPUs (nothing: over {GPUS_MAX}):",
                tuple(systems),
                tuple((name, tuple(found.values())) for name, found in needed.items()),
            ),
        ),
    )


def _less(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right


def _over(left: int | None, right: int | None) -> float | None:
    return None if left is None or not right else round(left / right, 2)


def figure_11(
    *, is_full: bool = False, effort: Effort | None = None, gpus: int = 32, count: int = 20
) -> Reproduction:
    """Twenty models like ResNet50 on 32 GPUs: SLO, popularity and arrivals varied."""
    effort = effort or effort_of(is_full=is_full)
    slos_ms = (15.0, 20.0, 25.0, 35.0, 50.0, 70.0, 100.0) if is_full else (TIGHT_MS, LOOSE_MS)
    found: dict[tuple[float, float, float], dict[str, float]] = {}
    for zipf in (0.0, 0.9):
        for shape in (1.0, 0.05):
            for slo_ms in slos_ms:
                models = copies(model_of("table2", "ResNet50", slo_ms), count, zipf)
                case = Case("", models, gpus, shape)
                found[zipf, shape, slo_ms] = goodputs_of(case, {**SYSTEMS, "tenuto": OURS}, effort)
    rows = []
    for (zipf, shape, slo_ms), rps in found.items():
        if slo_ms not in (TIGHT_MS, LOOSE_MS):
            continue
        best = max(rps[rival] for rival in ("Clockwork", "Nexus", "Shepherd"))
        said = "significant benefits" if slo_ms == TIGHT_MS else "all relatively good"
        over = round(rps["Symphony"] / best, 3) if best else None
        rows.append(
            Row(f"{_setup(zipf, shape)}, {slo_ms:g} ms: Symphony over the best rival", said, over, IDEAL)
        )
    for zipf in (0.0, 0.9):
        steady, bursty = (found[zipf, shape, LOOSE_MS] for shape in (1.0, 0.05))
        kept = {name: round(bursty[name] / steady[name], 2) for name in ("Nexus", "Symphony") if steady[name]}
        for name, ours in kept.items():
            paper = "does not work well" if name == "Nexus" else None
            rows.append(
                Row(
                    f"{_popularity(zipf)}, {LOOSE_MS:g} ms, {name}: goodput under bursts, of that under Poisson",
                    paper,
                    ours,
                )
            )
    bars: list[tuple[str, tuple[Value, ...]]] = [
        (f"{_setup(zipf, shape)}, {slo_ms:g} ms", tuple(round(one) for one in rps.values()))
        for (zipf, shape, slo_ms), rps in found.items()
    ]
    return Reproduction(
        "symphony-figure-11",
        "Symphony: SLO, popularity and bursts",
        f"Symphony, figure 11 (section 5.3): {count} models like table 2's ResNet50, {gpus} GPUs; the figure's bars are not labelled.",
        tuple(rows),
        (Grid("Goodput, requests/s:", (*SYSTEMS, "tenuto"), tuple(bars)),),
    )


def _setup(zipf: float, shape: float) -> str:
    return f"{_popularity(zipf)}, {'Poisson' if shape == 1 else f'gamma {shape:g}'}"


def _popularity(zipf: float) -> str:
    return f"Zipf {zipf:g}" if zipf else "equal"
