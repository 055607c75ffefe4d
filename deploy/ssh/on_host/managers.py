"""What keeps roles alive when the ssh session is over, and starts them again with the host."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from deploy.ssh.on_host.folders import Place, read_text
from deploy.ssh.on_host.system import (
    Refused,
    own_directory,
    quoted,
    run,
    say,
    sha256,
    until,
    write_whole,
)

STOP_LIMIT_S = 40
ASK_LIMIT_S = 20
LOG_LIMIT = "log_limit.sh"
LOG_KILOBYTES_MAX = 50_000
LOG_LOOK_EVERY_S = 10.0
NO_CRONTAB = ("no crontab for", "No such file")
"""How cron's kinds say that a user has none."""


class Manager(ABC):
    """What keeps roles alive: systemd's user units, or supervisord. Names are role ids."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def prepare(self) -> None:
        """Once, before the first role starts."""

    @abstractmethod
    def write(self, role_id: str) -> None:
        """Make it known."""

    @abstractmethod
    def running(self) -> set[str]:
        """Who is kept alive now."""

    @abstractmethod
    def known(self) -> set[str]:
        """Whose units are there."""

    @abstractmethod
    def has_failed(self, role_id: str) -> bool:
        """Whether it ended by itself, and is tried again later at best."""

    @abstractmethod
    def start(self, role_id: str) -> None:
        """Start it, or start it again."""

    @abstractmethod
    def stop(self, role_id: str) -> None:
        """Stop it, and forget its unit."""

    @abstractmethod
    def remove(self) -> None:
        """Undo `prepare`."""


class Systemd(Manager):
    """Units of this user. They outlive the session where lingering is on, and start again with the host.

    A unit is the cluster's whose script it starts, whatever its name is: the user may have several clusters on this host.
    """

    folder = Path.home() / ".config/systemd/user"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._limit = place.base / LOG_LIMIT

    def prepare(self) -> None:
        if not self._is_lingering():
            run(["loginctl", "enable-linger"], ASK_LIMIT_S, check=False)
            (self.place.base / "lingering").touch()  # by us, so that `remove` ends it
        if not self._is_lingering():
            raise Refused(
                "roles would end with the ssh session: run `sudo loginctl enable-linger $USER` on it once"
            )
        write_whole(self._limit, log_limit(self.place).encode(), 0o700)
        unit = self._unit_of(self._limit)
        self._put(unit, systemd_unit(self.place, "logs", self._limit, machine_id()))
        systemctl("enable", "--now", unit)

    def write(self, role_id: str) -> None:
        script, log = self.place.script(role_id), self.place.log(role_id)
        self._put(self._unit(role_id), systemd_unit(self.place, role_id, script, machine_id(), log))

    def running(self) -> set[str]:
        return {
            one
            for one in self.known()
            if systemctl("is-active", self._unit(one), check=False).strip() == "active"
        }

    def known(self) -> set[str]:
        return {script.stem for script in self._units() if script == self.place.script(script.stem)}

    def has_failed(self, role_id: str) -> bool:
        state = systemctl("show", "--property=SubState", "--value", self._unit(role_id), check=False).strip()
        return state in ("failed", "auto-restart", "dead")

    def start(self, role_id: str) -> None:
        systemctl("enable", self._unit(role_id))
        systemctl("restart", self._unit(role_id))

    def stop(self, role_id: str) -> None:
        self._take_away(self._unit(role_id))

    def remove(self) -> None:
        self._take_away(self._unit_of(self._limit))
        if not (self.place.base / "lingering").exists():
            return
        here = f"ConditionHost={machine_id()}\n"
        others = [
            script.parent
            for script, unit in self._units().items()
            if script.name == LOG_LIMIT and here in read_text(self.folder / unit) and script.parent.is_dir()
        ]
        if others:
            (others[0] / "lingering").touch()  # the user's cluster that ends last ends it
        else:
            run(["loginctl", "disable-linger"], ASK_LIMIT_S, check=False)

    def _is_lingering(self) -> bool:
        user = run(["loginctl", "show-user", str(os.getuid()), "--property=Linger"], ASK_LIMIT_S, check=False)
        return "Linger=yes" in user

    def _unit(self, role_id: str) -> str:
        return self._unit_of(self.place.script(role_id))

    def _unit_of(self, script: Path) -> str:
        """The one that is there; former versions gave other names."""
        own = sha256(os.fsencode(self.place.base))[:8]
        return self._units().get(script, f"tenuto-{self.place.host}-{own}.{script.stem}.service")

    def _units(self) -> dict[Path, str]:
        """By the script that it starts, each unit of this user's clusters."""
        found = {}
        for path in self.folder.glob("tenuto-*.service"):
            command = re.search(r'^ExecStart="(.*)"$', read_text(path), re.MULTILINE)
            if command:
                found[Path(command[1].replace("%%", "%"))] = path.name
        return found

    def _put(self, unit: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / unit, text.encode(), 0o644)
        systemctl("daemon-reload")

    def _take_away(self, unit: str) -> None:
        systemctl("disable", "--now", unit, check=False)
        (self.folder / unit).unlink(missing_ok=True)
        systemctl("daemon-reload", check=False)


