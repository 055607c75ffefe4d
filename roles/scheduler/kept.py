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

from fabric.errors import ConfigError
from roles.process import log
from roles.scheduler.desired import ControllerSettings
from roles.scheduler.recorded import settings_of
from roles.scheduler.settings import SchedulerSettings

PLAN_FILE = "scheduler-0.plan"


class KeptPlan:
    """A file that is good for one configuration. `settled`: the state of the controller it has."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self.settled = 0
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

    def write(self, about: bytes, settled: int) -> None:
        """Keep it, whole or not at all."""
        self.settled = settled
        draft = self._path.with_suffix(".tmp")
        kept = {"document": self._digest, "about": b64encode(about).decode()}
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(self._path)

    def forget(self) -> None:
        """An end in order: whoever starts next begins with the file."""
        self._path.unlink(missing_ok=True)
