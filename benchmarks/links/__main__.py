"""A cluster over emulated links: latency, goodput and the ledger's stages by rate, delay, payload and batching.

    python -m benchmarks.links [--gbit 1 8] [--delay-ms 0 1] [--loss 0] [--size-mb 0.15 0.6] [--batching tenuto eager]
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
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.figures import Figures, add_json_option, tell
from benchmarks.links.cluster import linked_cluster
from benchmarks.links.network import LinkSpec, why_not

ALPHA_MS, BETA_MS, BATCH_MAX = 1.053, 5.072, 64
LINE_SHARE = 0.85  # of the nominal rate is payload: headers, and the bucket's pauses
HOST_MB_PER_S = 150.0  # that two cores move from sender to worker, all on one machine, with time to spare
WARMUP_S = 1.5
LATE_MS_MAX = 2.5  # of the senders at their p99: beyond it a run says more of this machine than of the links
COLUMNS = (
    "offered_rps",
    "goodput_rps",
    "bad_percent",
    "p50_ms",
    "p99_ms",
    "held_ms",
    "waited_ms",
    "transfer_ms",
    "queue_ms",
    "batch_mean",
    "sender_late_p99_ms",
)

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
    model = found["models"]["resnet50"]
    stages = {name: spent["mean"] or 0.0 for name, spent in found["breakdown_ms"].items()}
    return {
        **stages,
        "offered_rps": found["offered_rps"],
        "goodput_rps": found["goodput_rps"],
        "bad_percent": 100 * found["bad_rate"],
        "p50_ms": model["p50_ms"] or 0.0,
        "p99_ms": model["p99_ms"] or 0.0,
        "batch_mean": model["batch_mean"] or 0.0,
        "sender_late_p99_ms": found["sender"]["late_ms"]["p99"] or 0.0,
    }


def rows(options: argparse.Namespace) -> Iterator[tuple[str | float, ...]]:
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
            medians = [statistics.median(run[name] for run in runs) for name in COLUMNS]
            yield (str(link), size_mb, load, batching, *medians)


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
    add_json_option(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """See the module's docstring."""
    options = parsed()
    reason = why_not()
    if reason is not None:
        print(f"links: nothing was measured: {reason}", file=sys.stderr)
        return 1
    figures = Figures("links: a cluster over emulated links")
    caption = f"SLO {options.slo_ms:g} ms, {options.gpus} emulated GPU(s), Poisson; stages are means in ms"
    table = figures.table(caption, "link", "MB", "load", "batching", *COLUMNS)
    table.rows.extend(rows(options))
    if any(row[-1] > LATE_MS_MAX for row in table.rows if isinstance(row[-1], float)):
        figures.remarks.append(
            f"senders over {LATE_MS_MAX} ms late: those rows say more of this machine than of the links"
        )
    tell(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
