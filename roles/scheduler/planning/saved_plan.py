"""The plan as it was changed, for a scheduler that is started again after this one was killed.

Slices outlive their scheduler. One that began with the file's plan would end those that the file does not know,
and forget models that operators have added.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.clock import Clock
from fabric.errors import ConfigError
from roles.runtime.core import SCHEDULER_ID
from roles.runtime.process import log, write_whole
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.replay_start import settings_of
from roles.scheduler.settings import SchedulerSettings

PLAN_FILE = f"{SCHEDULER_ID}.plan"
AGAIN_AFTER_MS = 5_000.0  # a plan that could not be written, because the disk is full


class SavedPlan:
    """A file that is good for one configuration. `failures`: how often it could not be written."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self.failures = 0
        self._settled = 0
        self._again_at_ms = 0.0
        self._path = path
        self._digest = hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()

    def read(self) -> tuple[SchedulerSettings, ControllerSettings] | None:
        """What to go on from; None: nothing was changed, or the file's configuration was."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if kept["document"] != self._digest:
                return None
            settings, _, planning = settings_of(b64decode(kept["about"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            log.warning("plan_not_read path=%s reason=%r", self._path, str(error))
            return None
        log.info("plan_taken_up models=%d slices=%d", len(settings.models), len(settings.slices))
        return None if planning is None else (settings, planning)

    def is_due(self, settled: int, clock: Clock) -> bool:
        """Whether the plan changed since it was written. `settled`: the state of the controller that has it."""
        return settled != self._settled and clock.now_ms() >= self._again_at_ms

    def write(self, about: bytes, settled: int, now_ms: float) -> None:
        """Keep it, whole or not at all; where it cannot be written, it is due again in a while."""
        kept = {"document": self._digest, "about": b64encode(about).decode()}
        try:
            write_whole(self._path, json.dumps(kept))
        except OSError as error:
            self.failures += 1
            self._again_at_ms = now_ms + AGAIN_AFTER_MS
            log.error("plan_not_kept path=%s reason=%r", self._path, error.strerror)
            return
        self._settled = settled

    def forget(self) -> None:
        """An end in order: whoever starts next begins with the file."""
        self._path.unlink(missing_ok=True)
