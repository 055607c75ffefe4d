"""A second host: a network namespace with its own address, whose packets can be dropped, refused and lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_RULES = {
    "drop": ("-j", "DROP"),
    "reject": ("-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"),
    "lose": ("-m", "statistic", "--mode", "random", "--probability", "0.1", "-j", "DROP"),
}
_ROUTES = {"drop": "blackhole", "reject": "unreachable"}


@dataclass
class ClientHost:
    """`prefix` runs a command there; `server` is our address as it sees it."""

    name: str
    server: str
    iptables: str | None
    _ends: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def prefix(self) -> list[str]:
        """What a command begins with that runs there."""
        return ["ip", "netns", "exec", self.name]

    def wrong(self, kind: str, for_ms: float, now_ms: float) -> str:
        """`drop`, `reject` or `lose` what comes and goes there; what was done, empty: nothing.

        Without iptables what goes is dropped or refused by a route, and what comes is not.
        """
        if self.iptables is not None:
            # A refusal of both ways would meet its own resets.
            for chain in ("INPUT",) if kind == "reject" else ("INPUT", "OUTPUT"):
                self._do(self.iptables, "-A", chain, *_RULES[kind])
                self._ends[self.iptables, "-D", chain, *_RULES[kind]] = now_ms + for_ms
        elif kind in _ROUTES:
            self._do("ip", "route", "replace", _ROUTES[kind], f"{self.server}/32")
            self._ends["ip", "route", "del", _ROUTES[kind], f"{self.server}/32"] = now_ms + for_ms
        else:
            return ""
        return f"the clients' host: {kind} for {for_ms:.0f} ms"

    def go_on(self, now_ms: float, *, is_over: bool = False) -> None:
        """End what has lasted long enough."""
        for end in [end for end, until_ms in self._ends.items() if is_over or until_ms <= now_ms]:
            del self._ends[end]
            self._do(*end)

    def _do(self, *command: str) -> None:
        subprocess.run([*self.prefix, *command], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def client_host(left_out: list[str]) -> Iterator[ClientHost | None]:
    """One, gone with the block; None, and a reason in `left_out`, where that is not permitted."""
    number = os.getpid() % 200 + 10
    name, near, far = f"tenuto-{os.getpid()}", f"tn{os.getpid()}a", f"tn{os.getpid()}b"
    server, client = f"10.177.{number}.1", f"10.177.{number}.2"
    steps: Sequence[str] = (
        f"netns add {name}",
        f"link add {near} type veth peer name {far} netns {name}",
        f"addr add {server}/24 dev {near}",
        f"link set {near} up",
        f"-n {name} addr add {client}/24 dev {far}",
        f"-n {name} link set {far} up",
    )
    problem = ""
    try:
        for step in steps:
            subprocess.run(["ip", *step.split()], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    try:
        if problem:
            left_out.append(f"cut links between hosts (network namespaces are not permitted: {problem})")
            yield None
            return
        iptables = shutil.which("iptables-legacy") or shutil.which("iptables")
        if iptables is None:
            left_out.append("random loss between hosts (there is no iptables)")
        yield ClientHost(name, server, iptables)
    finally:
        for step in (f"link del {near}", f"netns del {name}"):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", *step.split()], check=False, capture_output=True, timeout=10)
