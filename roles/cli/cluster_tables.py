"""What `tenuto status`, `models list` and `top` show of a running cluster, as tables that fit 80 columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fabric.ids import ModelId
from fabric.messages import GpuReport, ModelInfo, PlanReport, SliceReport, StatusListed, UnplacedInfo
from policies.scaling import RELEASE_WINDOW_MS
from policies.slo import BAD_RATE_ALLOWED
from roles.runtime.live_figures import LiveModel
from roles.runtime.running_cluster import ClusterReport, ProcessReport

MODELS_SHOWN = 4
LOOP_COLUMNS = (
    "timer_late_p50_ms",
    "timer_late_p99_ms",
    "timer_late_ms_max",
    "turn_ms_max",
    "collect_ms_max",
)
MODEL_COLUMNS = ("model", "r/s", "good/s", "bad %", "late", "drops", "p50 ms", "p99 ms", "SLO ms", "repl.")
UNKNOWN = "-"


def plain_table(title: str, *columns: str, names: int = 1) -> Table:
    """One whose first `names` columns are texts, which may be folded; the others are numbers, which are never cut."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        if number < names:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def unplaced_line(one: UnplacedInfo) -> str:
    """What found no place, and why."""
    rate = "" if one.rate_rps is None else f" ({one.rate_rps:.2f} r/s)"
    return f"unplaced: {one.model_id}{rate}: {one.reason}"


def advice_line(plan: PlanReport, late: str = "") -> str:
    """How many GPUs the load asks for; why it may be all of them, though a run of `tenuto bench` asks for fewer.

    `late`: what of a host is, by which requests are lost that no GPU would save.
    """
    line = f"the load asks for {plan.gpus_advised} of {plan.gpus} GPUs"
    if late and plan.gpus_advised > plan.gpus:
        return f"{line} (but {late}, and what that loses counts too: see tenuto why)"
    if plan.gpus_advised != plan.gpus or plan.gpus < 2:
        return line
    return f"{line} (for fewer only when some were idle for {RELEASE_WINDOW_MS / 60_000:g} min)"


def drained_line(listed: StatusListed, roles: Sequence[str] = ()) -> str:
    """What `tenuto drain` took out of use: roles, whole nodes by their names, else GPUs; empty where there is none."""
    drained = () if listed.plan is None else listed.plan.drained
    if not drained and not roles:
        return ""
    there = Counter(report.node_id for report in listed.gpus)
    counts = Counter(ref.node_id for ref in drained)
    names = [ref.node_id if counts[ref.node_id] == there[ref.node_id] else ref.name for ref in drained]
    return f"Drained: {', '.join(dict.fromkeys([*roles, *names]))} (tenuto drain --back uses it again)"


