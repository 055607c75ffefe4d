"""A worker without models, for tests of the node agent: says hello, says ready, obeys or misbehaves.

The first model's name on its first slice says how it behaves: serve, crash, fail, hang (ignores every request to end).
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable

from fabric.ids import PeerId, new_incarnation, peer_id
from fabric.messages import Host, SliceFailed, SliceReady, Stop, WorkerHello
from fabric.sockets import DealerLink
from roles.process import die_with_parent

AGENT = PeerId("agent")


def main() -> None:
    address, worker_id = sys.argv[1:3]
    die_with_parent()
    incarnation = new_incarnation()
    link = DealerLink.connect(peer_id(worker_id, incarnation), AGENT, [address])
    is_obedient = True
    is_hosting = False

    def say_hello() -> None:
        link.send(AGENT, WorkerHello(worker_id, incarnation, os.getpid()))

    while True:
        if not is_hosting:
            say_hello()
        for received in link.receive(16):
            match received.message:
                case Host() as host:
                    is_hosting = True
                    how = host.slices[0].models[0].model_id
                    if how == "crash":
                        sys.exit("ValueError: it crashed on purpose")
                    if how == "hang":
                        is_obedient = False
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    for spec in host.slices:
                        if how == "fail":
                            link.send(AGENT, SliceFailed(spec.slice_id, incarnation, "the loader raised"))
                        else:
                            ready = SliceReady(spec.slice_id, incarnation, host.node_id, spec.gpu, (), ())
                            link.send(AGENT, ready)
                case Stop() if is_obedient:
                    link.close()
                    return
        wait(link.fileno, has_more=lambda: link.has_more)


def wait(fileno: Callable[[], int], has_more: Callable[[], bool]) -> None:
    if not has_more():
        select.select([fileno()], [], [], 0.02)


if __name__ == "__main__":
    main()
