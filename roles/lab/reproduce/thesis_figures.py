"""The thesis' bars: figures 6.1, 6.10 and 6.15, each policy in each setting.

The thesis prints no numbers on these bars. What it says of a figure in words comes first, then grids: the emulated goodput
under the thesis' router (`fixed`, MAX_WAIT 100 ms, shared by batch size) and under `deferred`, and the policies' own predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roles.lab.parallel import executor_of
from roles.lab.reproduce.report import Grid, Reproduction, Row
from roles.lab.reproduce.thesis_runs import Contender, Played, contenders, play
from roles.lab.reproduce.thesis_settings import FIGURE_6_1, FIGURE_6_10, FIGURE_6_15, FigureSetting

_Bars = dict[tuple[str, str], Played]
"""By setting and label."""


def figure_6_1() -> Reproduction:
    """Five vision models on one to six GPUs."""
    bars = _play_all(FIGURE_6_1)

    def good(label: str, gpu_count: int) -> float:
        return round(bars[(FIGURE_6_1[gpu_count - 1].name, label)].goodput_rps("fixed"), 1)

    best = max(("Usher", "WAO-Usher", "AO-MILP", "WSM-MILP", "iGniter"), key=lambda label: good(label, 6))
    said = (
        Row(
            "6 GPUs: the policy with the highest goodput",
            "Usher",
            best,
            "with its second stage AO-MILP has Usher's batches there, so equal goodput; the first is named",
        ),
        Row(
            "WAO-Usher: goodput on 6 GPUs less that on 3, requests/s",
            "no significant improvement",
            good("WAO-Usher", 6) - good("WAO-Usher", 3),
        ),
        Row(
            "AO-MILP less Usher on 3 GPUs, requests/s",
            "ahead",
            round(good("AO-MILP", 3) - good("Usher", 3), 1),
        ),
        Row(
            "AO-MILP less Usher on 4 GPUs, requests/s",
            "ahead",
            round(good("AO-MILP", 4) - good("Usher", 4), 1),
        ),
        Row("Usher: from 2 to 3 GPUs, requests/s", "marginal", round(good("Usher", 3) - good("Usher", 2), 1)),
        Row(
            "Usher: from 3 to 4 GPUs, requests/s",
            "significant",
            round(good("Usher", 4) - good("Usher", 3), 1),
        ),
        Row(
            "WSM-MILP on 5 GPUs over Usher on 6",
            "competitive",
            round(good("WSM-MILP", 5) / good("Usher", 6), 3),
        ),
        Row(
            "iGniter on 6 GPUs over the ideal", "poor", round(good("iGniter", 6) / FIGURE_6_1[5].ideal_rps, 3)
        ),
    )
    return Reproduction(
        "thesis-figure-6-1",
        "Thesis: five vision models on one to six GPUs",
        "Figure 6.1, section 6.2.1: 500 requests/s each, SLO 200 ms.",
        tuple(said),
        _grids(bars),
    )


def figure_6_10() -> Reproduction:
    """Vision and language models on one to eight GPUs; AO-MILP is not part of it."""
    bars = _play_all(FIGURE_6_10, without=("AO-MILP",))

    def good(label: str, gpu_count: int) -> float:
        return round(bars[(FIGURE_6_10[gpu_count - 1].name, label)].goodput_rps("fixed"), 1)

    ideal_rps = FIGURE_6_10[0].ideal_rps
    said = (
        Row(
            "iGniter on 6 GPUs over the ideal",
            "near 1",
            round(good("iGniter", 6) / ideal_rps, 3),
            "its coefficients here are estimates, made for shares that slow down in proportion; under `sm` a small "
            "share costs more than that",
        ),
        Row(
            "WAO-Usher: goodput on 8 GPUs less that on 1, requests/s",
            "minimal",
            round(good("WAO-Usher", 8) - good("WAO-Usher", 1), 1),
        ),
        Row(
            "WSM-MILP less Usher on 5 GPUs, requests/s",
            "significantly behind",
            round(good("WSM-MILP", 5) - good("Usher", 5), 1),
        ),
        Row("WSM-MILP on 7 GPUs over the ideal", "near 1", round(good("WSM-MILP", 7) / ideal_rps, 3)),
    )
    return Reproduction(
        "thesis-figure-6-10",
        "Thesis: vision and language models on one to eight GPUs",
        "Figure 6.10, section 6.2.2: 300 requests/s each, SLO 300 ms.",
        tuple(said),
        _grids(bars),
    )


def figure_6_15() -> Reproduction:
    """Rate by SLO: five vision models on four GPUs."""
    bars = _play_all(FIGURE_6_15)

    def good(label: str, slo_ms: int, total_rps: int) -> float:
        return round(bars[(f"6.15/{slo_ms}-ms/{total_rps}-rps", label)].goodput_rps("fixed"), 1)

    said = []
    for slo_ms in (150, 250, 350):
        falls = good("WSM-MILP", slo_ms, 4000) - good("WSM-MILP", slo_ms, 3000)
        rises = good("WSM-MILP", slo_ms, 5000) - good("WSM-MILP", slo_ms, 4000)
        said.append(Row(f"{slo_ms} ms, WSM-MILP from 3000 to 4000, requests/s", "falls", round(falls, 1)))
        said.append(Row(f"{slo_ms} ms, WSM-MILP from 4000 to 5000, requests/s", "rises", round(rises, 1)))
    return Reproduction(
        "thesis-figure-6-15",
        "Thesis: rate by SLO on four GPUs",
        "Figure 6.15, section 6.3: five vision models with a fifth of the rate each.",
        tuple(said),
        _grids(bars),
    )


def _play_all(settings: Sequence[FigureSetting], without: Sequence[str] = ()) -> _Bars:
    jobs: list[tuple[FigureSetting, Contender]] = [
        (setting, contender)
        for setting in settings
        for contender in contenders(setting)
        if contender.label not in without
    ]
    with executor_of(None) as (executor, _):
        played = executor.map(play, *zip(*jobs, strict=True))
        return {(one.setting.name, one.contender.label): one for one in played}


def _grids(bars: _Bars) -> tuple[Grid, ...]:
    labels = tuple(dict.fromkeys(label for _, label in bars))
    ideal_rps = {setting: played.setting.ideal_rps for (setting, _), played in bars.items()}

    def grid(title: str, value: Callable[[Played], float], *, has_ideal: bool = True) -> Grid:
        rows = tuple(
            (
                setting,
                (
                    *((ideal,) if has_ideal else ()),
                    *(round(value(bars[setting, label]), 1) for label in labels),
                ),
            )
            for setting, ideal in ideal_rps.items()
        )
        return Grid(title, ("ideal", *labels) if has_ideal else labels, rows)

    return (
        grid(
            "Emulated goodput under the thesis' router (`fixed`, shared by batch size), requests/s:",
            lambda played: played.goodput_rps("fixed"),
        ),
        grid("Emulated goodput under `deferred`, requests/s:", lambda played: played.goodput_rps("deferred")),
        grid(
            "The policies' own predictions, requests/s:",
            lambda played: played.plan.expected_goodput_rps or 0.0,
        ),
        grid("GPUs used:", lambda played: len(played.plan.gpus_used), has_ideal=False),
    )
