"""The requests, and the process that answers one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from deploy.ssh.on_host.folders import (
    Place,
    living_in,
    living_pid,
    places_here,
    read_object,
    refuse_others_base,
)
from deploy.ssh.on_host.logs import LogReader
from deploy.ssh.on_host.looking import COMPLETE, extras_in, facts
from deploy.ssh.on_host.managers import Supervisor, manager_of
from deploy.ssh.on_host.system import Refused, run, say, tell, until, write_whole

LOCK = ".lock"
LOCK_LIMIT_S = 600
LOCK_LOOK_MS = 200
ANSWER_FD = 1
INSTALL_LIMIT_S = 1_200
START_LIMIT_S = 60
ASK_LIMIT_S = 20
NOT_STARTED = 127  # as a shell says it
LOG_TAIL_BYTES = 8_192
FOLLOW_EVERY_S = 0.2


def receive(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """Files from stdin, each whole or not at all; the folder `complete` is marked when all are there."""
    for file in request["files"]:
        path = place.base / file["path"]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(f".{path.name}.part")
        digest, left = hashlib.sha256(), file["size"]
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                while left:
                    chunk = sys.stdin.buffer.read(min(left, 1 << 20))
                    if not chunk:
                        raise Refused("the connection ended in the middle of a file")
                    out.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != file["sha256"]:
                raise Refused(
                    f"{file['path']} was changed while it was sent, or arrived damaged: run it again"
                )
            draft.chmod(file["mode"])
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    for path in (place.base / name for name in request.get("removed", ())):
        path.unlink(missing_ok=True)
    if request.get("complete"):
        (place.base / request["complete"] / COMPLETE).touch()
        prune(place.base / "configs", {*request["kept"], *place.in_use("configs")})
    return {}


def environment(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """A virtual environment for one version with these extras at least, beside those that are there; and what keeps roles alive."""
    folder, extras = place.version(request["version"]), set(request["extras"])
    complete = folder / COMPLETE
    pip = [
        str(folder / "bin/python"),
        "-P",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-input",
    ]
    links = ["--find-links", str(place.base / "wheels"), *(["--no-index"] if request["is_offline"] else [])]
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        say("makes an environment")
        run([sys.executable, "-P", "-m", "venv", str(folder)], INSTALL_LIMIT_S)
    if not complete.exists() or not extras <= extras_in(complete):
        say("installs")
        named = f"[{','.join(sorted(extras))}]" if extras else ""
        run([*pip, *links, f"tenuto{named}=={request['version']}"], INSTALL_LIMIT_S)
        write_whole(complete, " ".join(sorted(extras | extras_in(complete))).encode(), 0o600)
    if isinstance(manager_of(place), Supervisor) and not (place.base / "supervisor/lib/supervisor").is_dir():
        draft = place.base / "supervisor/lib.part"
        shutil.rmtree(draft, ignore_errors=True)
        run([*pip, *links, "--target", str(draft), "supervisor"], INSTALL_LIMIT_S)
        draft.replace(place.base / "supervisor/lib")
    kept = {*request["kept"], *place.in_use("versions")}
    prune(place.base / "versions", kept)
    for path in (place.base / "wheels").glob("tenuto-*.whl"):
        if path.name.split("-")[1] not in kept:
            path.unlink()
    return {}


def prune(folder: Path, kept: Collection[str]) -> None:
    """What neither runs, nor served before, nor is about to run."""
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def start(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """A role with its present script; only put it there where a process runs that has its stamp. Answers when it serves."""
    role_id, script, wanted = request["role_id"], request["script"], request["stamp"]
    manager = manager_of(place)
    run = request["state"]
    for folder in (place.version(run["version"]), place.base / "configs" / run["config"]):
        if not (folder / COMPLETE).exists():  # nothing that serves ends for it
            raise Refused(f"{folder} is not there: another deploy has removed it meanwhile; run it again")
    with contextlib.suppress(FileExistsError):
        place.run_dir.mkdir(mode=0o700, parents=True)
    place.refuse_others_run_dir()  # somebody may have made it just now
    for folder in ("roles", "logs"):
        (place.base / folder).mkdir(mode=0o700, exist_ok=True)
    manager.prepare()
    write_state(place, request["state"])
    write_whole(place.script(role_id), script.encode(), 0o700)
    if not request["is_again"] and role_id in manager.running() and place.started_as(role_id) == wanted:
        write_state(place, request["state"])
        return {"started": False}
    log = place.log(role_id)
    said_before = log.stat().st_size if log.exists() else 0
    before = place.run_file(role_id).get("pid")
    manager.write(role_id)
    manager.start(role_id)

    def serves() -> bool:
        found = place.run_file(role_id)
        if found.get("pid") not in (None, before) and place.started_as(role_id) == wanted:
            return bool(living_pid(found))
        if manager.has_failed(role_id):
            raise Refused
        return False

    try:
        until(serves, START_LIMIT_S, "")
    except Refused:
        raise Refused(f"{role_id} did not start: {last_words(log, said_before)}") from None
    write_state(place, request["state"])
    return {"started": True}


def write_state(place: Place, state: Mapping[str, Any]) -> None:
    """With what served last, as it is now, and what of the node is out of use for the deploy."""
    kept = {"served": place.served, "drained": place.state.get("drained", [])}
    write_whole(place.base / "state.json", json.dumps({**state, **kept}).encode(), 0o600)


def stop(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """Roles that are no longer wanted."""
    manager = manager_of(place)
    for role_id in request["role_ids"]:
        manager.stop(role_id)
        place.script(role_id).unlink(missing_ok=True)
    return {}


def note(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be known of the cluster from now on, beside what is known of it."""
    state = {**place.state, **request["state"]}
    write_whole(place.base / "state.json", json.dumps(state).encode(), 0o600)
    return {}


