"""A look at a cluster as the page shows it: plain values for JSON, and nothing that grows without a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fabric.ids import SliceId
from fabric.messages import GpuReport, ModelInfo, SliceReport
from roles.observability.remembered import gpu_of
from roles.observability.units import shown_ms
from roles.page.alarms import alarms_of, is_missed
from roles.page.palette import Numbers
from roles.page.recent_history import STAGES, Lately
from roles.page.snapshot import Look
from roles.runtime.live_figures import LiveModel

MODELS_MAX: Final = 256
SLICES_MAX: Final = 512
LINES_MAX: Final = 12
MISSED_NAMED_MAX: Final = 3
_WORTH: Final = 0.15
"""Of a request's time: a part that is that much of it is named."""
STAGE_NAMES: Final[Mapping[str, str]] = {
    "preprocess": "decoding pictures",
    "held": "held for larger batches",
    "waited": "waiting for a free slice",
    "transfer": "inputs on their way",
    "queue": "in the worker's queue",
    "gpu": "running",
    "return": "outputs on their way back",
}


class Shown:
    """Remembers which number each model and slice has."""

    def __init__(self) -> None:
        self.models = Numbers()
        self.slices = Numbers()

    def state(self, look: Look, lately: Lately) -> dict[str, Any]:
        """All but the batches."""
        report = look.report
        listed = report.scheduler
        infos = sorted(listed.models, key=lambda one: one.model_id)[:MODELS_MAX]
        slices = sorted(listed.slices, key=lambda one: _by_gpu(one.slice_id))[:SLICES_MAX]
        self.models.keep(one.model_id for one in infos)
        self.slices.keep(one.slice_id for one in slices)
        standing, plan = listed.standing, listed.plan
        missed = sorted(
            one.model_id for one in listed.models if _is_missed(one, look.figures.models.get(one.model_id))
        )
        return {
            "cluster": {
                "scheduler": listed.role_id,
                "epoch": None if standing is None else standing.epoch,
                "takeovers": None if standing is None else standing.takeovers,
                "standbys": [] if standing is None else [one.scheduler_id for one in standing.standbys],
                "shards": len(report.shards),
                "frontends": sum(one.role_id.startswith("frontend-") for one in report.processes),
            },
            "models": self._models(look, lately, infos),
            "models_more": len(listed.models) - len(infos),
            "missed": {"count": len(missed), "named": missed[:MISSED_NAMED_MAX]},
            "gpus": self._gpus(look, lately, slices),
            "slices_more": len(listed.slices) - len(slices),
            "plan": None
            if plan is None
            else {
                "state": plan.state,
                "reason": plan.reason,
                "gpus": plan.gpus,
                "gpus_advised": plan.gpus_advised,
                "moves_done": plan.moves_done,
                "moves_failed": plan.moves_failed,
                "lately": list(plan.lately[-LINES_MAX:]),
                "unplaced": [
                    {"model": one.model_id, "rate_rps": one.rate_rps, "reason": one.reason}
                    for one in plan.unplaced[:LINES_MAX]
                ],
            },
            "alarms": [{"level": one.level, "about": one.about, "text": one.text} for one in alarms_of(look)],
        }

    # ------------------------------------------------------------ models

    def _models(self, look: Look, lately: Lately, infos: Sequence[ModelInfo]) -> list[dict[str, Any]]:
        listed = look.report.scheduler
        live = look.figures.models
        stages = lately.stages_ms(live)
        sizes = lately.batch_means()
        advised = {} if listed.plan is None else {one.model_id: one for one in listed.plan.models}
        found = []
        for info in infos:
            model_id = info.model_id
            own, advice = live.get(model_id), advised.get(model_id)
            parts = stages.get(model_id)
            found.append(
                {
                    "id": model_id,
                    "number": self.models.get(model_id),
                    "slo_ms": info.slo_ms,
                    "replicas": info.replicas,
                    "queued": listed.queued.get(model_id),
                    "rate_rps": None if own is None else _rounded(own.rate_rps),
                    "goodput_rps": None if own is None else _rounded(own.goodput_rps),
                    "bad_rate": None if own is None else own.bad_rate,
                    "late": 0 if own is None else own.late,
                    "dropped": {} if own is None else own.dropped,
                    "p50_ms": None if own is None else _rounded(own.p50_ms),
                    "p99_ms": None if own is None else _rounded(own.p99_ms),
                    "batch_mean": _rounded(sizes.get(model_id)),
                    "stages_ms": None if parts is None else [_rounded(one) for one in parts],
                    "planned_rps": None if advice is None else _rounded(advice.planned_rps),
                    "gpus_advised": None if advice is None else _rounded(advice.gpus),
                    "is_missed": _is_missed(info, own),
                    "says": _says(info, own, parts),
                }
            )
        return found

    # ------------------------------------------------------------ GPUs

    def _gpus(self, look: Look, lately: Lately, slices: Sequence[SliceReport]) -> list[dict[str, Any]]:
        reports = {f"{one.node_id}/gpu{one.info.gpu}": one for one in look.report.scheduler.gpus}
        busy = lately.busy()
        plan = look.report.scheduler.plan
        drained = set() if plan is None else {ref.name for ref in plan.drained}
        by_gpu: dict[str, list[SliceReport]] = {name: [] for name in reports}
        for one in slices:
            by_gpu.setdefault(gpu_of(one.slice_id), []).append(one)
        return [
            {
                "id": name,
                **_device(reports.get(name)),
                "is_drained": name in drained,
                "slices": [
                    {
                        "id": one.slice_id,
                        "number": self.slices.get(one.slice_id),
                        "share_percent": one.share_percent,
                        "state": one.state,
                        "reason": one.reason,
                        "models": list(one.models),
                        "batches": one.batches,
                        "requests": one.requests,
                        "busy": {
                            model: _rounded(part)
                            for model, part in sorted(busy.get(one.slice_id, {}).items())
                        },
                    }
                    for one in its
                ],
            }
            for name, its in sorted(by_gpu.items(), key=lambda one: _by_gpu(SliceId(f"{one[0]}/0")))
            if its or name in reports
        ]


