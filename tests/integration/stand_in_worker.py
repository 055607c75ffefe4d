"""A worker without models, for tests of the node agent: says hello, says ready, answers pings, obeys or misbehaves.

The first model's name on its first slice says how it behaves: serve, crash, fail, hang (ignores every request to end).
Where it is told of an MPS daemon it joins that as CUDA would: without one it runs on all the same, and says nothing.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fabric.clock import MonotonicClock
from fabric.ids import Incarnation, PeerId, new_incarnation, peer_id
from fabric.messages import Host, Ping, Pong, SliceFailed, SliceReady, SliceSpec, Stop, WorkerHello
from fabric.sockets import DealerLink
from roles.runtime.process import die_with_parent, outlive_parent

AGENT = PeerId("agent")
CLOCK = MonotonicClock()


class Worker:
    def __init__(self, address: str, worker_id: str) -> None:
        outlived = outlive_parent()
        if outlived is None:
            die_with_parent()
        self.agent_pid, self.outlive_ms = outlived or (0, 0.0)
        self.worker_id = worker_id
        self.incarnation: Incarnation = new_incarnation()
        self.link = DealerLink.connect(peer_id(worker_id, self.incarnation), AGENT, [address])
        self.slices: Sequence[SliceSpec] = ()
        self.is_obedient = True
        self.must_say_hello = True
        self.end_at_ms = float("inf")

    def run(self) -> None:
        while CLOCK.now_ms() < self.end_at_ms:
            self.look_after_agent()
            if self.must_say_hello:
                hello = WorkerHello(self.worker_id, self.incarnation, os.getpid(), tuple(self.slices))
                self.link.send(AGENT, hello)
            for received in self.link.receive(16):
                match received.message:
                    case Host() as host:
                        self.host(host)
                    case Ping(number):
                        self.link.send(AGENT, Pong(number))
                    case Stop() if self.is_obedient:
                        self.link.close()
                        return
            self.link.take_lost()  # or its descriptor stays readable, and hellos fill the queue
            wait(self.link.fileno, has_more=lambda: self.link.has_more)

    def look_after_agent(self) -> None:
        if self.agent_pid and not Path(f"/proc/{self.agent_pid}").exists():
            self.agent_pid = 0
            self.must_say_hello = True
            self.end_at_ms = CLOCK.now_ms() + self.outlive_ms if self.slices else 0.0

    def host(self, host: Host) -> None:
        is_first = not self.slices
        self.slices = host.slices
        self.must_say_hello = False
        self.end_at_ms = float("inf")
        if self.outlive_ms:
            self.agent_pid = host.agent_pid
        if is_first:
            join_mps()
        how = host.slices[0].models[0].model_id
        if how == "crash":
            sys.exit("ValueError: it crashed on purpose")
        if how == "hang":
            self.is_obedient = False
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for spec in host.slices:
            if how == "fail":
                self.link.send(
                    AGENT,
                    SliceFailed(spec.slice_id, self.incarnation, "the loader raised", is_unloadable=True),
                )
            else:
                ready = SliceReady(spec.slice_id, self.incarnation, host.node_id, spec.gpu, (), ())
                self.link.send(AGENT, ready)


def join_mps() -> None:
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if pipe is None:
        return
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "-")
    limit = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "-")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(2.0)
        try:
            connection.connect(f"{pipe}/control")
            connection.sendall(f"join {os.getpid()} {share} {limit}\n".encode())
            connection.makefile().read()
        except OSError:
            pass  # as CUDA does it


def wait(fileno: Callable[[], int], has_more: Callable[[], bool]) -> None:
    if not has_more():
        select.select([fileno()], [], [], 0.02)


def main() -> None:
    Worker(sys.argv[1], sys.argv[2]).run()


if __name__ == "__main__":
    main()
