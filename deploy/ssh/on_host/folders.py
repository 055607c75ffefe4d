"""The folders of one host's part of a cluster, and what its roles have left there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.ssh.on_host.system import Refused

SOCKET_PATH_MAX = 107
ON_A_NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "fuse.sshfs",
    "fuse.glusterfs",
    "9p",
)


class Place:
    """`base`: of this host, under the user's home, which hosts may share. `run_dir`: on a disk of this host.

    Sockets have short paths, and none on a network's file system: then the run directory is in /tmp.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.host = str(request["host"])
        if (
            self.host in ("", ".", "..") or "/" in self.host
        ):  # `remove` empties `base`, which must be ours alone
            raise Refused(f"{self.host!r} can be no host's name")
        self.units = str(request["units"])
        self.base = Path.home() / Path(request["directory"]).expanduser() / self.host
        self.run_dirs = self.base / "run", Path(f"/tmp/tenuto-{os.getuid()}-{self.host}")
        socket_path = self.run_dirs[0] / f"worker-{self.host}-9999.sock"
        is_near = (
            len(os.fsencode(socket_path)) <= SOCKET_PATH_MAX and file_system(self.base) not in ON_A_NETWORK
        )
        self.run_dir = self.run_dirs[0 if is_near else 1]

    def refuse_others_folders(self) -> None:
        """Raises Refused where others may put something into our folders, or other folders in their place."""
        refuse_others_base(self.base)
        self.refuse_others_run_dir()

    def refuse_others_run_dir(self) -> None:
        """Raises Refused where others may have put something into our run directory; one that is not there is nobody's."""
        reason = not_ours(self.run_dir)
        if reason:
            raise Refused(f"{self.run_dir} {reason}: have it removed, or name another deploy.directory")

    def version(self, version: str) -> Path:
        """The folder of a virtual environment."""
        return self.base / "versions" / version

    def log(self, role_id: str) -> Path:
        """What a role says."""
        return self.base / f"logs/{role_id}.log"

    def script(self, role_id: str) -> Path:
        """What starts a role."""
        return self.base / f"roles/{role_id}.sh"

    @property
    def state(self) -> dict[str, Any]:
        """What runs or is about to, what served last, and what served before; empty at first."""
        return read_object(self.base / "state.json")

    @property
    def served(self) -> dict[str, str]:
        """With what all roles but gateways served last: the present version and configuration where they do with these.

        Nothing depends on a gateway: one that does not start leaves its host in step with the others.
        """
        now = {key: str(self.state.get(key, "")) for key in ("version", "config")}
        roles = self.state.get("roles", [path.stem for path in (self.base / "roles").glob("*.sh")])
        roles = [role_id for role_id in roles if not role_id.startswith("gateway-")]
        if roles and all(self._serves(role_id, now) for role_id in roles):
            return now
        found: dict[str, str] = self.state.get("served", now)  # not written by an older version
        return found

    def _serves(self, role_id: str, run: Mapping[str, str]) -> bool:
        text, stamp = read_text(self.script(role_id)), self.started_as(role_id)
        is_present = run["version"] in names_in(text, "versions") and run["config"] in names_in(
            text, "configs"
        )
        return is_present and stamp != "" and stamp in text and bool(living_pid(self.run_file(role_id)))

    def in_use(self, kind: str) -> set[str]:
        """Of `versions` or `configs`: those that a role is started with, or a process that serves was.

        A change that does not concern a role leaves it in its folder, and its workers; one that failed leaves roles with what was before.
        """
        texts = [read_text(path) for path in (self.base / "roles").glob("*.sh")]
        for path in self.run_dir.glob("*.json"):
            process = Path(f"/proc/{self.run_file(path.stem).get('pid')}")
            texts.append(read_text(process / "cmdline"))
            with contextlib.suppress(OSError):
                texts.append(str((process / "cwd").readlink()))
        return {name for text in texts for name in names_in(text, kind)}

    def run_file(self, role_id: str, folder: Path | None = None) -> dict[str, Any]:
        """Of a role that serves; empty where it does not. `folder`: another run directory than this one's."""
        return read_object((folder or self.run_dir) / f"{role_id}.json")

    def started_as(self, role_id: str) -> str:
        """The stamp of the script that a role's process was started by."""
        return read_text(self.run_dir / f"{role_id}.stamp").strip()


def not_ours(path: Path) -> str:
    """Why others may write in a directory; empty where they may not, or it is not there.

    In /tmp anybody makes what is not there, also as a link to where only we may write.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to {os.getuid()}, who deploys"
    return "is one that others may write in" if status.st_mode & 0o022 else ""


def refuse_others_base(base: Path) -> None:
    """Raises Refused where anybody may write in the folder of our scripts and keys, or put another in its place.

    Its group may, as in the home of a user with a group of their own: what we make there is ours alone.
    """
    uid, above = os.getuid(), base.parent.resolve()
    for path in [base, *base.parents, above, *above.parents]:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        is_directory, is_ours = stat.S_ISDIR(status.st_mode), status.st_uid in (uid, 0)
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        reason = ""
        if path == base and not is_directory:
            reason = "is no directory"
        elif not is_ours and (path in (base, base.parent, above) or path.parent.stat().st_mode & 0o002):
            reason = f"belongs to user {status.st_uid}, not to {uid}, who deploys"
        elif is_directory and status.st_mode & 0o002 and (path == base or not is_sticky):
            reason = "is one that others may write in"
        if reason:
            raise Refused(f"{path} {reason}: have it removed, or name another deploy.directory")


def places_here() -> list[Place]:
    """Of the clusters of which a process of this user runs on this host: whatever their folders' names are, and whoever else has folders here."""
    bases = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            folder = (entry / "cwd").readlink()
            if folder.parent.name == "configs" and (folder / "cluster.json").is_file():
                bases.add(folder.parent.parent)
    places = [
        Place({"host": base.name, "directory": str(base.parent), "units": "auto"}) for base in sorted(bases)
    ]
    for place in places:
        # Where the home is a link, the roles know a shorter path than the one that their folder has, and their run directory may be the other.
        place.run_dir = next((one for one in place.run_dirs if living_in(place, one)), place.run_dir)
    return places


def living_in(place: Place, folder: Path) -> list[dict[str, Any]]:
    """The run files in a run directory whose roles live; none where others may write in it."""
    if not_ours(folder):
        return []
    found = [place.run_file(path.stem, folder) for path in sorted(folder.glob("*.json"))]
    return [one for one in found if "role_id" in one and living_pid(one)]


def living_pid(run_file: Mapping[str, Any]) -> int:
    """Of the process that a run file names, which serves; 0 where it does not live, or there is no run file."""
    pid, started_at = run_file.get("pid"), run_file.get("started_at")
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        if isinstance(pid, int) and started_at in (
            None,
            int(fields.split()[19]),
        ):  # else a later one of that pid
            return pid
    return 0


def names_in(text: str, kind: str) -> set[str]:
    """Of `versions` or `configs`, those whose folders are in it."""
    return set(re.findall(rf"/{kind}/([^/\s'\"\0]+)", text))


def read_text(path: Path) -> str:
    """Empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def file_system(path: Path) -> str:
    """The kind of file system a path is on."""
    path, best, kind = existing(path).resolve(), "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            is_above = str(path) == words[1] or str(path).startswith(words[1].rstrip("/") + "/")
            if is_above and len(words[1]) >= len(best):
                best, kind = words[1], words[2]
    return kind


def existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    while not path.exists():
        path = path.parent
    return path


def read_object(path: Path) -> dict[str, Any]:
    """What a JSON file says; empty where there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