def _device(gpu: GpuReport | None) -> dict[str, Any]:
    if gpu is None:
        return {"type": "", "device": "", "sharing": None, "sensors": None, "throttle": []}
    sample = gpu.sample
    sensors = None
    if sample is not None and gpu.info.device == "cuda":
        sensors = {
            "busy_percent": sample.busy_percent,
            "memory_used_bytes": sample.memory_used_bytes,
            "memory_bytes": gpu.info.memory_bytes,
            "power_w": sample.power_w,
            "sm_mhz": sample.sm_mhz,
            "temperature_c": sample.temperature_c,
        }
    return {
        "type": gpu.info.name or gpu.info.gpu_type,
        "device": gpu.info.device,
        "sharing": None if gpu.sharing is None else gpu.sharing.mode,
        "sensors": sensors,
        "throttle": [] if sample is None else list(sample.throttle),
    }


def _by_gpu(slice_id: SliceId) -> tuple[str, int, int]:
    """`here/gpu10/0` comes after `here/gpu2/0`."""
    gpu, _, number = slice_id.rpartition("/")
    node, _, device = gpu.rpartition("/gpu")
    return node, _number(device), _number(number)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _is_missed(info: ModelInfo, live: LiveModel | None) -> bool:
    return info.replicas == 0 or is_missed(live)


def _says(info: ModelInfo, live: LiveModel | None, stages_ms: Sequence[float] | None) -> str:
    """In a sentence how it fares, and where its time goes where that is known. A simulation is asked for the rest (`tenuto why`)."""
    slo = shown_ms(info.slo_ms)
    if info.replicas == 0:
        coming = f"; one should be ready in {shown_ms(info.coming_in_ms)}" if info.coming_in_ms else ""
        return f"No ready slice hosts it{coming}."
    if live is None:
        return "No frontend of this host counts it."
    if live.bad_rate is None:
        return (
            f"No request was answered in the last {int(live.window_s)} s."
            if live.rate_rps
            else "No requests."
        )
    share = f"{live.bad_rate:.1%} of the last {int(live.window_s)} s late or dropped"
    verdict = f"Misses its SLO of {slo}: {share}" if is_missed(live) else f"Keeps its SLO of {slo}: {share}"
    return f"{verdict}.{_goes(stages_ms)}"


def _goes(stages_ms: Sequence[float] | None) -> str:
    if stages_ms is None or not sum(stages_ms):
        return ""
    total_ms = sum(stages_ms)
    largest = sorted(zip(stages_ms, STAGES, strict=True), reverse=True)
    named = [f"{shown_ms(ms)} {STAGE_NAMES[stage]}" for ms, stage in largest[:3] if ms >= _WORTH * total_ms]
    return f" The first of a batch takes {shown_ms(total_ms)}: {', '.join(named)}."
