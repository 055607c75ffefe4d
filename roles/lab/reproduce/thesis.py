"""The thesis' worked examples (section 5.4) and the observations of its evaluation (sections 6.2 and 6.3).

Elvinger, 'Towards resource and interference-aware scheduling of ML workloads', ETH Zurich, 2024. Figures are in
`thesis_figures.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fabric.ids import ModelId
from policies.placement.common.base import Placement
from profiles.interference import Running
from roles.lab.reproduce.report import Reproduction, Row
from roles.lab.reproduce.thesis_runs import (
    IGNITER,
    Played,
    contenders,
    describe,
    expected,
    play,
    play_slices,
)
from roles.lab.reproduce.thesis_settings import (
    AO_GROUPS,
    FIGURE_5_5,
    FIGURE_5_6,
    FIGURE_5_7,
    FIGURE_6_1,
    FIGURE_6_10,
    FIGURE_6_15,
    GPU_TYPE,
    WAO_GROUPS,
    FigureSetting,
)

_TIDY = "the solver's choice among equal optima; our second stage takes the least run time"


def worked_examples() -> Reproduction:
    """Figures 5.5 to 5.10: Usher's three poor cases, and the MILP on them."""
    cases = (
        ("5.5", "usher", FIGURE_5_5, 800.0, "t5 on three GPUs, resnet50 32 on the fourth"),
        ("5.6", "usher", FIGURE_5_6, 793.57, "bert on three GPUs, resnet50 on the fourth"),
        ("5.7", "usher", FIGURE_5_7, None, "resnet50, alexnet and mobilenet_v2 on a GPU each, one idle"),
        ("5.8b", "ao-milp", FIGURE_5_5, 1092.04, "alexnet 4, resnet50 4, t5 16 twice"),
        ("5.9b", "ao-milp", FIGURE_5_6, 1331.19, None),
        ("5.10b", "ao-milp", FIGURE_5_7, None, "all GPUs in use"),
    )
    rows = []
    for figure, policy, setting, goodput_rps, placement in cases:
        plan = expected(setting, policy)
        rows.append(Row(f"{figure} {policy}: expected goodput, requests/s", goodput_rps, _rounded(plan)))
        rows.append(Row(f"{figure} {policy}: placement", placement, describe(plan)))
    return Reproduction(
        "thesis-worked-examples",
        "Thesis: Usher's placement order and multiples, and the MILP beside them",
        "Figures 5.5 to 5.10, sections 5.4.1 to 5.4.3; achieved occupancy as Creq.",
        tuple(rows),
    )


def vision_observations() -> Reproduction:
    """Figures 6.2 to 6.9: five vision models at 500 requests per second and 200 ms."""
    usher: dict[str, Any] = {"groups": AO_GROUPS}
    three, four = (expected(FIGURE_6_1[n - 1], "usher", **usher) for n in (3, 4))
    needed = next(s.gpu_count for s in FIGURE_6_1 if not expected(s, "usher", **usher).unplaced)
    wao = expected(FIGURE_6_1[3], "wao-usher", groups=WAO_GROUPS)
    share = {str(p.models[0].model_id): p.share_percent for p in wao.slices if p.gpu == 0}
    neighbours = [Running(ModelId(m), b, share[m]) for m, b in (("vgg19", 16), ("alexnet", 4))]
    squeezed = _slowdown(FIGURE_6_1[3], Running(ModelId("resnet50"), 4, share["resnet50"]), neighbours)
    beside_alexnet_ms = 6.8 * _slowdown(
        FIGURE_6_1[4], Running(ModelId("resnet50"), 4), [Running(ModelId("alexnet"), 4)]
    )
    six = FIGURE_6_1[5]
    small, large = (play_slices(six, _exclusive(batches)) for batches in (_USHER_6_5A, _AO_MILP_6_5B))
    igniter = IGNITER.policy
    igniter_plan = six.config(igniter, family=IGNITER.family).place()
    rows = (
        Row(
            "6.2 Usher, 3 GPUs: replicas of efficientnet_b7",
            "1 of batch 16",
            _replicas(three, "efficientnet_b7"),
        ),
        Row(
            "6.2 Usher, 4 GPUs: replicas of efficientnet_b7",
            "2 of batch 8",
            _replicas(four, "efficientnet_b7"),
        ),
        Row("6.5a Usher: GPUs that serve all rates", 6.0, float(needed)),
        Row("6.3 WAO-Usher, 4 GPUs: GPUs used", 3.0, float(len(wao.gpus_used))),
        Row("6.3 WAO-Usher: on GPU 0", "alexnet, resnet50, vgg19", ", ".join(sorted(share))),
        Row(
            "6.4a resnet50 4 at a share of 17.55 %, slowdown on GPU 0",
            "about 4",
            round(squeezed, 2),
            "interference `sm` was calibrated on this observation and on that of figure 6.11",
        ),
        *_efficientnet_rows(small, large),
        Row(
            "6.7b resnet50 4 beside alexnet 4: run time, ms",
            "about 8",
            round(beside_alexnet_ms, 2),
        ),
        Row(
            "6.8 iGniter: GPUs that serve all by its own model",
            5.0,
            float(len(igniter_plan.gpus_used)),
            "the thesis' coefficients were never published; ours are estimates",
        ),
    )
    return Reproduction(
        "thesis-vision-observations",
        "Thesis: five vision models, what was observed",
        "Figures 6.2 to 6.9, section 6.2.1.",
        rows,
    )


