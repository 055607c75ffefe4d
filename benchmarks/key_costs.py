"""What keys cost: the fabric's own links over TCP with CURVE and without, in turn, between two processes of this host.

    python -m benchmarks.key_costs [--turns 3] [--json FILE]

Control: a message of 200 bytes there and back. Payload: one message under way at a time, acknowledged over control.
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.figures import Figures, Line, add_json_option, tell
from fabric.curve import guarded, new_pair
from fabric.ids import Incarnation, ModelId, PeerId
from fabric.keys import FRONTEND, SCHEDULER, Keyring, Trusted, TrustedKey, principal_of_node
from fabric.link import Link, NamedTensor, Received
from fabric.messages import Ping, Pong, SeqRun, Withdraw
from fabric.sockets import DealerLink, PullLink, PushPool, RouterLink

TCP = "tcp://127.0.0.1:0"
OWN, SERVER, SLICE = PeerId("frontend-0/1"), PeerId("scheduler-0"), PeerId("here/gpu0/0")
NODE = principal_of_node("here")
ROUND_TRIPS = 5_000
SIZES = {"0.6 MB": (602_112, 300), "9.6 MB": (16 * 602_112, 30)}  # bytes of a message, and how many of them
SAID = Withdraw(ModelId("m" * 150), (SeqRun(1, 1),))  # some 200 bytes with its frame

Keyrings = dict[str, Keyring]


def keyrings() -> Keyrings:
    """Of three principals that trust one another."""
    pairs = [new_pair(principal) for principal in (SCHEDULER, FRONTEND, NODE)]
    trusted = Trusted(tuple(TrustedKey(pair.principal, pair.public, "") for pair in pairs))
    return {pair.principal: Keyring(pair, trusted) for pair in pairs}


def served(keys: Keyrings | None, channel: Connection) -> None:
    """Answers what comes by control, and says by control that payload came."""
    control = RouterLink.bind([TCP], guard=guarded(keys and keys[SCHEDULER], {FRONTEND}))
    payload = PullLink.bind([TCP], guard=guarded(keys and keys[NODE], {FRONTEND}, names=False))
    channel.send((list(control.addresses), list(payload.addresses)))
    while not channel.poll():
        for received in control.receive(16):
            control.send(received.peer, Pong(1))
        for _ in payload.receive(16):
            control.send(OWN, Pong(2))
        if not (control.has_more or payload.has_more):
            select.select([control.fileno(), payload.fileno(), channel.fileno()], [], [])


@contextmanager
def links(keys: Keyrings | None) -> Iterator[tuple[DealerLink, PushPool]]:
    """Connected to another process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=served, args=(keys, there), daemon=True)
    process.start()
    control_at, payload_at = here.recv()
    guard = guarded(keys and keys[FRONTEND])
    dealer = DealerLink.connect(OWN, SERVER, control_at, guard=guard)
    pool = PushPool(guard=guard)
    pool.know(SLICE, Incarnation("1"), payload_at)
    try:
        yield dealer, pool
    finally:
        here.send("end")
        process.join()
        dealer.close()
        pool.close()


def answer(link: Link) -> Received:
    """The next thing that comes."""
    while True:
        if got := link.receive(1):
            return got[0]
        if not link.has_more:
            select.select([link.fileno()], [], [], 5.0)


def round_trip_us(keys: Keyrings | None) -> float:
    """The median there and back."""
    with links(keys) as (dealer, _):
        while not dealer.send(SERVER, Ping(0)):
            time.sleep(0.001)
        answer(dealer)
        took = []
        for _ in range(ROUND_TRIPS):
            began_s = time.perf_counter()
            dealer.send(SERVER, SAID)
            answer(dealer)
            took.append(time.perf_counter() - began_s)
        return 1e6 * statistics.median(took)


def gigabytes_per_s(keys: Keyrings | None, size: int, count: int) -> float:
    """Of payload, one message after the other."""
    tensor = [NamedTensor("x", np.zeros(size, np.uint8))]
    with links(keys) as (dealer, pool):
        while not dealer.send(SERVER, Ping(0)):
            time.sleep(0.001)
        answer(dealer)
        for turn in range(count + 1):
            if turn == 1:  # the first one opened the socket
                began_s = time.perf_counter()
            while not pool.send(SLICE, Ping(1), tensor):
                time.sleep(0.001)
            answer(dealer)
        return size * count / (time.perf_counter() - began_s) / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    trips: dict[bool, list[float]] = {False: [], True: []}
    speeds: dict[tuple[str, bool], list[float]] = {(name, one): [] for name in SIZES for one in (False, True)}
    for _ in range(options.turns):
        for with_keys in (False, True):
            keys = keyrings() if with_keys else None
            trips[with_keys].append(round_trip_us(keys))
            for name, (size, count) in SIZES.items():
                speeds[name, with_keys].append(gigabytes_per_s(keys, size, count))
    figures = Figures("keys")
    table = figures.table(
        "the fabric's links over TCP, medians", "what", "without keys", "with", "with / without"
    )
    plain, keyed = (statistics.median(trips[one]) for one in (False, True))
    table.rows.append(("control, there and back, us", plain, keyed, keyed / plain))
    figures.lines.append(Line("a round trip with keys, of one without", keyed / plain, at_most=1.5))
    for name in SIZES:
        plain, keyed = (statistics.median(speeds[name, one]) for one in (False, True))
        table.rows.append((f"payload, {name}, GB/s", plain, keyed, keyed / plain))
    tell(figures, options.json)


if __name__ == "__main__":
    main()