def process_table(report: ClusterReport) -> Table:
    """The roles of the run directory and the workers of its agents."""
    table = Table(title="Processes", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("process", overflow="fold")
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("addresses", overflow="fold")
    for process in report.processes:
        addresses = "\n".join(
            f"{purpose} {address}" for purpose, its in process.addresses.items() for address in its
        )
        counters = report.counters.get(process.role_id, {})
        table.add_row(process.role_id, str(process.pid), _state_of(process, counters), addresses)
    for worker_id, pid in report.workers.items():
        table.add_row(worker_id, str(pid), "alive", "")
    return table


def _state_of(process: ProcessReport, counters: Mapping[str, float]) -> Text:
    """`not ready`: it takes no new work, for it has just begun, is drained or has no scheduler."""
    if not process.alive:
        return Text("dead", "red")
    return Text("alive") if counters.get("is_ready", 1.0) else Text("not ready", "yellow")


def model_table(listed: StatusListed, live: Mapping[ModelId, LiveModel], title: str = "Models") -> Table:
    """A row a model: what came and how it fared in the last seconds, where its frontends tell."""
    table = plain_table(title, *MODEL_COLUMNS)
    for model in listed.models:
        its = live.get(model.model_id)
        heads = f": {shortened([head.model_id for head in model.heads])}" if model.heads else ""
        table.add_row(f"{model.model_id}{heads}", *live_cells(its, model.slo_ms), str(model.replicas))
    return table


def application_table(applications: Sequence[ModelInfo], live: Mapping[ModelId, LiveModel]) -> Table:
    """A row an application, counted from end to end; replicas: of the needed stage with the fewest."""
    columns = ("application", *MODEL_COLUMNS[1:])
    table = plain_table("Applications", *columns)
    for one in applications:
        name = f"{one.model_id}: {shortened(one.asks)}"
        table.add_row(name, *live_cells(live.get(one.model_id), one.slo_ms), str(one.replicas))
    return table


def live_cells(its: LiveModel | None, slo_ms: float) -> Sequence[Text | str]:
    """Rate, goodput, bad rate, late and dropped ones, p50, p99 and SLO."""
    slo = brief(slo_ms)
    if its is None:
        return [UNKNOWN] * 7 + [slo]
    bad = UNKNOWN if its.bad_rate is None else f"{100 * its.bad_rate:.1f}"
    is_bad = its.bad_rate is not None and its.bad_rate >= BAD_RATE_ALLOWED
    is_slow = its.p99_ms is not None and its.p99_ms > slo_ms
    return [
        brief(its.rate_rps),
        brief(its.goodput_rps),
        Text(bad, "red" if is_bad else ""),
        str(its.late),
        str(its.drops),
        brief(its.p50_ms),
        Text(brief(its.p99_ms), "red" if is_slow else ""),
        slo,
    ]


def slice_table(slices: Sequence[SliceReport]) -> Table:
    """What runs where."""
    table = Table(title="Slices", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("slice", "state", "models"):
        table.add_column(column, overflow="fold")
    for column in ("batches", "requests"):
        table.add_column(column, justify="right", no_wrap=True)
    for item in slices:
        state = f"{item.state}: {item.reason}" if item.reason else item.state
        table.add_row(item.slice_id, state, shortened(item.models), str(item.batches), str(item.requests))
    return table


def shard_table(report: ClusterReport) -> Table:
    """Who schedules each shard, and what is in it."""
    columns = ("shard", "scheduler", "stand by", "models", "epoch", "slices", "GPUs")
    table = plain_table("Shards", *columns, names=4)
    for one in report.shards:
        if not one.scheduler:
            table.add_row(str(one.shard), "none answers", *("?" * 5))
            continue
        models = f"{len(one.models)}: {shortened(one.models)}"
        standbys = ", ".join(one.standbys) or UNKNOWN
        numbers = (str(one.epoch), str(one.slices), str(one.gpus))
        table.add_row(str(one.shard), one.scheduler, standbys, models, *numbers)
    return table


def loop_table(report: ClusterReport) -> Table:
    """How late each role's timers were, its longest turn and its longest pause for collecting garbage."""
    columns = ("process", "late p50", "late p99", "late max", "longest turn", "longest pause")
    table = plain_table("Loops (ms, since their start)", *columns)
    for role_id, counters in report.counters.items():
        if LOOP_COLUMNS[0] in counters:
            table.add_row(role_id, *(f"{counters[name]:.3f}" for name in LOOP_COLUMNS))
    return table


def gpu_tables(gpus: Sequence[GpuReport]) -> list[Table]:
    """Real GPUs, with how they are shared and what their sensors said; nothing where there is none."""
    real = [gpu for gpu in gpus if gpu.info.device == "cuda"]
    if not real:
        return []
    table = Table(title="GPUs", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("gpu", "type", "shared by"):
        table.add_column(column, overflow="fold")
    for column in ("busy", "GB", "W", "MHz", "°C"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("throttled by", overflow="fold")
    table.add_column("age s", justify="right", no_wrap=True)
    for gpu in real:
        sharing, sample, info = gpu.sharing, gpu.sample, gpu.info
        shared = "?" if sharing is None else sharing.mode
        if sharing is not None and sharing.reason:
            shared = f"{shared}: {sharing.reason}"
        measured = ["?"] * 6
        if sample is not None:
            used = None if sample.memory_used_bytes is None else sample.memory_used_bytes / 1e9
            measured = [
                _figure(sample.busy_percent, " %"),
                f"{_figure(used)}/{info.memory_bytes / 1e9:.0f}",
                _figure(sample.power_w),
                _figure(sample.sm_mhz),
                _figure(sample.temperature_c),
                ", ".join(sample.throttle),
            ]
        age_s = None if gpu.sampled_ago_ms is None else gpu.sampled_ago_ms / 1e3
        table.add_row(
            f"{gpu.node_id}/gpu{info.gpu}", info.name or info.gpu_type, shared, *measured, _figure(age_s)
        )
    return [table]


def shortened(models: Sequence[ModelId]) -> str:
    """The first ones by name."""
    more = f", … {len(models) - MODELS_SHOWN} more" if len(models) > MODELS_SHOWN else ""
    return ", ".join(models[:MODELS_SHOWN]) + more


def brief(value: float | None) -> str:
    """With three digits that say something, and at most five characters up to 99,999."""
    if value is None:
        return UNKNOWN
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{decimals}f}" if value else "0"


def _figure(value: float | None, unit: str = "") -> str:
    return "?" if value is None else f"{value:.0f}{unit}"
