"""A cluster over emulated links: latency, goodput and the ledger's stages by rate, delay, payload and batching.

    python benchmarks/links [--gbit 1 8] [--delay-ms 0 1] [--loss 0] [--size-mb 0.15 0.6] [--batching tenuto eager]
                            [--load 0.4 0.7] [--slo-ms 50] [--gpus 1] [--seconds 5] [--repeat 3] [--json FILE]

Three hosts that are network namespaces of this machine (`network.py`): the load's senders and the frontend, the
scheduler, and one node with emulated GPUs; a process each, one for the senders, and one more that relays frames
where there is delay or loss. The model is ResNet50 of Symphony's table 2 (1.053·b + 5.072 ms). A load of 1 is what
the link can carry, or the GPUs at half of the SLO a batch, or this machine, whichever is least. Poisson arrivals, open loop;
latency is counted from the intended moment. The median of `--repeat` runs counts, each with a cluster of its own.

The rivals are each other: the disciplines, and the same cluster on links without limits (`--gbit 0`). It takes
root and iproute2, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster import linked_cluster
from network import LinkSpec, why_not

ALPHA_MS, BETA_MS, BATCH_MAX = 1.053, 5.072, 64
LINE_SHARE = 0.85  # of the nominal rate is payload: headers, and the bucket's pauses
HOST_MB_PER_S = 150.0  # that two cores move from sender to worker, all on one machine, with time to spare
WARMUP_S = 1.5
COLUMNS = ("p50_ms", "p99_ms", "held_ms", "waited_ms", "transfer_ms", "queue_ms", "batch_mean")

CLUSTER = """
models:
- name: resnet50
  slo_ms: {slo_ms:g}
  rate_rps: {rate_rps:g}
  profile: {{alpha_ms: {alpha_ms}, beta_ms: {beta_ms}, max_batch: {batch_max}}}
cluster: {{nodes: [{{host: c, gpus: {gpus}}}]}}
batching: {batching}
"""


def capacity_rps(link: LinkSpec, size_mb: float, gpus: int, slo_ms: float) -> float:
    """What the narrowest of link, GPUs and this machine can carry."""
    batch = max(1, min(BATCH_MAX, int((slo_ms / 2 - BETA_MS) / ALPHA_MS)))
    gpu_rps = gpus * batch / (ALPHA_MS * batch + BETA_MS) * 1e3
    line_mb_per_s = LINE_SHARE * (link.rate_mbit or 1e6) / 8
    return min(gpu_rps, line_mb_per_s / size_mb, HOST_MB_PER_S / size_mb)


def measured(document: str, link: LinkSpec, size_mb: float, seconds: float) -> dict[str, float]:
    """One run of a cluster of its own."""
    with linked_cluster(document, link) as cluster:
        bench = ["--duration", f"{seconds:g}", "--warmup", f"{WARMUP_S:g}"]
        found: dict[str, Any] = cluster.bench([*bench, "--payload-bytes", str(int(size_mb * 1e6))])
        counters = {**cluster.counters("scheduler-0"), **cluster.counters("frontend-a")}
    model = found["models"]["resnet50"]
    stages = {name: spent["mean"] or 0.0 for name, spent in found["breakdown_ms"].items()}
    return {
        **stages,
        **{f"count_{name}": value for name, value in counters.items() if name.startswith("ahead_")},
        "offered_rps": found["offered_rps"],
        "goodput_rps": found["goodput_rps"],
        "bad_rate": found["bad_rate"],
        "p50_ms": model["p50_ms"] or 0.0,
        "p99_ms": model["p99_ms"] or 0.0,
        "batch_mean": model["batch_mean"] or 0.0,
        "sender_late_p99_ms": found["sender"]["late_ms"]["p99"] or 0.0,
    }


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a setting: the medians of its runs."""
    for gbit, delay_ms, size_mb, load in itertools.product(
        options.gbit, options.delay_ms, options.size_mb, options.load
    ):
        link = LinkSpec(gbit * 1000 or None, delay_ms, options.loss)
        rate_rps = load * capacity_rps(link, size_mb, options.gpus, options.slo_ms)
        for batching in options.batching:
            document = CLUSTER.format(
                slo_ms=options.slo_ms,
                rate_rps=rate_rps,
                alpha_ms=ALPHA_MS,
                beta_ms=BETA_MS,
                batch_max=BATCH_MAX,
                gpus=options.gpus,
                batching=batching,
            )
            runs = [measured(document, link, size_mb, options.seconds) for _ in range(options.repeat)]
            medians = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in runs[0]}
            yield {
                "link": str(link),
                "size_mb": size_mb,
                "load": load,
                "rate_rps": rate_rps,
                "batching": batching,
                **medians,
            }


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    figures = "".join(f"{row[name]:>10.2f}" for name in COLUMNS)
    print(
        f"{row['link']:<20}{row['size_mb']:>6g}{row['load']:>6g}{row['batching']:>10}{row['offered_rps']:>9.1f}"
        f"{row['goodput_rps']:>9.1f}{100 * row['bad_rate']:>8.2f}{figures}",
        flush=True,
    )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 8.0], help="0: no limit")
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.0, 1.0], help="one way")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of the frames, each way")
    parser.add_argument("--size-mb", type=float, nargs="+", default=[0.15, 0.6], help="of a request")
    parser.add_argument("--batching", nargs="+", default=["tenuto", "eager"])
    parser.add_argument("--load", type=float, nargs="+", default=[0.4, 0.7])
    parser.add_argument("--slo-ms", type=float, default=50.0)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


def main() -> int:
    """See the module's docstring."""
    options = parsed()
    reason = why_not()
    if reason is not None:
        print(f"links: nothing was measured: {reason}", file=sys.stderr)
        return 1
    load_average = os.getloadavg()
    print(f"cores: {os.cpu_count()}, load average at start: {load_average[0]:.2f}")
    print(
        f"{'link':<20}{'MB':>6}{'load':>6}{'batching':>10}{'offered':>9}{'goodput':>9}{'bad %':>8}"
        + "".join(f"{name.removesuffix('_ms'):>10}" for name in COLUMNS)
    )
    found = []
    for row in rows(options):
        show(row)
        found.append(row)
    if options.json is not None:
        report = {"load_average": load_average, "cores": os.cpu_count(), "rows": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
