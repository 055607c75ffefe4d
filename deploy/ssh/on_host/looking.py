"""What is here: everything that a plan depends on, changing nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deploy.ssh.on_host.folders import Place, existing, living_pid, read_object, read_text
from deploy.ssh.on_host.managers import Systemd, manager_of

COMPLETE = ".complete"
VIEWS = "views.json"
NAMELESS = "another user's process"
_SIOCGIFADDR = 0x8915


def facts(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """What is here, changing nothing."""
    base, state, manager = place.base, place.state, manager_of(place)
    is_systemd = isinstance(manager, Systemd)
    running = manager.running()
    known = manager.known()
    serving = {one: pid for one in running if (pid := living_pid(place.run_file(one)))}
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "has_venv": importlib.util.find_spec("ensurepip") is not None,
        "machine": f"{platform.system()} {platform.machine()}",
        "time_ms": time.time() * 1e3,
        "free_bytes": shutil.disk_usage(existing(base)).free,
        "is_writable": os.access(existing(base), os.W_OK | os.X_OK),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "cores": len(os.sched_getaffinity(0)),
        "address": own_address(request.get("interface")),
        "base": str(base),
        "is_there": base.exists(),
        "run_dir": str(place.run_dir),
        "manager": "systemd" if is_systemd else "supervisor",
        "has_manager": is_systemd or (base / "supervisor/lib/supervisor").is_dir(),
        "has_cron": shutil.which("crontab") is not None,
        "has_driver": Path("/proc/driver/nvidia/version").exists(),
        "has_mps": shutil.which("nvidia-cuda-mps-control") is not None,
        "wheels": {path.name: path.stat().st_size for path in (base / "wheels").glob("*.whl")},
        "versions": {
            path.parent.name: sorted(extras_in(path)) for path in (base / "versions").glob(f"*/{COMPLETE}")
        },
        "configs": sorted(path.parent.name for path in (base / "configs").glob(f"*/{COMPLETE}")),
        "keys": {path.name: sha256_of(path) for path in (base / "keys").glob("*") if path.is_file()},
        "roles": {one: place.started_as(one) if one in running else "" for one in known},
        "scripts": {path.stem: sha256_of(path) for path in (base / "roles").glob("*.sh")},
        "views": {
            path.parent.name: views
            for path in (base / "configs").glob(f"*/{VIEWS}")
            if (views := read_object(path))
        },
        "serving": sorted(serving),
        "taken": {
            one: taken
            for one, ports in request["ports"].items()
            # One that has not come up yet may have its own.
            if (one not in running or one in serving) and (taken := taken_of(one, ports, serving))
        },
        "state": state,
        "served": place.served,
    }


def extras_in(complete: Path) -> set[str]:
    """What the mark of an environment says that it was installed with; nothing where there is none."""
    return set(read_text(complete).split())


def own_address(interface: str | None) -> str | None:
    """The interface's, else the one by which the operator reached us."""
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
        return None
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and ":" not in words[2] else None


def taken_of(role_id: str, ports: Iterable[int], serving: Mapping[str, int]) -> list[tuple[int, str]]:
    """Those of a role's ports that somebody else has, each with who that is: a role's id where it is one of these, which serve with those processes."""
    ours = {pid: one for one, pid in serving.items()}
    own = ("", role_id, *([NAMELESS] if role_id in serving else []))  # this one may be the nameless one
    holders = {port: port_holder(port, ours) for port in ports}
    return [(port, holder) for port, holder in holders.items() if holder not in own]


def port_holder(port: int, ours: Mapping[int, str]) -> str:
    """Who listens there: a name, which `ours` may have for its process, or only that somebody does; empty where it is free."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    if not inodes:
        return ""
    found = NAMELESS
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if any(str(one.readlink()) in inodes for one in (entry / "fd").iterdir()):
                    if int(entry.name) in ours:
                        return ours[int(entry.name)]
                    found = f"{(entry / 'comm').read_text().strip()} (process {entry.name})"
    return found


def sha256_of(path: Path) -> str:
    """Of a file; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
