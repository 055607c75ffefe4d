"""`tenuto profile`: measures what a model costs on a device of this host, and writes it down."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import PREFIX, HeadSpec, LoaderSpec
from fabric.policy_options import shown
from profiles.estimator.records import write_records
from profiles.measured import MeasuredProfile
from profiles.model import BATCH_SIZE_LIMIT, STAGES_MAX
from profiles.profilers.plan import powers_of_two
from profiles.store import write_measured
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import (
    WORKERS_MAX,
    FloatRange,
    IntRange,
    OutputPath,
    json_option,
    painters,
    plot_option,
    refuse_others,
    writing,
)
from roles.cli.progress import progress
from roles.config.checks import finite, whole
from roles.config.model_loaders import DTYPES, loader_spec
from roles.config.read_config import load_config
from roles.config.sections import LoaderSection
from roles.profiling.session import Ask, Session

BATCH_MAX_DEFAULT = 32
SECONDS = FloatRange(0, 86_400, is_low_allowed=False)


@click.command()
@click.argument("model", required=False)
@click.option(
    "--file",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A workload file; MODEL is the name of one of its models, which has a loader.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda, cuda:1, …")
@click.option("--batches", help="Batch sizes, such as 1,4,16.  [default: powers of two up to --max-batch]")
@click.option(
    "--max-batch",
    type=IntRange(1, BATCH_SIZE_LIMIT),
    default=BATCH_MAX_DEFAULT,
    show_default=True,
    help="Of the batches that are measured without --batches.",
)
@click.option("--shares", help="MPS shares in percent, such as 20,50; the whole GPU is always measured.")
@click.option("--igniter", is_flag=True, help="Also iGniter's configurations, groups and coefficients.")
@click.option("--stages", help="Also what the stages take when the model is cut into so many, such as 2,4.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the weights, instead of the file's.")
@click.option(
    "--gpu-type", help="Its word in workload files.  [default: cpu or cuda; with --kernels the GPU's name]"
)
@click.option("--seconds", type=SECONDS, default=1.0, show_default=True, help="For each measurement.")
@click.option(
    "--limit",
    "limit_s",
    type=SECONDS,
    default=300.0,
    show_default=True,
    help="For each, in s; then it is given up.",
)
@click.option(
    "--threads", type=IntRange(1, WORKERS_MAX), default=1, show_default=True, help="Of torch, on a CPU."
)
@click.option(
    "--out",
    type=OutputPath(),
    help="The JSON file, or with --kernels the records.  [default: MODEL-TYPE.json, TYPE-kernels.csv.gz]",
)
@click.option(
    "--estimate",
    "is_estimate",
    is_flag=True,
    help="Not measured: from the operator graph and kernel records; needs --gpu, and no GPU.",
)
@click.option(
    "--gpu",
    "gpu",
    help="With --estimate: v100, v100-sxm2, a100, p100; t4, l4, h100 roughly; or the GPU of --records.",
)
@click.option(
    "--records",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --estimate: kernel records of your own GPU (see --kernels) to learn from too.",
)
@click.option(
    "--estimate-check",
    "check",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead of MODEL: compare the estimator with these kernel records (.csv.gz), which it does not learn from.",
)
@click.option(
    "--kernels",
    "is_kernels",
    is_flag=True,
    help="Instead of MODEL: kernel records of this GPU (--device cuda), for --estimate --records.",
)
@plot_option
@json_option
def profile(
    model: str | None,
    file: Path | None,
    device: str,
    batches: str | None,
    max_batch: int,
    shares: str | None,
    igniter: bool,  # noqa: FBT001  click's flag
    stages: str | None,
    dtype: str | None,
    gpu_type: str | None,
    seconds: float,
    limit_s: float,
    threads: int,
    out: Path | None,
    is_estimate: bool,  # noqa: FBT001  click's flag
    gpu: str | None,
    records: Path | None,
    check: Path | None,
    is_kernels: bool,  # noqa: FBT001  click's flag
    plot_path: Path | None,
    as_json: bool,  # noqa: FBT001  click's flag
) -> None:
    """Measure MODEL's run times, memory and, on CUDA, power, clocks and kernels; or estimate them without a GPU.

    MODEL is resnet50 or torchvision/resnet50, transformers/bert, module:Class, or with --file a name in that file.
    A model with heads is measured in joint batches, their requests spread over the heads.
    The result is a profile for workload files: `profile: {ref: the-file.json}`. With --kernels it measures single operators on this
    GPU instead, for estimates.
    """
    if check is not None:
        refuse_others("--estimate-check", "gpu", "as_json")
        _check(check, gpu, as_json=as_json)
        return
    if is_kernels:
        refuse_others("--kernels", "device", "gpu_type", "out", "as_json")
        _kernels(_checked_device(device), gpu_type, out, as_json=as_json)
        return
    if model is None:
        raise click.UsageError("MODEL is missing: what should be measured or estimated")
    if not is_estimate and (gpu or records):
        raise click.UsageError("--gpu and --records are for --estimate; what is measured is --device")
    heads, merge = _heads(model, file, dtype)
    if heads and (is_estimate or stages):
        raise click.UsageError(
            f"model {model} has heads: it is measured, and whole, without --estimate and --stages"
        )
    painter = painters() if plot_path is not None else None
    sizes = [_whole(word) for word in batches.split(",")] if batches else powers_of_two(max_batch)
    if is_estimate:
        taken = ("model", "file", "batches", "max_batch", "dtype", "gpu", "records")
        refuse_others("--estimate", *taken, "out", "plot_path", "as_json")
        if gpu is None:
            raise click.UsageError("--estimate needs --gpu TYPE")
        measured = _estimated(model, _loader(model, file, dtype), gpu, sizes, records)
        _write_out(measured, out, painter, plot_path, as_json=as_json)
        return
    ask = Ask(
        model=model,
        loader=LoaderSpec() if heads else _loader(model, file, dtype),
        device=_checked_device(device),
        batch_sizes=sizes,
        shares=[_number(word) for word in shares.split(",")] if shares else (),
        gpu_type=(gpu_type or device.partition(":")[0]).lower(),
        for_ms=seconds * 1e3,
        threads=threads,
        for_igniter=igniter,
        limit_s=limit_s,
        stages=[_stages(word) for word in stages.split(",")] if stages else (),
        heads=heads,
        merge=merge,
    )
    with progress(f"profiling {model} on {device}") as advance:
        measured = Session(ask, advance, lambda words: click.echo(f"tenuto: {words}", err=True)).measure()
    _write_out(measured, out, painter, plot_path, as_json=as_json)


def _estimated(
    model: str, loader: LoaderSpec, gpu: str, sizes: list[int], records: Path | None
) -> MeasuredProfile:
    estimating = _estimator("estimating")
    ask = estimating.EstimateAsk(model, loader, gpu, sizes, records)
    with progress(f"estimating {model} on {gpu}") as advance:
        measured: MeasuredProfile = estimating.estimated(
            ask, advance, lambda words: click.echo(f"tenuto: {words}", err=True)
        )
    return measured


def _check(records: Path, gpu: str | None, *, as_json: bool) -> None:
    if gpu is None:
        raise click.UsageError("--estimate-check needs --gpu TYPE: the GPU that the records are of")
    errors = _estimator("estimating").estimate_checked(records, gpu)
    if as_json:
        echo_json(errors)
        return
    plain_console().print(_errors_table(errors))


def _kernels(device: str, gpu_type: str | None, out: Path | None, *, as_json: bool) -> None:
    measuring = _estimator("kernel_records")
    with progress(f"measuring operators on {device}") as advance:
        gpu, records = measuring.measured_kernels(
            device,
            gpu_type and gpu_type.lower(),
            advance,
            lambda words: click.echo(f"tenuto: {words}", err=True),
        )
    path = out or Path(f"{gpu.gpu_type}-kernels.csv.gz")
    with writing(path):
        write_records(path, gpu, records)
    errors = measuring.retrained_errors(gpu, records)
    if as_json:
        echo_json({"gpu": asdict(gpu), "records": len(records), "file": str(path), "errors": errors})
        return
    console = plain_console()
    console.print(
        f"{len(records)} kernel records of {gpu.name}; the estimator trained with four fifths, on the others:"
    )
    console.print(_errors_table(errors))
    click.echo(f"written to {path}; tenuto profile MODEL --estimate --gpu {gpu.gpu_type} --records {path}")


def _errors_table(errors: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for title in ("operator", "records", "median error %", "p90 %", "roofline's median %"):
        table.add_column(title, justify="right", no_wrap=True)
    for op, one in errors.items():
        percents = (one["median_error"], one["p90_error"], one["roofline_median_error"])
        table.add_row(op, str(one["n"]), *(f"{100 * value:.1f}" for value in percents))
    return table


def _estimator(module: str) -> ModuleType:
    """What needs the estimator, which nothing else of the command does: torch and scikit-learn take seconds to import."""
    try:
        importlib.import_module("sklearn")
        return importlib.import_module(f"roles.profiling.{module}")
    except ImportError as error:
        raise click.ClickException(
            f"estimates need the extras 'worker' and 'estimate': pip install 'tenuto[worker,estimate]' ({error})"
        ) from error


def _write_out(
    measured: MeasuredProfile,
    out: Path | None,
    painter: ModuleType | None,
    plot_path: Path | None,
    *,
    as_json: bool,
) -> None:
    subject = measured.subject
    kind = "-estimate" if measured.error is not None else ""
    path = out or Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', subject.model)}-{subject.gpu_type}{kind}.json")
    verb = "replaced" if path.exists() else "written to"
    with writing(path):
        write_measured(path, measured)
    if painter is not None and plot_path is not None:
        with writing(plot_path):
            painter.plot_profile(plot_path, measured)
    if as_json:
        echo_json(measured.document())
        return
    _print(measured)
    click.echo(f"{verb} {path}; in a workload file: profile: {{ref: {path}}}")


def _loader(model: str, file: Path | None, dtype: str | None) -> LoaderSpec:
    if file is not None:
        configured = load_config(file).model(ModelId(model))
        found = configured.loader
        if found is None:
            raise ConfigError(f"{file}: model {model} has no loader: there is nothing to measure")
        if found.ranks:
            raise ConfigError(
                f"{file}: model {model} runs in {found.ranks} ranks, and one process is measured here; its worker measures "
                "them all when it loads the model (slice_ready in its log): write its times as profile.table"
            )
        return _with_dtype(found, dtype)
    zoo, slash, arch = model.rpartition("/")
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if ":" in model:
        section = LoaderSection(python=model, **options)
    elif slash:
        section = LoaderSection(zoo=zoo, arch=arch, **options)
    else:
        section = LoaderSection(zoo="torchvision", arch=model, **options)
    spec = loader_spec(section, f"model {model}", Path())
    assert spec is not None, "a section that is there gives a loader"
    return spec


def _heads(model: str, file: Path | None, dtype: str | None) -> tuple[tuple[HeadSpec, ...], str]:
    """Those of a model that has any with loaders, and how they run together."""
    if file is None:
        return (), PREFIX
    configured = load_config(file).model(ModelId(model))
    return tuple(
        replace(head, loader=_with_dtype(head.loader, dtype))
        for head in configured.heads
        if head.loader is not None
    ), configured.merge


def _with_dtype(spec: LoaderSpec, dtype: str | None) -> LoaderSpec:
    return replace(spec, dtype=dtype or spec.dtype)


def _checked_device(device: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device: there is no {device!r}; there is: cpu, cuda, cuda:0, …")
    return device


def _whole(word: str) -> int:
    try:
        number = int(word)
    except ValueError as error:
        raise ConfigError(f"--batches: {shown(word)} is no whole number") from error
    return whole(number, "--batches", 1, BATCH_SIZE_LIMIT)


def _stages(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 2 <= int(word) <= STAGES_MAX):
        raise ConfigError(
            f"--stages: {shown(word)} is no number of stages (a whole number from 2 to {STAGES_MAX})"
        )
    return int(word)


def _number(word: str) -> float:
    try:
        number = float(word)
    except ValueError as error:
        raise ConfigError(f"--shares: {shown(word)} is no number") from error
    return finite(number, "--shares", over=0, at_most=100)


def _print(measured: MeasuredProfile) -> None:
    subject = measured.subject
    console = plain_console()
    estimate = "ESTIMATE, not measured: " if measured.error is not None else ""
    console.print(f"{estimate}{subject.model} on {subject.gpu or subject.device}, torch {subject.torch}")
    console.print(points_table(measured))
    for count, stages_ms in measured.stages_ms.items():
        console.print(f"cut into {count} stages: {', '.join(f'{ms:.3f}' for ms in stages_ms)} ms")


def points_table(measured: MeasuredProfile) -> Table:
    """A row a share and batch size, within 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    is_estimate = measured.error is not None
    times = ("low ms", "ms", "high ms") if is_estimate else ("p50 ms", "p95 ms", "p99 ms")
    for title in ("share %", "batch", *times, "runs", "memory MB", "W", "MHz", "SM %"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in measured.points:
        needs = measured.requirements.get(point.batch_size)
        is_whole = point.share_percent == 100.0
        shown_ms = (point.p50_ms, point.p95_ms, point.p99_ms)
        if point.low_ms is not None and point.high_ms is not None:
            shown_ms = (point.low_ms, point.p50_ms, point.high_ms)
        sm = needs.weighted_sm_percent if needs is not None and is_whole else None
        table.add_row(
            f"{point.share_percent:g}",
            str(point.batch_size),
            *(f"{value:.3f}" for value in shown_ms),
            str(point.runs),
            f"{point.memory_bytes / 2**20:.0f}",
            _shown(point.power_w),
            _shown(point.frequency_mhz),
            _shown(sm),
        )
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