def language_observations() -> Reproduction:
    """Figures 6.11 to 6.14: two vision and two language models at 300 requests per second and 300 ms."""
    wao = expected(FIGURE_6_10[3], "wao-usher")
    bert_share = next(p.share_percent for p in wao.slices if p.models[0].model_id == "bert")
    bert_ms = 34.1 * _slowdown(FIGURE_6_10[3], Running(ModelId("bert"), 4, bert_share), [])
    rows = [
        Row("6.11 WAO-Usher, 4 GPUs: GPUs used", 3.0, float(len(wao.gpus_used))),
        Row("6.11 WAO-Usher: placement", "bert and gpt2 on each GPU", describe(wao)),
        Row(
            "6.11 bert 4 alone at its share: run time, ms",
            "about 180",
            round(bert_ms, 1),
            "interference `sm` was calibrated on this observation and on that of figure 6.4",
        ),
        Row(
            "6.12a Usher, 5 GPUs: replicas of gpt2", "3", _replicas(expected(FIGURE_6_10[4], "usher"), "gpt2")
        ),
    ]
    for gpu_count, bert, gpt2 in ((5, "2", "2"), (6, "2", "3"), (7, "3", "3")):
        plan = expected(FIGURE_6_10[gpu_count - 1], "wsm-milp")
        rows.append(
            Row(f"6.12b, 6.13 WSM-MILP, {gpu_count} GPUs: replicas of bert", bert, _replicas(plan, "bert"))
        )
        rows.append(
            Row(f"6.12b, 6.13 WSM-MILP, {gpu_count} GPUs: replicas of gpt2", gpt2, _replicas(plan, "gpt2"))
        )
    by_label = {c.label: c for c in contenders(FIGURE_6_10[4])}
    usher, milp = (play(FIGURE_6_10[4], by_label[label], ("fixed",)) for label in ("Usher", "WSM-MILP"))
    rows += [
        Row(
            f"6.12 {played.contender.label}, 5 GPUs: emulated goodput of {model}, requests/s",
            stated,
            round(played.model_goodput_rps("fixed", model), 1),
        )
        for played, model, stated in (
            (usher, "gpt2", "most within the SLO"),
            (milp, "bert", "no significant contribution"),
            (milp, "gpt2", "no significant contribution"),
        )
    ]
    return Reproduction(
        "thesis-language-observations",
        "Thesis: vision and language models, what was observed",
        "Figures 6.11 to 6.14, section 6.2.2.",
        tuple(rows),
    )


def rate_observations() -> Reproduction:
    """Figures 6.16 and 6.18: plans as rates rise, at an SLO of 250 ms on four GPUs."""
    settings = {round(s.ideal_rps): s for s in FIGURE_6_15 if s.slo_ms == 250}
    plans = {rate: expected(settings[rate], "wsm-milp") for rate in (3000, 4000, 5000)}
    rows = [
        Row("6.16a WSM-MILP, 3000 requests/s: vgg19", "1 of batch 16", _replicas(plans[3000], "vgg19")),
        Row("6.16b WSM-MILP, 4000 requests/s: vgg19", "1 of batch 128", _replicas(plans[4000], "vgg19")),
    ]
    stated = {"resnet50": "1 of batch 4", "densenet121": "1 of batch 16", "efficientnet_b7": "3"}
    for model, paper in stated.items():
        both = {_replicas(plans[rate], model) for rate in (3000, 4000)}
        rows.append(Row(f"6.16a, b {model}", paper, " then ".join(sorted(both))))
    rows += [
        Row("6.16c WSM-MILP, 5000 requests/s: resnet50", "2", _replicas(plans[5000], "resnet50")),
        Row(
            "6.16c WSM-MILP, 5000 requests/s: densenet121",
            "3 of batch 8",
            _replicas(plans[5000], "densenet121"),
        ),
    ]
    for rate, note in ((3000, _TIDY), (5000, "")):
        plan = expected(settings[rate], "ao-milp")
        ours = _replicas(plan, "densenet121")
        rows.append(Row(f"6.18 AO-MILP, {rate} requests/s: densenet121", "1 of batch 64", ours, note))
    return Reproduction(
        "thesis-rate-observations",
        "Thesis: rates and SLOs, what was observed",
        "Figures 6.16 and 6.18, section 6.3; SLO 250 ms, four GPUs.",
        tuple(rows),
    )


