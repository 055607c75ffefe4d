"""The keys folder of a cluster that is deployed: what is missing there, and the command that makes it."""

from __future__ import annotations

import shlex
from pathlib import Path

from fabric.errors import ConfigError
from fabric.keys import TRUSTED_FILE, Trusted, key_file, naming_path, read_trusted


def trusted_in(folder: Path) -> Trusted:
    """Whose keys the cluster trusts. Raises ConfigError where there is no list, or none that can be read."""
    path = folder / TRUSTED_FILE
    with naming_path(path):
        is_there = path.exists()
    if not is_there:
        raise ConfigError(
            f"{path}: there is none; make the keys with `tenuto keys create {shlex.quote(str(folder))} --config FILE`"
        )
    return read_trusted(path)


def remedy(folder: Path, principal: str, trusted: Trusted) -> str:
    """What makes a principal's key, as the end of a message; nothing where there is one that is of no use."""
    if (folder / key_file(principal)).exists():
        return ""
    verb = "rotate" if trusted.of(principal) else "add"
    return f"; tenuto keys {verb} {shlex.quote(str(folder))} {principal}"
