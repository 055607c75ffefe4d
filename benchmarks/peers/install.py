"""Installs peers, each into a virtual environment of its own, so that nobody's pins are anybody else's trouble."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.catalog import Peer

LOG_NAME = "install.log"
STAMP_NAME = "installed"


def python_of(peer: Peer, directory: Path) -> Path:
    """The interpreter of the peer's environment, whether it is there or not."""
    return directory / peer.name / "bin" / "python"


def is_installed(peer: Peer, directory: Path) -> bool:
    """Whether the last installation went through, with the versions asked for today."""
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
            [str(python_of(peer, directory)), "-m", "pip", "install", "--no-input", *peer.requirements],
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