def remove(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of ours on this host: units, processes, keys, folders."""
    del request
    manager = manager_of(place)
    for role_id in sorted(manager.known()):
        manager.stop(role_id)
    manager.remove()
    shutil.rmtree(place.run_dir, ignore_errors=True)
    for path in [one for one in place.base.iterdir() if one.name != LOCK]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (place.base / LOCK).unlink()  # last: who waits for it, or comes now, begins with an empty folder
    # Somebody came; and the folder above is another host's too, where homes are shared.
    with contextlib.suppress(OSError):
        place.base.rmdir()
        place.base.parent.rmdir()
    return {}


def logs(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """Lines of logs with their moments, as they come where they are followed."""
    since_ms, role = request["since_ms"], request["role"]
    readers = {
        path.stem: LogReader(path, [path.with_name(f"{path.name}.{number}") for number in (1, 2)])
        for path in sorted((place.base / "logs").glob("*.log"))
    }
    readers = {one: reader for one, reader in readers.items() if not role or one == role}
    while True:
        for role_id, reader in readers.items():
            lines = [(at_ms, line) for at_ms, line in reader.read() if at_ms >= since_ms]
            if lines:
                tell({"progress": {"role": role_id, "lines": lines}})
        if not request["is_followed"]:
            return {}
        if select.select([sys.stdin], [], [], FOLLOW_EVERY_S)[0]:  # the operator went away
            return {}


def run_files(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """Of the roles that live in this host's run directory: the deployed cluster's, else that of `tenuto up`.

    The deployed one is that of the folder that was asked for, else the one that runs here. `cluster`: what its configuration says of all roles' hosts.
    `up`: where `tenuto up` takes requests, and which roles it keeps down; null where none runs.
    """
    del request
    given = os.environ.get("TENUTO_RUN_DIR")
    if not given and not living_in(place, place.run_dir):
        here = [one for one in places_here() if living_in(one, one.run_dir)]
        if len(here) > 1:
            bases = ", ".join(str(one.base) for one in here)
            raise Refused(f"several clusters of this user run on it ({bases}): run the command there")
        place = here[0] if here else place
    written = read_object(place.base / "configs" / str(place.state.get("config", "none")) / "cluster.json")
    cluster = {key: written.get(key, {}) for key in ("cluster", "listen", "security")} if written else {}
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    folders = [place.run_dir, Path(runtime) / "tenuto", Path(f"/tmp/tenuto-{os.getuid()}")]
    if given:
        folders.insert(0, Path(given).resolve())
    for folder in folders:
        living = living_in(place, folder)
        if living:
            supervisor = read_object(folder / "up.json")
            up = {"socket": str(folder / "up.control"), "drained": supervisor.get("drained", [])}
            return {
                "run_files": living,
                "looked_in": [str(folder)],
                "cluster": cluster,
                "up": up if living_pid(supervisor) else None,
            }
    return {"run_files": [], "looked_in": list(map(str, folders)), "cluster": cluster, "up": None}


def ask(place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    """What a `tenuto` command of the version that runs here says, as JSON; empty while it cannot say anything."""
    command = [str(place.version(place.state.get("version", "none")) / "bin/tenuto"), *request["words"]]
    environ = {**os.environ, "TENUTO_RUN_DIR": str(place.run_dir)}
    limit_s = request.get("limit_s", ASK_LIMIT_S)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, env=environ
        )
    except FileNotFoundError:
        return {"code": NOT_STARTED, "said": f"there is no {command[0]}", "answer": None}
    except subprocess.TimeoutExpired:
        raise Refused(f"`tenuto {' '.join(request['words'])}` was not over within {limit_s:g} s") from None
    said = (done.stderr.strip().splitlines() or [""])[-1]
    return {
        "code": done.returncode,
        "said": said,
        "answer": json.loads(done.stdout) if done.returncode == 0 else None,
    }


def last_words(log: Path, since: int) -> str:
    """The line of a log that explains an end."""
    with contextlib.suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - LOG_TAIL_BYTES))
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        own = [line[len("tenuto: ") :] for line in lines if line.startswith("tenuto: ")]
        if own or lines:
            return (own or lines)[-1][-400:]
    return f"it did not serve within {START_LIMIT_S} s and said nothing; see {log}"


@contextlib.contextmanager
def alone(base: Path) -> Iterator[None]:
    """One at a time: another deploy, or what is left of one whose operator went away.

    Whose operator goes away while it waits does not begin: what is wanted may be another thing by then.
    """
    end_at = time.monotonic() + LOCK_LIMIT_S
    while (lock := _locked(base)) is None:
        if time.monotonic() > end_at:
            raise Refused(f"another deploy has been at work on it for {LOCK_LIMIT_S} s")
        refuse_forgotten(LOCK_LOOK_MS)
    with lock:
        refuse_forgotten(0)
        yield


def refuse_forgotten(wait_ms: int) -> None:
    """Raises Refused where nobody reads our answer any more, or ceases to within that time."""
    answer = select.poll()
    answer.register(ANSWER_FD, 0)  # its errors, and its end
    if answer.poll(wait_ms):
        raise Refused("whoever asked went away before it was begun")


def _locked(base: Path) -> IO[str] | None:
    """The folder's lock; None while somebody else holds it, or when its holder has removed it while it was opened."""
    path = base / LOCK
    with contextlib.suppress(BlockingIOError, FileNotFoundError), contextlib.ExitStack() as opened:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_others_base(base)  # somebody may have made it just now
        lock = opened.enter_context(path.open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            opened.pop_all()
            return lock
    return None


DOES: Mapping[str, Callable[[Place, Mapping[str, Any]], dict[str, Any]]] = {
    "facts": facts,
    "receive": receive,
    "environment": environment,
    "start": start,
    "stop": stop,
    "note": note,
    "remove": remove,
    "logs": logs,
    "run_files": run_files,
    "ask": ask,
}
READS = ("facts", "run_files", "ask", "logs")


def main() -> None:
    """One request."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what was begun is ended, though its operator went away
    os.umask(0o077)
    request = json.loads(sys.stdin.buffer.readline())
    try:
        place = Place(request)
        place.refuse_others_folders()
        does = DOES[request["do"]]
        if request["do"] in READS:
            answer = does(place, request)
        else:
            with alone(place.base):
                answer = does(place, request)
    except Refused as error:
        tell({"error": str(error)})
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            tell({"error": f"the disk of {request['directory']} is full: make room there and run it again"})
        else:
            tell({"error": f"{error.filename or request['do']}: {error.strerror or error}"})
    else:
        tell({"ok": answer})
