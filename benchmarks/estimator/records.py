"""Run times of single operators: three splits of each GPU's records, and GPUs that were never seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from profiles.estimator.gpus import RECORDED, gpu_spec
from profiles.estimator.graph import OperatorGraph
from profiles.estimator.operators import work_of
from profiles.estimator.own_records import evenly_chosen, own_gpu
from profiles.estimator.records import shipped_records
from profiles.estimator.regressors import Sample, TimeRegressor, one_thread
from profiles.estimator.work import ELEMENTWISE_OPS, Work

SPLITS = ("random", "sizes", "models")
SEED = 1
TEST_PART = 0.2
UNSEEN_RANKS = ((0.45, 0.55), (0.85, 1.0))
"""Of each class's records by roofline time: a gap in the middle, and everything that is larger."""
NEAR = 1.25
"""A record is like a model's operator if each of its sizes is within this factor …"""
NEAR_ELEMENTWISE = 1.01
"""… and, where only the number of elements counts, within this one: models have nearly every number."""
Mask = Any


def samples_of(gpu_type: str) -> list[Sample]:
    """Everything recorded on a GPU."""
    gpu = gpu_spec(gpu_type)
    return [Sample(record, gpu) for record in shipped_records(gpu_type)]


def random_split(samples: Sequence[Sample]) -> Mask:
    """True: held out."""
    return np.random.default_rng(SEED).random(len(samples)) < TEST_PART


def size_split(samples: Sequence[Sample]) -> Mask:
    """Whole ranges of sizes are held out, class by class."""
    held = np.zeros(len(samples), dtype=bool)
    ops = np.array([one.record.work.op for one in samples])
    sizes = np.array([one.gpu.roofline_ms(one.record.work) for one in samples])
    for op in set(ops.tolist()):
        places = np.flatnonzero(ops == op)
        ranks = np.empty(len(places))
        ranks[np.argsort(sizes[places], kind="stable")] = np.arange(len(places)) / len(places)
        for low, high in UNSEEN_RANKS:
            held[places] |= (ranks >= low) & (ranks < high)
    return held


def models_split(graphs: Iterable[OperatorGraph]) -> Callable[[Sequence[Sample]], Mask]:
    """What is like any operator of any of these models is held out, for all models at once."""
    known: dict[str, set[tuple[int, ...]]] = {}
    for graph in graphs:
        for work in work_of(graph.calls):
            for piece in work.pieces:
                for op in ELEMENTWISE_OPS if piece.op in ELEMENTWISE_OPS else (piece.op,):
                    known.setdefault(op, set()).add(_sizes(piece))
    logs = {op: np.log(np.array(sorted(sizes), dtype=float)) for op, sizes in known.items()}

    def split(samples: Sequence[Sample]) -> Mask:
        held = []
        for one in samples:
            of_models = logs.get(one.record.work.op)
            sizes = np.log(np.array(_sizes(one.record.work), dtype=float))
            near = NEAR_ELEMENTWISE if one.record.work.op in ELEMENTWISE_OPS else NEAR
            is_near = of_models is not None and bool(
                np.any(np.all(np.abs(of_models - sizes) <= np.log(near), axis=1))
            )
            held.append(is_near)
        return np.array(held)

    return split


def compared(known: Sequence[Sample], unseen: Sequence[Sample], variants: Sequence[str]) -> dict[str, Any]:
    """By variant and class: how many, median and 90th percentile of the error in percent; `all` together."""
    found: dict[str, Any] = {}
    works = [one.record.work for one in unseen]
    measured = np.array([one.record.latency_ms for one in unseen])
    ops = np.array([work.op for work in works])
    for variant in variants:
        with one_thread():
            times = TimeRegressor(known, variant)
            said = np.zeros(len(unseen))
            for gpu in dict.fromkeys(one.gpu for one in unseen):
                places = [place for place, one in enumerate(unseen) if one.gpu == gpu]
                said[places] = times.predict_ms([works[place] for place in places], gpu)
        wrong = 100 * np.abs(said / measured - 1)
        found[variant] = {
            op: [int(chosen.sum()), float(np.median(wrong[chosen])), float(np.quantile(wrong[chosen], 0.9))]
            for op in [*sorted(set(ops.tolist())), "all"]
            if (chosen := (ops == op) | (op == "all")).any()
        }
    return found


def on_split(
    gpu_type: str, name: str, graphs: Callable[[], Iterable[OperatorGraph]], variants: Sequence[str]
) -> dict[str, Any]:
    """One of SPLITS on one GPU's records."""
    samples = samples_of(gpu_type)
    split = (
        models_split(graphs()) if name == "models" else {"random": random_split, "sizes": size_split}[name]
    )
    held = split(samples)
    known = [one for one, is_out in zip(samples, held, strict=True) if not is_out]
    unseen = [one for one, is_out in zip(samples, held, strict=True) if is_out]
    found = compared(known, unseen, variants)
    print(gpu_type, name, {variant: rows["all"] for variant, rows in found.items()}, flush=True)
    return found


def on_unseen_gpus(variants: Sequence[str]) -> dict[str, Any]:
    """P100 learned from the two others; and both others learned from P100."""
    by_gpu = {gpu_type: samples_of(gpu_type) for gpu_type in RECORDED}
    newer = [*by_gpu["v100"], *by_gpu["a100"]]
    found = {"v100 + a100 -> p100": compared(newer, by_gpu["p100"], variants)}
    for gpu_type in ("v100", "a100"):
        found[f"p100 -> {gpu_type}"] = compared(by_gpu["p100"], by_gpu[gpu_type], variants)
    return found


def on_own_records(variants: Sequence[str]) -> dict[str, Any]:
    """Each GPU as if it were unknown: learned from as few records as `tenuto profile --kernels` measures, judged on all others."""
    found = {}
    for gpu_type in RECORDED:
        spec, records = gpu_spec(gpu_type), shipped_records(gpu_type)
        chosen = set(evenly_chosen(record.work for record in records))
        known = [record for record in records if record.work in chosen]
        own = own_gpu("unknown", None, spec.memory_bytes, spec.limits, spec.copy_gbps, known)
        unseen = [Sample(record, own) for record in records if record.work not in chosen]
        found[gpu_type] = compared([Sample(record, own) for record in known], unseen, variants)
        rates = (own.gflops / spec.gflops, own.bandwidth_gbps / spec.bandwidth_gbps)
        print(gpu_type, len(known), "own records; peak rates over the maker's:", rates, flush=True)
    return found


def _sizes(work: Work) -> tuple[int, ...]:
    return (work.output_elements,) if work.op in ELEMENTWISE_OPS else work.dims