class Supervisor(Manager):
    """Where systemd does not run: one supervisord for this directory, which cron starts again with the host."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.base = place.base / "supervisor"
        self.conf = self.base / "supervisord.conf"
        self.units = self.base / "units"

    def prepare(self) -> None:
        self.units.mkdir(parents=True, exist_ok=True)
        write_whole(self.conf, supervisor_conf(self.place).encode(), 0o600)
        boot = self.base / "boot.sh"
        write_whole(boot, boot_script(self.place, self._daemon()).encode(), 0o700)
        if not self._is_alive():
            run(self._daemon(), ASK_LIMIT_S)
            until(self._is_alive, ASK_LIMIT_S, "supervisord did not come up")
        crontab(add=f"@reboot {boot}")

    def write(self, role_id: str) -> None:
        write_whole(self.units / f"{role_id}.ini", supervisor_unit(self.place, role_id).encode(), 0o600)

    def running(self) -> set[str]:
        return {one for one, state in self._states().items() if state in ("RUNNING", "STARTING")}

    def known(self) -> set[str]:
        return {path.stem for path in self.units.glob("*.ini")} if self.units.is_dir() else set()

    def has_failed(self, role_id: str) -> bool:
        return self._states().get(role_id) in ("BACKOFF", "FATAL", "EXITED")

    def start(self, role_id: str) -> None:
        self._control("reread")
        # That it ended at once is seen at its state, and why in its log.
        self._control("restart" if role_id in self._states() else "add", role_id, check=False)

    def stop(self, role_id: str) -> None:
        if self._is_alive():
            self._control("stop", role_id, check=False)
            (self.units / f"{role_id}.ini").unlink(missing_ok=True)
            self._control("reread", check=False)
            self._control("remove", role_id, check=False)
        (self.units / f"{role_id}.ini").unlink(missing_ok=True)

    def remove(self) -> None:
        crontab(remove=str(self.base / "boot.sh"))
        if self._is_alive():
            self._control("shutdown", check=False)
            until(lambda: not self._is_alive(), STOP_LIMIT_S, "supervisord did not end")

    def _states(self) -> dict[str, str]:
        if not self._is_alive():
            return {}
        lines = (line.split() for line in self._control("status", check=False).splitlines())
        return {words[0]: words[1] for words in lines if len(words) > 1}

    def _is_alive(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.place.run_dir / "supervisor.sock"))
            except OSError:
                return False
        return True

    def _daemon(self) -> list[str]:
        return [*self._python("supervisord"), "-c", str(self.conf)]

    def _control(self, *words: str, check: bool = True) -> str:
        return run([*self._python("supervisorctl"), "-c", str(self.conf), *words], STOP_LIMIT_S, check=check)

    def _python(self, module: str) -> list[str]:
        code = f"import sys; sys.path.insert(0, {str(self.base / 'lib')!r}); from supervisor.{module} import main; main()"
        return [sys.executable, "-I", "-c", code]


def manager_of(place: Place) -> Manager:
    """The one that the configuration names, or that this host has."""
    is_systemd = place.units == "systemd" or (place.units == "auto" and has_systemd())
    return Systemd(place) if is_systemd else Supervisor(place)


def boot_script(place: Place, daemon: Sequence[str]) -> str:
    """What cron starts with the host. supervisord makes no folder for its socket, and what was in /tmp may have gone with the last start."""
    return f"#!/bin/sh\numask 077\n{own_directory(str(place.run_dir))}\nexec {quoted(daemon)}\n"


def log_limit(place: Place, kilobytes: int = LOG_KILOBYTES_MAX, every_s: float = LOG_LOOK_EVERY_S) -> str:
    """A shell's program beside systemd, which appends to logs without an end: one that is too long is copied aside, over the last copy, and begins anew.

    Its writers go on: they append. What they write between copy and cut is lost.
    """
    cut = """cp "$1" "$1.1"; : > "$1\""""
    find = f"find {quoted([str(place.base / 'logs')])} -name '*.log' -size +{kilobytes}k -exec sh -c '{cut}' - {{}} ';'"
    return f"#!/bin/sh\numask 077\nwhile :; do sleep {every_s:g}; {find}; done\n"


