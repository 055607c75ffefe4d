"""What goes wrong in a live run, drawn from its seed, and how it is done to real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fabric.errors import FabricError
from fabric.messages import AnyMessage
from roles.runtime.run_directory import run_files
from tests.chaos.live.hosts import ClientHost
from tests.chaos.live.relay import Relay
from tests.hostile import Hostile
from tests.integration.raw_zmtp import connect, header, shake_hands

KILLS_MAX: Final = 3
"""Of one role in a run: a worker that fails five times in a minute is given up, as it should be."""
KINDS: Final = {
    "kill": 4,
    "stop": 4,
    "restart": 2,
    "garbage": 3,
    "stall": 2,
    "slow": 1,
    "corrupt": 2,
    "reset": 2,
    "fill": 1,
    "drop": 2,
    "reject": 1,
    "lose": 1,
}
ROLES: Final = ("scheduler-0", "frontend-0", "frontend-1", "node-local", "worker")
FILL_MS: Final = 1_500.0


@dataclass(frozen=True)
class Fault:
    """One. `for_ms` of what lasts."""

    at_ms: float
    kind: str
    role: str = ""
    for_ms: float = 0.0

    @property
    def via(self) -> str:
        """Which clients' way it is about; empty: none."""
        if self.kind in {"stall", "slow", "corrupt", "reset"}:
            return "relay"
        return "host" if self.kind in {"drop", "reject", "lose"} else ""


def draw(seed: int, until_ms: float) -> list[Fault]:
    """About one every two seconds, the first after a second; the last leaves time to be seen through."""
    draws = random.Random(f"{seed}/live")
    faults: list[Fault] = []
    killed: dict[str, int] = {}
    at_ms = 1_000.0
    while at_ms < until_ms:
        kind = draws.choices(tuple(KINDS), tuple(KINDS.values()))[0]
        role, for_ms = "", 0.0
        if kind in {"kill", "stop", "restart"}:
            role = draws.choice(ROLES)
            if kind != "stop" and killed.setdefault(role, 0) >= KILLS_MAX:
                continue
            killed[role] = killed.get(role, 0) + (kind != "stop")
        if kind in {"stop", "stall", "slow", "drop", "reject", "lose"}:
            for_ms = draws.choice((50.0, 300.0, 1_200.0, 2_500.0))
        if kind == "fill":
            for_ms = FILL_MS
        faults.append(Fault(round(at_ms), kind, role, for_ms))
        at_ms += draws.choice((20.0, 500.0, 1_500.0, 4_000.0)) + for_ms
    return faults


