"""The p99 of a steady client beside neighbours that misbehave, and what they cost the frontend in memory.

    python -m benchmarks.bad_neighbours [--rate 200] [--seconds 4] [--repeat 5] [--only KIND ...] [--json FILE]

A cluster of this host: supervisor, scheduler, frontend, two node agents with a worker of one emulated device each. A
well-behaved client asks one model at a steady pace over ipc, open loop, latency from the intended moment. In each
repeat it is measured alone, then beside each neighbour, which is a process of its own and asks the other model over
TCP, its payload in frames:

- too large: five requests a second of 65 MB, over the frontend's limit of 64
- never reads: `--flood` requests of 4 kB a second, no answer taken
- dies in a frame: five times a second a new connection, cut in the middle of a payload of 60 MB
- stopped worker: the other model's worker is stopped (SIGSTOP), 50 requests of 150 kB a second go on
- 5 % loss: 20 requests of 150 kB a second over a veth pair to a namespace in which iptables drops 5 % of the packets
  each way (needs root, `ip` and `iptables`; else left out)

The ratio is that of a repeat's p99s, with and without; the median of the repeats counts. Lost are requests of the
steady client without an answer. Memory is the frontend's peak over what it was before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.stage import Stage, children, cluster, processes, rss_bytes
from fabric import frames
from fabric.client import Client, ask_status
from fabric.clock import MonotonicClock
from fabric.codec import Buffer
from fabric.errors import FabricError
from fabric.ids import Epoch, ModelId, PeerId, new_incarnation, peer_id
from fabric.link import NamedTensor
from fabric.messages import Infer
from fabric.sockets import DealerLink, LinkOptions
from roles.benchmark.player import PlannedRequest, PlayedRequest, play, run_precisely
from roles.workload.outcomes import nearest_rank

CLUSTER = """
models:
 - {{name: good, slo_ms: 1000, profile: {{alpha_ms: 0.5, beta_ms: 5, max_batch: 16}}}}
 - {{name: bad, slo_ms: 300, profile: {{alpha_ms: 0.5, beta_ms: 5, max_batch: 16}}}}
cluster:
  nodes: [{{host: one, gpus: 1, device: emulated}}, {{host: two, gpus: 1, device: emulated}}]
batching: eager
placement: {{given: {{slices: [{{gpu: 0, models: [{{model: good}}]}}, {{gpu: 1, models: [{{model: bad}}]}}]}}}}
listen: {{client: "tcp://{host}:0"}}
"""
GOOD, BAD = ModelId("good"), ModelId("bad")
RATIO_MAX = 1.2
MB = 1_000_000
SETTLE_S = 0.7  # between a neighbour's start and the first request that counts
LOSS = 0.05
FRONTEND = PeerId("frontend")
Neighbour = Callable[[], AbstractContextManager[None]]


# ---------------------------------------------------------------- who misbehaves, each in a process of its own


def too_large(address: str) -> None:
    """Refused each time."""
    link, tensor = _link(address), NamedTensor("input", np.zeros(65 << 20, np.uint8))
    for number in _paced(5):
        link.send(FRONTEND, Infer(number, BAD), [tensor])
        link.receive(16)


def never_reads(address: str, rate_rps: float) -> None:
    """Requests as fast as it was asked to; answers pile up."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        _unnoticed(socket, address)
        socket.setsockopt(zmq.RCVHWM, 1)
        tensor = NamedTensor("input", np.zeros(4_096, np.uint8))
        for number in _paced(rate_rps):
            socket.send_multipart(_parts(number, tensor), zmq.NOBLOCK)


def dies_in_a_frame(address: str) -> None:
    """A connection that breaks while the kernel still takes its bytes."""
    tensor = NamedTensor("input", np.zeros(60 << 20, np.uint8))
    for number in _paced(5):
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            _unnoticed(socket, address)
            socket.send_multipart(_parts(number, tensor), copy=False)
            time.sleep(0.01)  # at some GB/s it needs several times that


def asks(address: str, rate_rps: float, size: int) -> None:
    """An ordinary client, were it not for its worker or its link."""
    link, tensor = _link(address), NamedTensor("input", np.zeros(size, np.uint8))
    for number in _paced(rate_rps):
        link.send(FRONTEND, Infer(number, BAD), [tensor])
        link.receive(1_000)


def _paced(rate_rps: float) -> Iterator[int]:
    began_s = time.perf_counter()
    for number in range(1 << 30):
        time.sleep(max(0.0, began_s + number / rate_rps - time.perf_counter()))
        yield number


