"""Hosts on one machine: network namespaces, joined by links of a given rate, delay and loss.

Without delay and loss each host has a veth pair to a bridge in a namespace of its own (the switch), and `tc tbf`
at both ends of it sets the rate. With delay or loss a host's interface is a TAP device instead, and the switch is
`relay.py`: the kernel need not have netem. The TAP's own tbf then limits what a host sends; what it receives is
limited only by what others send. Frames on TAP devices are large (`TAP_MTU`): each is handled in Python.

Every host has a boot id of its own: by that processes tell whether they share memory (`fabric/shared_memory.py`), and those
of different hosts must not. Nothing is made outside of the namespaces, their names begin with `PREFIX` and hold our pid. They go away when the
block is left, however that happens; those of a run that was killed are removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fabric.errors import ConfigError

PREFIX = "tenuto-links-"
SUBNET = "10.77.0"
TAP_MTU = {True: 16_000, False: 64_000}
"""By whether the link is slow (under 2 Gbit/s): 0.13 ms of a frame at 1 Gbit/s, 0.06 ms at 8."""
SLOW_BELOW_MBIT = 2_000.0
BURST_MS = (
    0.25  # of line rate that may leave at once: less, and the timers of the kernel cost a third of the rate
)
BURST_BYTES_MIN = 33_000
QUEUE_MS = 50  # longer queues are cut off
QUEUE_BYTES_MIN = 500_000
BOOT_ID = "/proc/sys/kernel/random/boot_id"
RELAY = Path(__file__).parent / "relay.py"


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Every host's link. `rate_mbit` None: as fast as the kernel; `delay_ms` one way."""

    rate_mbit: float | None = None
    delay_ms: float = 0.0
    loss_percent: float = 0.0

    @property
    def is_relayed(self) -> bool:
        """Whether frames pass through a process of ours."""
        return self.delay_ms > 0 or self.loss_percent > 0

    @property
    def mtu(self) -> int:
        """Of the interfaces."""
        return TAP_MTU[(self.rate_mbit or 1e9) < SLOW_BELOW_MBIT] if self.is_relayed else 1500

    @property
    def shaping(self) -> list[str]:
        """The arguments of `tc qdisc add dev X root`; empty without a rate."""
        if self.rate_mbit is None:
            return []
        bytes_per_ms = self.rate_mbit * 125
        burst = int(max(BURST_MS * bytes_per_ms, BURST_BYTES_MIN, self.mtu + 100))
        limit = int(max(QUEUE_MS * bytes_per_ms, QUEUE_BYTES_MIN))
        return ["tbf", "rate", f"{self.rate_mbit:g}mbit", "burst", str(burst), "limit", str(limit)]

    def __str__(self) -> str:
        rate = "unlimited" if self.rate_mbit is None else f"{self.rate_mbit / 1000:g} Gbit/s"
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return rate + delay + (f", {self.loss_percent:g} % loss" if self.loss_percent else "")


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface. `boot_id`: the file that holds its own."""

    name: str
    namespace: str
    address: str
    boot_id: Path

    def command(self, argv: Sequence[str]) -> list[str]:
        """How to run `argv` there; the process that is started is `argv`'s own, in mount namespaces of its own."""
        with_boot_id = f'mount --bind "$0" {BOOT_ID} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", with_boot_id, str(self.boot_id), *argv]


def why_not() -> str | None:
    """Why this machine cannot have such a network; None: it can."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces: run it as root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here: install iproute2"
    return None


@contextlib.contextmanager
def network(names: Sequence[str], link: LinkSpec) -> Iterator[Mapping[str, Host]]:
    """Hosts of these names, every two of them connected. Raises ConfigError where that cannot be.

    SIGTERM and SIGHUP end the block like Ctrl-C does while it is open. Call from the main thread.
    """
    reason = why_not()
    if reason is not None:
        raise ConfigError(reason)
    remove_stale()
    own = f"{PREFIX}{os.getpid()}-"
    relay: subprocess.Popen[bytes] | None = None
    with _signals_end_it(), own_directory() as directory:
        hosts = {
            name: Host(name, f"{own}{name}", f"{SUBNET}.{number}", Path(directory) / name)
            for number, name in enumerate(names, start=1)
        }
        try:
            for host in hosts.values():
                host.boot_id.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
                _ip("netns", "add", host.namespace)
                _ip("-n", host.namespace, "link", "set", "lo", "up")
            if link.is_relayed:
                relay = _start_relay(list(hosts.values()), link)
            else:
                _bridge(f"{own}switch", list(hosts.values()))
            for host in hosts.values():
                _bring_up(host, link)
            if not link.is_relayed:
                for host in hosts.values():
                    _shape(f"{own}switch", _port(host), link)
            yield hosts
        finally:
            with _signals_wait():
                if relay is not None:
                    relay.kill()
                    relay.wait()
                _remove([name for name in _namespaces() if name.startswith(own)])


def own_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory that goes with this run, or with the next one if this one is killed."""
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")


def remove_stale() -> Sequence[str]:
    """Remove what runs that were killed left behind; its names."""
    stale = [name for name in _namespaces() if name.startswith(PREFIX) and not _is_alive(name)]
    _remove(stale)
    directories = [
        path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if not _is_alive(path.name)
    ]
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)
    return [*stale, *map(str, directories)]


def _bring_up(host: Host, link: LinkSpec) -> None:
    inside = ("-n", host.namespace)
    _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "mtu", str(link.mtu))
    _shape(host.namespace, "eth0", link)
    _ip(*inside, "link", "set", "eth0", "up")


def _shape(namespace: str, device: str, link: LinkSpec) -> None:
    if link.shaping:
        _run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *link.shaping)
        # A segmented buffer of 64 kB is half a millisecond at 1 Gbit/s, and more than the burst.
        if not link.is_relayed and (link.rate_mbit or 0) < SLOW_BELOW_MBIT:
            _ip("-n", namespace, "link", "set", device, "gso_max_size", "16000")


def _bridge(switch: str, hosts: Sequence[Host]) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for host in hosts:
        port = _port(host)
        pair = ["type", "veth", "peer", "name", "eth0", "netns", host.namespace]
        _ip("-n", switch, "link", "add", port, *pair)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")


def _port(host: Host) -> str:
    return f"to-{host.name}"[:15]


def _start_relay(hosts: Sequence[Host], link: LinkSpec) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(RELAY), str(link.delay_ms), str(link.loss_percent)]
    process = subprocess.Popen([*command, *(host.namespace for host in hosts)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        process.wait()
        raise ConfigError("the relay between the namespaces did not start: is there a /dev/net/tun?")
    return process


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def _remove(namespaces: Sequence[str]) -> None:
    """End what runs in them, then the namespaces: they would live on for as long as a process is inside."""
    for name in namespaces:
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _is_alive(name: str) -> bool:
    """Whether the run that made it still goes on."""
    pid = name.removeprefix(PREFIX).partition("-")[0]
    return not pid.isdigit() or int(pid) == os.getpid() or Path(f"/proc/{pid}").exists()


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """A second Ctrl-C does not leave half of it behind; ends that are due come afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
