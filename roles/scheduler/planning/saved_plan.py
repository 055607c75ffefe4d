"""The plan as it was changed, for the scheduler that goes on when this one was killed: the next one here, or a standby.

Slices outlive their scheduler. One that began with the file's plan would end those that the file does not know,
and forget models that operators have added. So the active scheduler writes down each plan that it has settled, in a
file of its own, and sends it to the standbys, which do the same with what they are sent: also the first one, for the next
scheduler may read another configuration. The plan that counts is
that of the highest epoch, and of that the one with the highest number. One of another configuration counts where it can be carried over. `tenuto up` takes the files away when it ends itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

from fabric.clock import Clock
from fabric.errors import ConfigError
from fabric.json_files import read_json, write_whole
from fabric.limits import DOCUMENT_CHARS_MAX
from fabric.messages import PlanCopy
from roles.config.documents import through_json
from roles.runtime.process import log
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.replay_start import settings_of
from roles.scheduler.settings import SchedulerSettings

PLAN_SUFFIX: Final = ".plan"
AGAIN_AFTER_MS = 5_000.0  # a plan that could not be written, because the disk is full


class _Kept(Struct, frozen=True):
    """What a file says. `document`: the digest of the configuration; `about`: the plan."""

    document: str
    epoch: int
    number: int
    about: str


Begun = tuple[SchedulerSettings, ControllerSettings]


class SavedPlan:
    """One scheduler's file, good for one configuration. `failures`: how often it could not be written.

    `carry_over`: what is to be made of another configuration's plan, if anything; None: nothing. `role_ids`: the schedulers of
    its shard, whose plans are its own too.
    """

    def __init__(
        self,
        run_dir: Path,
        role_id: str,
        document: Mapping[str, Any],
        carry_over: Callable[[Begun], Begun | None] | None = None,
        role_ids: Sequence[str] = (),
        write_file: Callable[[Path, str], None] = write_whole,
    ) -> None:
        self._names = {f"{one}{PLAN_SUFFIX}" for one in (role_id, *role_ids)}
        self._carry_over = carry_over
        self._write_file = write_file
        self.failures = 0
        self.digest = hashlib.sha256(json.dumps(through_json(document), sort_keys=True).encode()).hexdigest()
        """Of the configuration."""
        self._written: tuple[int, int] | None = None
        self._unwritten: tuple[int, int] | None = None
        self._again_at_ms = 0.0
        self._has_grown_too_large = False
        self._path = run_dir / f"{role_id}{PLAN_SUFFIX}"
        self.newest: PlanCopy | None = None
        """What was kept last, if anything was."""
        self.epoch_read = 0
        """Of the plan that was read last; 0: none was of use."""

    def read(self) -> Begun | None:
        """What to go on from, of all schedulers' files and what was kept; None: nothing of use is there."""
        found = [copy for path in self._paths() if (copy := _read(path)) is not None]
        if self.newest is not None:
            found.append(self.newest)
        self.epoch_read = 0
        for copy in sorted(found, key=lambda one: (one.epoch, one.number), reverse=True):
            begun = self._begun(copy)
            if begun is not None:
                self.epoch_read = copy.epoch
                return begun
        return None

    @property
    def state(self) -> object:
        """Equal as long as `read` finds the same: another scheduler of this host may have written what did not come here."""
        files = [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in map(_stat, self._paths()) if stat]
        newest = self.newest
        return files, None if newest is None else (newest.epoch, newest.number)

    def is_due(self, epoch: int, number: int, clock: Clock) -> bool:
        """Whether this scheduler's own plan, so settled, is not what it wrote last.

        One that could not be written waits; the next one does not, for standbys are sent it then. Nor does the same one at a higher
        epoch: written with the former one it would count for less than what another scheduler settled in between.
        """
        version = (epoch, number)
        return version != self._written and (
            version != self._unwritten or clock.now_ms() >= self._again_at_ms
        )

    def write(self, copy: PlanCopy, now_ms: float) -> None:
        """Keep this scheduler's own plan; where it cannot be written, it is due again in a while."""
        version = (copy.epoch, copy.number)
        if self.keep(copy):
            self._written = version
        else:
            self._unwritten, self._again_at_ms = version, now_ms + AGAIN_AFTER_MS

    def keep(self, copy: PlanCopy) -> bool:
        """Keep a plan, whole or not at all, unless a newer one is kept; False: only as long as this process lives."""
        if self.newest is not None and (copy.epoch, copy.number) < (self.newest.epoch, self.newest.number):
            return True
        self.newest = copy
        kept = _Kept(copy.digest, copy.epoch, copy.number, copy.document)
        try:
            self._write_file(self._path, json.dumps(asdict(kept)))
        except OSError as error:
            self.failures += 1
            log.error("plan_not_kept path=%s reason=%r", self._path, error.strerror)
            return False
        return True

    def log_if_too_large(self, document: str | bytes) -> bool:
        """Whether no message can hold a plan; said once, until another one fits. It is kept here all the same."""
        is_too_large = len(document) > DOCUMENT_CHARS_MAX
        if is_too_large and not self._has_grown_too_large:
            log.warning(
                "plan_too_large bytes=%d max=%d: standbys get no copy of it, and commands cannot play it",
                len(document),
                DOCUMENT_CHARS_MAX,
            )
        self._has_grown_too_large = is_too_large
        return is_too_large

    def _begun(self, copy: PlanCopy) -> Begun | None:
        """What to go on from where this plan ran; None: it is of no use."""
        if copy.digest != self.digest and self._carry_over is None:
            return None
        try:
            settings, _, planning = settings_of(copy.document.encode())
        except ConfigError as error:
            log.warning("plan_not_read epoch=%d reason=%r", copy.epoch, str(error))
            return None
        if planning is None:
            return None
        if copy.digest == self.digest or self._carry_over is None:
            return settings, planning
        carried = self._carry_over((settings, planning))
        if carried is not None:
            log.info("plan_carried_over slices=%d of=%d", len(carried[0].slices), len(settings.slices))
        return carried

    def _paths(self) -> list[Path]:
        return [self._path.parent / name for name in sorted(self._names)]


def _stat(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return path.stat()
    return None


def _read(path: Path) -> PlanCopy | None:
    try:
        kept = read_json(path, _Kept)
        return PlanCopy(kept.epoch, kept.number, kept.document, kept.about)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("plan_not_read path=%s reason=%r", path, str(error))
        return None
