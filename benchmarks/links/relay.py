"""A switch in user space: one TAP device in each of the given namespaces; frames are delayed, some are lost.

    python relay.py DELAY_MS LOSS_PERCENT NAMESPACE...

Prints `ready` when the devices (`eth0`, MAC address 02:00:00:00:00:NN) are there, and relays until it is killed.
A frame whose destination nobody has, as in ARP, goes to all others. What is under way is bounded; over the bound
a frame is lost, as in any switch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_FRAME_BYTES_MAX = 1 << 16
_UNDER_WAY_BYTES_MAX = 64 << 20
_SPIN_S = 60e-6  # a shorter sleep than this ends late

_libc = ctypes.CDLL(None, use_errno=True)


def mac_of(number: int) -> str:
    """The address of the device in the `number`-th namespace."""
    return f"02:00:00:00:00:{number + 1:02x}"


def open_tap(namespace: str, number: int) -> int:
    """Make the device inside; this process stays in that namespace."""
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if _libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", "eth0", "address", mac_of(number)], check=True)
    return tap


def relay(taps: list[int], delay_s: float, loss: float) -> None:
    """Pass frames on for ever. All have the same delay, so the first in is the first out."""
    draw = random.Random(1).random
    receivers = {bytes.fromhex(mac_of(number).replace(":", "")): [tap] for number, tap in enumerate(taps)}
    others = {tap: [other for other in taps if other != tap] for tap in taps}
    under_way: deque[tuple[float, list[int], bytes]] = deque()
    under_way_bytes = 0
    clock = time.perf_counter
    while True:
        left_s = under_way[0][0] - clock() if under_way else None
        if left_s is None or left_s > _SPIN_S:
            readable = select.select(taps, (), (), None if left_s is None else left_s - _SPIN_S)[0]
        else:
            readable = select.select(taps, (), (), 0)[0]
        for tap in readable:
            try:
                frame = os.read(tap, _FRAME_BYTES_MAX)
            except BlockingIOError:
                continue
            if (loss and draw() < loss) or under_way_bytes > _UNDER_WAY_BYTES_MAX:
                continue
            under_way_bytes += len(frame)
            under_way.append((clock() + delay_s, receivers.get(frame[:6], others[tap]), frame))
        now_s = clock()
        while under_way and under_way[0][0] <= now_s:
            _, to, frame = under_way.popleft()
            under_way_bytes -= len(frame)
            for tap in to:
                with contextlib.suppress(OSError):  # not up yet, or full: lost
                    os.write(tap, frame)


def main() -> None:
    """See the module's docstring."""
    delay_ms, loss_percent, *namespaces = sys.argv[1:]
    _libc.prctl(_PR_SET_PDEATHSIG, 9)
    _libc.prctl(_PR_SET_TIMERSLACK, 1)
    taps = [open_tap(namespace, number) for number, namespace in enumerate(namespaces)]
    print("ready", flush=True)
    relay(taps, float(delay_ms) / 1e3, float(loss_percent) / 100)


if __name__ == "__main__":
    main()
