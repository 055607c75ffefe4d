"""Which benchmarks `make bench` runs, with which arguments; and those that take longer, with their last figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Quick:
    """One that ends within about two minutes with these arguments. `--json FILE` is added."""

    name: str
    words: tuple[str, ...]
    """What follows `python`: a script or a module, and arguments."""


@dataclass(slots=True, frozen=True)
class Long:
    """One that does not."""

    command: str
    figures: str
    """Its last figures in a sentence, and where all of them are."""


def _script(name: str, *arguments: str) -> Quick:
    return Quick(name, ("-m", f"benchmarks.{name}", *arguments))


QUICK: tuple[Quick, ...] = (
    _script("latency", "--repeat", "5", "--requests", "300", "--seconds", "3"),
    _script("throughput", "--repeat", "3", "--seconds", "4", "--senders", "1", "--gather-ms", "1"),
    _script("gateway", "--repeat", "3", "--seconds", "4"),
    _script("payload", "--repeat", "5", "--seconds", "1"),
    _script("lateness", "--timers", "500", "--repeat", "2"),
    _script(
        "live_against_simulated", "--batching", "tenuto", "--scale", "16", "--repeat", "1", "--seconds", "10"
    ),
    _script("idle_gap"),
    _script("change_under_load", "--repeat", "3", "--quiet", "3"),
    _script("scheduler_core", "--seconds", "1"),
    _script("lost_peers", "--restarts", "2000"),
    _script("kills", "--kills", "2", "--pause", "4"),
    _script("takeover", "--kills", "3"),
    _script("key_costs", "--turns", "2"),
    _script("simulator_speed", "--seconds", "10", "--repeat", "3"),
    _script("scheduling_quality", "--seconds", "10", "--seeds", "1"),
    _script("rarely_asked"),
    _script("subclusters", "--dispatchers"),
    _script("interference"),
    _script("igniter_planning", "--repeats", "1"),
    _script(
        "worker_throughput", "--device", "cpu", "--arch", "resnet18", "--batches", "1,8", "--seconds", "1"
    ),
)

LONG: tuple[Long, ...] = (
    Long(
        "python -m benchmarks.links.virtual; python -m benchmarks.links (as root)",
        "lines of 1 and 8 Gbit/s and 0, 1, 3 ms: on virtual time, and in network namespaces"
        " ([ADR 0090](../adr/0090-inputs-before-the-grant.md))",
    ),
    Long(
        "python -m benchmarks.several_hosts (as root)",
        "a cluster on three hosts is set up, killed while it is, changed under load and taken over: [docs/operate/deploy.md](../operate/deploy.md)",
    ),
    Long(
        "python -m benchmarks.disciplines run RESULTS.json; python -m benchmarks.disciplines table RESULTS.json",
        "goodput of `tenuto` on 42 workloads beside four rivals: [docs/results/disciplines.md](disciplines.md)",
    ),
    Long(
        "python -m benchmarks.below_peak PEAKS.json",
        "p50 and busy GPUs at 10 to 70 % of the peak: [docs/results/disciplines.md](disciplines.md#below-the-peak)",
    ),
    Long(
        "python -m benchmarks.overload; python -m benchmarks.overload --set held-out",
        "goodput at 1.2 to 5 times the capacity, of others in a flood of one model, and how soon all is well again:"
        " [docs/results/disciplines.md](disciplines.md#overload)",
    ),
    Long(
        "python -m benchmarks.placements run RESULTS.json --seconds 8; python -m benchmarks.placements table RESULTS.json",
        "29 settings of the thesis, with `--set held-out` 12 drawn at random, two disciplines, each policy:"
        " [docs/results/placements.md](../results/placements.md)",
    ),
    Long(
        "python -m benchmarks.applications --seconds 20 --seeds 3",
        "goodput of nine applications under carried deadlines, Nexus' program, equal and proportional splits and PARD's rule:"
        " [docs/guides/applications.md](../guides/applications.md)",
    ),
    Long(
        "python -m benchmarks.gpulet_schedulability",
        "19,682 scenarios; of a sample of 300 on 4 GPUs `gpulet` serves 189, exhaustive search 205, whole GPUs 53"
        " ([docs/results/gpulet.md](gpulet.md))",
    ),
    Long(
        "python -m benchmarks.subclusters",
        "800 models in 20 sub-clusters: imbalance 0.056 % by search, 17.4 % by HiGHS, 7.07 % by CBC"
        " ([docs/operate/subclusters.md](../operate/subclusters.md))",
    ),
    Long(
        "python -m benchmarks.large_cluster --seconds 0.5",
        "1,000 hosts with 8 GPUs each in 16 shards, simulated: 3.4 M requests/s, 0.005 % bad, 163 s of CPU and 0.28 GB "
        "([docs/operate/scaling.md](../operate/scaling.md))",
    ),
    Long(
        "python -m benchmarks.scheduling_quality --batching tenuto --all",
        "every discipline on Symphony's table 2, three seeds",
    ),
    Long(
        "python -m benchmarks.live_against_simulated --repeat 5 --seconds 30",
        "as above, longer windows and five seeds",
    ),
    Long(
        "python -m benchmarks.peers install; python -m benchmarks.peers",
        "mosec, LitServe, MLServer, Ray Serve, BentoML and Triton, each in its own environment; the last figures and what is"
        " behind them: [docs/results/performance.md](performance.md#beside-peers)",
    ),
    Long(
        "python -m benchmarks.peers --models resnet50 --device cuda",
        "goodput of real models on one CUDA device beside mosec and LitServe, and the simulator beside it:"
        " [docs/results/performance.md](performance.md#real-models)",
    ),
    Long(
        "python -m benchmarks.links --gbit 1 8 --delay-ms 0 0.5 1 3",
        "network namespaces, as root; what early payload would gain on slow links",
    ),
    Long(
        "python -m benchmarks.estimator",
        "profiles estimated without a GPU: run times of the thesis' 71 rows 7.0 % off at the median, 19.8 % at the 90th"
        " percentile ([docs/guides/estimator.md](../guides/estimator.md))",
    ),
    Long(
        "python -m benchmarks.prefix_merging",
        "ten classifiers together in each way of `merge`, against one after the other: [docs/guides/worker.md](../guides/worker.md#models-on-one-backbone)",
    ),
    Long(
        "python -m benchmarks.worker_throughput --device cuda --arch resnet50",
        "on a CUDA device: [docs/guides/worker.md](../guides/worker.md)",
    ),
    Long(
        "tests/gpu/measure.sh RESULTS",
        "all that needs a CUDA device, `served_throughput.py`, `device_copies.py`, `colocation.py` and `change_under_load.py --device cuda` among it:"
        " [tests/gpu](../../tests/gpu/README.md)",
    ),
    Long(
        "python -m benchmarks.memory --minutes 10",
        "memory of every role at half load, in three bursts, and after; in 10 minutes at 350 r/s each role's resident memory"
        " grew by at most 1.2 %, after the bursts by 1.7 %",
    ),
    Long(
        "python -m benchmarks.bad_neighbours",
        "others' p99 beside clients and workers that misbehave; the last figures, of p99 alone (13.4 ms, cores awake): five"
        " requests of 65 MB a second 1.49, clients that never read 1.03, that die in a frame 1.29, 5 % loss 1.00, a"
        " stopped worker 1.01; no request lost",
    ),
)