def systemd_unit(place: Place, name: str, script: Path, machine: str, log: Path | None = None) -> str:
    """A unit of this user, for the one machine that has that id: where hosts share a home, the others find it and its link there too.

    It is tried again for as long as it takes, as by supervisord. An agent ends its workers and guards itself: those that may outlive it, or
    have to end after it, do so where it crashes.
    """
    mode = "process" if name.startswith("node-") else "mixed"
    command, output = (str(path).replace("%", "%%") for path in (script, log))
    said = f"StandardOutput=append:{output}\nStandardError=append:{output}\n" if log else ""
    return f"""[Unit]
Description=Tenuto {name} on {place.host}
ConditionHost={machine}
StartLimitIntervalSec=0

[Service]
ExecStart="{command}"
Restart=on-failure
RestartSec=5
KillMode={mode}
TimeoutStopSec=30
LimitNOFILE=infinity
{said}
[Install]
WantedBy=default.target
"""


def supervisor_conf(place: Place) -> str:
    """Of the daemon; its socket is this user's."""
    base, sock = (str(path).replace("%", "%%") for path in (place.base, place.run_dir / "supervisor.sock"))
    return f"""[supervisord]
logfile={base}/logs/supervisord.log
logfile_maxbytes=5MB
logfile_backups=1
pidfile={base}/supervisor/supervisord.pid
childlogdir={base}/logs
directory=/

[unix_http_server]
file={sock}
chmod=0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{sock}

[include]
files={base}/supervisor/units/*.ini
"""


def supervisor_unit(place: Place, role_id: str) -> str:
    """Of one role. It is tried again for as long as it takes: its peers may come up later than it."""
    base = str(place.base).replace("%", "%%")
    return f"""[program:{role_id}]
command="{base}/roles/{role_id}.sh"
autorestart=unexpected
exitcodes=0
startsecs=1
startretries=1000000
stopsignal=TERM
stopwaitsecs=30
killasgroup=true
redirect_stderr=true
stdout_logfile={base}/logs/{role_id}.log
stdout_logfile_maxbytes=50MB
stdout_logfile_backups=2
"""


def machine_id() -> str:
    """By which systemd tells hosts apart; it stays, as lingering does, where the host keeps its /etc and /var."""
    return Path("/etc/machine-id").read_text(encoding="ascii").strip()


def has_systemd() -> bool:
    """Whether this user has a running systemd."""
    if not Path("/run/systemd/system").is_dir() or shutil.which("systemctl") is None:
        return False
    return "=" in systemctl("show-environment", check=False)


def systemctl(*words: str, check: bool = True) -> str:
    """Of this user's units."""
    environ = {**os.environ}
    environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    return run(["systemctl", "--user", *words], STOP_LIMIT_S, check=check, env=environ)


def crontab(add: str = "", remove: str = "") -> None:
    """A line of this user's table. One that cannot be read is left as it is: what is written replaces all of it."""
    if shutil.which("crontab") is None:
        return
    try:
        listed = _crontab("-l")
        if listed.returncode and not any(text in _said(listed) for text in NO_CRONTAB):
            say(f"cannot read the crontab, so roles do not start with the host: {_said(listed)}")
            return
        lines = listed.stdout.removesuffix(b"\n").split(b"\n") if listed.stdout else []
        wanted = [line for line in lines if not (remove and os.fsencode(remove) in line)]
        if add and os.fsencode(add) not in wanted:
            wanted.append(os.fsencode(add))
        if wanted == lines:
            return
        written = _crontab("-", b"".join(line + b"\n" for line in wanted))
        if written.returncode:
            say(f"cannot write the crontab, so roles do not start with the host: {_said(written)}")
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"the crontab stays as it is, so roles do not start with the host: {error}")


def _crontab(word: str, table: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """In bytes: what others have written there is in whatever encoding."""
    return subprocess.run(
        ["crontab", word], input=table, capture_output=True, check=False, timeout=ASK_LIMIT_S
    )


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode("utf-8", "replace").strip()[-200:]