def filling() -> Reproduction:
    """Figure 6.19: whether batches of 64 fill within the router's wait."""
    rows: list[Row] = []
    for rate_rps, build_ms, reached in (
        (600.0, 107.0, "most never reach 64"),
        (1000.0, 64.0, "most reach 64"),
    ):
        rows += _filling_rows(rate_rps, build_ms, reached)
    return Reproduction(
        "thesis-filling",
        "Thesis: batches that take too long to form",
        "Figure 6.19, section 6.3; densenet121 with a target of 64, MAX_WAIT 100 ms.",
        tuple(rows),
    )


_USHER_6_5A = {
    "alexnet": (4, 1),
    "densenet121": (16, 1),
    "efficientnet_b7": (8, 2),
    "resnet50": (4, 1),
    "vgg19": (16, 1),
}
_AO_MILP_6_5B = {**_USHER_6_5A, "efficientnet_b7": (64, 2), "resnet50": (64, 1)}


def _exclusive(batches: Mapping[str, tuple[int, int]]) -> Sequence[Mapping[str, Any]]:
    """A GPU for each replica of (batch, replicas)."""
    replicas = [(model, batch) for model, (batch, count) in batches.items() for _ in range(count)]
    return [{"gpu": gpu, "models": [{"model": m, "batch": b}]} for gpu, (m, b) in enumerate(replicas)]


def _efficientnet_rows(small: Played, large: Played) -> tuple[Row, ...]:
    """Figure 6.6: the same throughput, and less of it in time with batches of 64."""
    offered = (
        "the thesis offers 433 of 500 requests/s; its network and worker add delays that ours do not have"
    )
    rows = []
    for policy, batch, played, throughput, goodput in (
        ("Usher", 8, small, 425.75, 360.61),
        ("AO-MILP", 64, large, 425.25, 143.73),
    ):
        outcome = played.outcomes["fixed"]
        one = outcome.models[ModelId("efficientnet_b7")]
        ran = round((one.good + one.late) / outcome.duration_s, 1)
        good = round(one.good / outcome.duration_s, 1)
        what = f"6.6 {policy}, 6 GPUs, two efficientnet_b7 {batch}"
        rows.append(Row(f"{what}: throughput, requests/s", throughput, ran, offered))
        rows.append(Row(f"{what}: goodput, requests/s", goodput, good, offered))
    return tuple(rows)


def _filling_rows(rate_rps: float, build_ms: float, reached: str) -> tuple[Row, Row]:
    """densenet121 alone, as it had a GPU of its own."""
    alone = FigureSetting("6.19", "figure 6.19, section 6.3", (("densenet121", rate_rps),), 250, 1)
    played = play_slices(alone, [{"gpu": 0, "models": [{"model": "densenet121", "batch": 64}]}])
    mean = played.outcomes["fixed"].models[ModelId("densenet121")].batch_mean
    return (
        Row(f"6.19 time to fill 64 at {rate_rps:g} requests/s, ms", build_ms, round(64_000 / rate_rps, 1)),
        Row(
            f"6.19 densenet121, target 64, {rate_rps:g} requests/s: mean batch under `fixed`",
            reached,
            None if mean is None else round(mean, 1),
        ),
    )


def _slowdown(setting: FigureSetting, running: Running, neighbours: Sequence[Running]) -> float:
    device = setting.config().device_model(GPU_TYPE)
    alone = Running(running.model_id, running.batch_size)
    return device.exec_ms(running, neighbours) / device.exec_ms(alone)


def _replicas(plan: Placement, model: str) -> str:
    found = Counter(m.batch for planned in plan.slices for m in planned.models if m.model_id == model)
    return ", ".join(f"{count} of batch {batch}" for batch, count in sorted(found.items())) or "0"


def _rounded(plan: Placement) -> float | None:
    return None if plan.expected_goodput_rps is None else round(plan.expected_goodput_rps, 2)