class Hand:
    """Does it. `report` hears what was done, or could not be."""

    def __init__(
        self,
        run_dir: Path,
        relays: Sequence[Relay],
        host: ClientHost | None,
        seed: int,
        small_disk: Path | None,
    ) -> None:
        self._run_dir = run_dir
        self._relays = relays
        self.host = host
        self._draws = random.Random(f"{seed}/hand")
        self._small_disk = small_disk
        self._stopped: dict[int, float] = {}
        self._filler: tuple[Path, float] | None = None

    def strike(self, fault: Fault, now_ms: float) -> str:
        """Do it; what was done, in words; empty: nothing."""
        match fault.kind:
            case "kill":
                return self._signal(fault.role, signal.SIGKILL)
            case "restart":
                return self._signal(fault.role, signal.SIGTERM)
            case "stop":
                pid = self._pid(fault.role)
                if pid is None or pid in self._stopped:
                    return ""
                try:
                    os.kill(pid, signal.SIGSTOP)
                except ProcessLookupError:  # it has ended since
                    return ""
                self._stopped[pid] = now_ms + fault.for_ms
                return f"{fault.role} ({pid}) stands still for {fault.for_ms:.0f} ms"
            case "garbage":
                return self._garbage()
            case "stall" | "slow":
                for relay in self._relays:
                    getattr(relay, fault.kind)(fault.for_ms)
                return f"clients by TCP: {fault.kind} for {fault.for_ms:.0f} ms"
            case "corrupt" | "reset":
                for relay in self._relays:
                    getattr(relay, fault.kind)()
                return f"clients by TCP: {fault.kind}"
            case "drop" | "reject" | "lose":
                return "" if self.host is None else self.host.wrong(fault.kind, fault.for_ms, now_ms)
            case "fill":
                return self._fill(now_ms + fault.for_ms)
            case _:
                raise AssertionError(fault)

    def go_on(self, now_ms: float, *, is_over: bool = False) -> None:
        """End what has lasted long enough."""
        for pid in [pid for pid, until_ms in self._stopped.items() if is_over or until_ms <= now_ms]:
            del self._stopped[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.host is not None:
            self.host.go_on(now_ms, is_over=is_over)
        if self._filler is not None and (is_over or self._filler[1] <= now_ms):
            self._filler[0].unlink(missing_ok=True)
            self._filler = None

    def _signal(self, role: str, number: signal.Signals) -> str:
        pid = self._pid(role)
        if pid is None:
            return ""
        self._stopped.pop(pid, None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
            return f"{role} ({pid}) gets {number.name}"
        return ""

    def _pid(self, role: str) -> int | None:
        if role == "worker":
            workers = _workers(self._run_dir)
            return self._draws.choice(workers) if workers else None
        return next((one.pid for one in run_files(self._run_dir) if one.role_id == role), None)

    def _garbage(self) -> str:
        """A stranger at a listening socket: bytes, frames that are no messages, messages that are not for it to say."""
        sockets = sorted(self._run_dir.glob("*.sock")) + sorted(self._run_dir.glob("*.control"))
        sockets += sorted(self._run_dir.glob("*.client")) + sorted(self._run_dir.glob("*.outputs"))
        if not sockets:
            return ""
        path = self._draws.choice(sockets)
        address = f"ipc://{path}"
        try:
            with connect(address) as plain:
                plain.sendall(self._draws.randbytes(self._draws.choice((1, 64, 5_000))))
            kind = "PUSH" if path.suffix in {".sock", ".outputs"} else "DEALER"
            with shake_hands(address, f"stranger/{self._draws.randbytes(4).hex()}", kind) as stranger:
                hostile = Hostile(self._draws, {})
                for _ in range(20):
                    message: AnyMessage = hostile.message()
                    with contextlib.suppress(FabricError):
                        stranger.sendall(header(message))
                stranger.sendall(b"\x00\x20" + self._draws.randbytes(32))
        except (OSError, AssertionError) as error:
            return f"a stranger could not reach {path.name}: {error!r}"
        return f"a stranger says nonsense at {path.name}"

    def _fill(self, until_ms: float) -> str:
        if self._small_disk is None or self._filler is not None:
            return ""
        path = self._small_disk / "filler"
        self._filler = path, until_ms
        try:
            with path.open("wb") as file:
                while True:
                    file.write(bytes(4_096))
                    file.flush()
        except OSError:
            return "the disk of the run directory is full"


def free_port() -> int:
    """One of two that follow each other and that nobody has."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def _workers(run_dir: Path) -> list[int]:
    """Of that cluster, as the kernel lists them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if b"roles.gpu_worker" in command and str(run_dir).encode() in command:
                    found.append(int(entry.name))
    return sorted(found)


def document(models: int, client: str, keys: Path | None) -> str:
    """The cluster's file."""
    profile = {"alpha_ms": 1.0, "beta_ms": 8.0, "max_batch": 16}
    written: dict[str, object] = {
        "models": [{"name": f"m{number}", "slo_ms": 200, "profile": profile} for number in range(models)],
        "cluster": {"nodes": [{"host": "local", "gpus": 2, "memory_gb": 16}], "frontends": 2},
        "listen": {"client": client},
    }
    if keys is not None:
        written["security"] = {"keys": str(keys)}
    return json.dumps(written)
