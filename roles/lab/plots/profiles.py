"""What `profile` measured: run time against batch size and share, with its spread and the line through it."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from profiles.fit import fit_linear
from profiles.measured import MeasuredProfile
from roles.lab.plots.axes import describe


def plot_profile(path: Path, measured: MeasuredProfile) -> None:
    """Draw a profile into a PNG: run time by batch size, a line a share, and by share, a line a batch size."""
    mpl.use("Agg")
    figure = Figure(figsize=(13, 5), layout="constrained")
    by_batch, by_share = figure.subplots(1, 2)
    shares = sorted({point.share_percent for point in measured.points}, reverse=True)
    sizes = sorted({point.batch_size for point in measured.points})
    for share in shares:
        points = sorted((p for p in measured.points if p.share_percent == share), key=lambda p: p.batch_size)
        own = [p.batch_size for p in points]
        (line,) = by_batch.plot(own, [p.p50_ms for p in points], marker="o", label=f"{share:g} %")
        by_batch.fill_between(
            own, [p.p50_ms for p in points], [p.p99_ms for p in points], color=line.get_color(), alpha=0.2
        )
    if len(sizes) > 1:
        whole = [(p.batch_size, p.p50_ms) for p in measured.points if p.share_percent == shares[0]]
        fit = fit_linear(whole)
        by_batch.plot(
            sizes,
            [fit.exec_ms(size) for size in sizes],
            color="black",
            linestyle=":",
            label=f"{fit.alpha_ms:.3g} b + {fit.beta_ms:.3g} ms",
        )
    for size in sizes:
        points = sorted((p for p in measured.points if p.batch_size == size), key=lambda p: p.share_percent)
        by_share.plot(
            [p.share_percent for p in points], [p.p50_ms for p in points], marker="o", label=f"{size}"
        )
    by_share.set_yscale("log")
    describe(by_batch, "run time by batch size (shaded: p50 to p99)", "batch size", "ms")
    describe(by_share, "run time by share, a line a batch size", "share of the GPU, %", "ms")
    subject = measured.subject
    figure.suptitle(f"{subject.model} on {subject.gpu or subject.device}")
    figure.savefig(path, format="png", dpi=100)
