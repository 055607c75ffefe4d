"""Of a script that fails, the smallest that still does."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Final

from tests.chaos.virtual.script import Script, smaller
from tests.chaos.virtual.world import play

TRIES_MAX: Final = 120


@dataclass(frozen=True)
class Failure:
    """What went wrong in a history."""

    what: str
    where: str

    @property
    def kind(self) -> str:
        """Without the numbers: failures of one kind are probably one defect."""
        return re.sub(r"[0-9a-f]{8}|\d+(\.\d+)?", "N", self.what)[:60] + self.where

    def __str__(self) -> str:
        return f"{self.what[:600]} ({self.where})"


def failure_of(script: Script) -> Failure | None:
    """Play it; None: all held."""
    try:
        play(script)
    except Exception as error:  # noqa: BLE001  whatever a role raises is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Failure(
            f"{type(error).__name__}: {error}", f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        )
    return None


def shrunk(script: Script, failure: Failure) -> tuple[Script, Failure]:
    """Make it smaller as long as something goes wrong."""
    tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for one in smaller(script):
            tries += 1
            if tries > TRIES_MAX:
                return script, failure
            found = failure_of(one)
            if found is not None:
                script, failure, is_smaller = one, found, True
                break
    return script, failure
