"""Installs peers, each into a virtual environment of its own, so that nobody's pins are anybody else's trouble.

Where the interpreter that runs us has a peer, as on a machine without an index, that one is used.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from benchmarks.peers.cases import Case, RealCase
from benchmarks.peers.catalog import Peer

LOG_NAME = "install.log"
STAMP_NAME = "installed"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What runs a peer's server: `path` has packages besides its own, `base` is the folder whose `bin` has the peer's commands."""

    python: Path
    base: Path
    path: tuple[str, ...] = ()


def interpreter_of(peer: Peer, directory: Path, case: Case) -> Interpreter:
    """The peer's environment, or ours where that has the peer. A real model needs ours, which has torch and loaders."""
    base = (
        Path(str(distribution(peer.distribution).locate_file(""))) if is_here(peer) else directory / peer.name
    )
    # `base` takes the place of the user's own folder, where what runs us may have packages.
    own = (site.getusersitepackages(),) if site.ENABLE_USER_SITE else ()
    if isinstance(case, RealCase):
        packages = base.glob("lib/python*/site-packages")
        return Interpreter(Path(sys.executable), base, (str(ROOT), *map(str, packages), *own))
    if is_here(peer):
        return Interpreter(Path(sys.executable), base, own)
    return Interpreter(_python_of(base), base)


def _python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def is_here(peer: Peer) -> bool:
    """Whether the interpreter that runs us has the peer, in the version asked for."""
    try:
        return version(peer.distribution) == peer.version
    except PackageNotFoundError:
        return False


def is_installed(peer: Peer, directory: Path) -> bool:
    """Whether the peer is here, or its last installation went through, with the versions asked for today."""
    if is_here(peer):
        return True
    stamp = directory / peer.name / STAMP_NAME
    return stamp.exists() and stamp.read_text(encoding="utf-8") == _asked_for(peer)


def install(peers: Iterable[Peer], directory: Path) -> dict[str, str]:
    """Install each peer that is not there yet; returns, by name, why one could not be."""
    failed: dict[str, str] = {}
    for peer in peers:
        if is_installed(peer, directory):
            print(f"{peer.name}: is there already", flush=True)
            continue
        print(f"{peer.name}: installing {' '.join(peer.requirements)} …", flush=True)
        reason = _install(peer, directory)
        if reason:
            failed[peer.name] = reason
            print(f"{peer.name}: skipped, {reason}", flush=True)
        else:
            print(f"{peer.name}: installed", flush=True)
    return failed


def _install(peer: Peer, directory: Path) -> str:
    """Empty where it worked, else the reason."""
    interpreter = Path(peer.interpreter or sys.executable)
    if not interpreter.exists():
        return f"it needs {interpreter}, which is not here"
    version = _version_of(interpreter)
    if peer.python_version and version != peer.python_version:
        return f"it needs Python {peer.python_version}, and {interpreter} is {version}"
    home = directory / peer.name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with (home / LOG_NAME).open("wb") as log:
        for command in (
            [str(interpreter), "-m", "venv", str(home)],
            [str(_python_of(home)), "-m", "pip", "install", "--no-input", *peer.requirements],
        ):
            if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
                return f"`{' '.join(command[1:4])} …` failed, see {home / LOG_NAME}"
    (home / STAMP_NAME).write_text(_asked_for(peer), encoding="utf-8")
    return ""


def _version_of(interpreter: Path) -> str:
    asked = [str(interpreter), "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _asked_for(peer: Peer) -> str:
    return "\n".join(peer.requirements) + "\n"