def _link(address: str) -> DealerLink:
    return DealerLink.connect(peer_id("client", new_incarnation()), FRONTEND, [address], LinkOptions())


def _unnoticed(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, frames.route_of(peer_id("client", new_incarnation()), ""))
    socket.connect(address)


def _parts(number: int, tensor: NamedTensor) -> list[Buffer]:
    packed = frames.pack(Infer(number, BAD), [tensor])
    return frames.join([packed], epoch=Epoch(0), sent_at_ms=MonotonicClock().now_ms())


# ---------------------------------------------------------------- where they do it


@contextmanager
def stopped_worker(stage: Stage) -> Iterator[None]:
    """The other model's worker takes nothing until the block is left; and serves again before it is."""
    (worker,) = children(stage.pids["node-two"])
    with processes((asks, (stage.tcp, 50, 150_000))):
        os.kill(worker, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(worker, signal.SIGCONT)
    wait_for(stage, BAD)


def wait_for(stage: Stage, model_id: ModelId) -> None:
    """Until a model is served."""
    until_s = time.perf_counter() + 30
    while not _serves(stage.targets[0], model_id):
        if time.perf_counter() > until_s:
            raise RuntimeError(f"{model_id} is not served within 30 s")


def _serves(address: str, model_id: ModelId) -> bool:
    async def ask() -> None:
        async with Client(address) as client:
            await client.infer(model_id, {"input": np.zeros(1)})

    try:
        run_precisely(ask())
    except FabricError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LossyLink:
    """A namespace behind a veth pair; `host` is the address of our end."""

    namespace: str
    host: str

    @contextmanager
    def asks(self, address: str) -> Iterator[None]:
        """A client in there."""
        command = ["ip", "netns", "exec", self.namespace, sys.executable, __file__, "--ask", address]
        with subprocess.Popen(command) as process:
            try:
                yield
            finally:
                process.kill()


@contextmanager
def lossy_link() -> Iterator[LossyLink | None]:
    """Made now and removed when the block is left; None where that is not possible."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("iptables")):
        yield None
        return
    pid = os.getpid()
    name, ours, theirs = f"tenuto-bad-{pid}", f"tb{pid}a", f"tb{pid}b"
    link = LossyLink(name, "10.79.0.1")
    drop = ["-m", "statistic", "--mode", "random", "--probability", str(LOSS), "-j", "DROP"]
    inside = ["ip", "netns", "exec", name]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", ours, "type", "veth", "peer", "name", theirs],
        ["ip", "link", "set", theirs, "netns", name],
        ["ip", "addr", "add", f"{link.host}/24", "dev", ours],
        ["ip", "link", "set", ours, "up"],
        [*inside, "ip", "addr", "add", "10.79.0.2/24", "dev", theirs],
        [*inside, "ip", "link", "set", theirs, "up"],
        *([*inside, "iptables", "-A", chain, "-p", "tcp", *drop] for chain in ("INPUT", "OUTPUT")),
    ]
    with ExitStack() as stack:
        stack.callback(_quietly, ["ip", "netns", "del", name])  # takes its end of the pair along, and so ours
        stack.callback(_quietly, ["ip", "link", "del", ours])
        made = all(_quietly(command) for command in commands)
        yield link if made else None


def _quietly(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


# ---------------------------------------------------------------- who suffers


@dataclass(slots=True)
class Measured:
    """One window of the steady client. `grown_mb`: the frontend's peak over what it was before."""

    latency_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    lost: int = 0
    grown_mb: float = 0.0

    @property
    def p99_ms(self) -> float:
        """Of the answers."""
        return nearest_rank(np.sort(np.array(self.latency_ms)), 0.99) or float("nan")

    @property
    def late_p99_ms(self) -> float:
        """How late the steady client itself was."""
        return nearest_rank(np.sort(np.array(self.late_ms)), 0.99) or float("nan")


def measure(stage: Stage, rate_rps: float, seconds: float, neighbour: Neighbour) -> Measured:
    """The steady client beside a neighbour."""
    pid = stage.frontend_pid
    before = rss_bytes(pid)
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # its peak counts from here
    with neighbour():
        time.sleep(SETTLE_S)
        measured = run_precisely(_steady(stage.targets[0], rate_rps, seconds))
    measured.grown_mb = (_peak_bytes(pid) - before) / MB
    return measured


async def _steady(address: str, rate_rps: float, seconds: float) -> Measured:
    measured, clock = Measured(), MonotonicClock()
    inputs = {"input": np.zeros(4_096, np.uint8)}

    def note(played: PlayedRequest) -> None:
        measured.late_ms.append(played.late_ms)
        if played.result is None:
            measured.lost += 1
        else:
            measured.latency_ms.append(played.latency_ms)

    plan = [PlannedRequest(1e3 * n / rate_rps, GOOD, inputs) for n in range(int(rate_rps * seconds))]
    async with Client(address) as client:
        for _ in range(20):
            await client.infer(GOOD, inputs)
        await play(client, plan, clock.now_ms() + 50.0, clock, note)
    return measured


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


# ---------------------------------------------------------------- the run


def neighbours(stage: Stage, link: LossyLink | None, flood_rps: float) -> dict[str, Neighbour]:
    """By kind, as in this file's first lines."""
    kinds: dict[str, Neighbour] = {
        "too large": lambda: _process(too_large, stage.tcp),
        "never reads": lambda: _process(never_reads, stage.tcp, flood_rps),
        "dies in a frame": lambda: _process(dies_in_a_frame, stage.tcp),
        "stopped worker": lambda: stopped_worker(stage),
    }
    if link is not None:
        kinds["5 % loss"] = lambda: link.asks(stage.tcp)
    return kinds


@contextmanager
def _process(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    with processes((target, arguments)):
        yield


def refusals(stage: Stage) -> dict[str, float]:
    """What the frontend has counted of those who misbehave."""
    counters = ask_status(stage.targets[0], timeout_ms=10_000.0).counters
    names = ("refused_at_door", "answers_dropped", "abandoned", "pushes_refused")
    codes = [name for name in counters if name.startswith("refused_") and name not in names]
    return {name: counters.get(name, 0.0) for name in (*names, *sorted(codes))}


def main() -> None:
    """Measure each kind in each repeat, print a row a kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=200.0, help="of the steady client, requests per second")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--flood", type=float, default=200.0, help="of the one that never reads")
    parser.add_argument("--only", nargs="*", metavar="KIND", help="of the neighbours named above")
    parser.add_argument("--ask", metavar="ADDRESS", help=argparse.SUPPRESS)
    add_json_option(parser)
    asked = parser.parse_args()
    if asked.ask:
        asks(asked.ask, 20, 150_000)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed then, too
    figures = Figures(f"a steady client of {asked.rate:g} r/s beside neighbours that misbehave")
    alone: list[Measured] = []
    beside: dict[str, list[Measured]] = {}
    with lossy_link() as link, cluster(CLUSTER.format(host=link.host if link else "127.0.0.1")) as stage:
        kinds = neighbours(stage, link, asked.flood)
        wanted = {kind: kinds[kind] for kind in kinds if not asked.only or kind in asked.only}
        for model_id in (GOOD, BAD):
            wait_for(stage, model_id)
        measure(stage, asked.rate, 1.0, contextlib.nullcontext)  # warms everything up
        for _ in range(asked.repeat):
            alone.append(measure(stage, asked.rate, asked.seconds, contextlib.nullcontext))
            for kind, neighbour in wanted.items():
                beside.setdefault(kind, []).append(measure(stage, asked.rate, asked.seconds, neighbour))
        counted = refusals(stage)
    _tabulate(figures, alone, beside)
    if link is None:
        figures.remarks.append("5 % loss: left out (needs root, ip and iptables)")
    figures.remarks.append("the frontend counted " + ", ".join(f"{k} {v:g}" for k, v in counted.items() if v))
    tell(figures, asked.json)


def _tabulate(figures: Figures, alone: Sequence[Measured], beside: dict[str, list[Measured]]) -> None:
    table = figures.table(
        "steady client, ms; medians of the repeats",
        "beside", "p99", "p99 / alone", "lost", "sender late p99", "frontend grew by MB",
    )  # fmt: skip
    for kind, windows in {"nobody": list(alone), **beside}.items():
        ratio = statistics.median(
            one.p99_ms / without.p99_ms for one, without in zip(windows, alone, strict=True)
        )
        table.rows.append(
            (
                kind,
                statistics.median(one.p99_ms for one in windows),
                ratio,
                sum(one.lost for one in windows),
                statistics.median(one.late_p99_ms for one in windows),
                max(one.grown_mb for one in windows),
            )
        )
        if kind != "nobody":
            figures.lines.append(Line(f"p99 beside {kind!r} / alone", ratio, at_most=RATIO_MAX))
    lost = sum(one.lost for windows in beside.values() for one in windows)
    figures.lines.append(Line("requests of the steady client lost", float(lost), at_most=0.0))


if __name__ == "__main__":
    main()
