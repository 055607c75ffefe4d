"""What the two cores that keep processes alive hear and do alike: the node agent's and `tenuto up`'s."""

from __future__ import annotations

import re

from msgspec import Struct

from fabric.ids import PeerId
from roles.runtime.core import SCHEDULER

_LOGGED = re.compile(r" level=[A-Z]+ role=")


def explaining_lines(said: str) -> list[str]:
    """The lines of what a process printed that may explain its end: neither empty ones nor those of its log."""
    return [line.strip() for line in said.splitlines() if line.strip() and not _LOGGED.search(line)]


class ProcessExited(Struct, frozen=True):
    """A child is gone and reaped. `code` below 0: killed by that signal. `last_words`: its stderr's tail."""

    name: str
    code: int
    last_words: str


class SchedulerFound(Struct, frozen=True):
    """A scheduler (or its next incarnation) can be reached at `addresses`; `peer` is what it is called here."""

    addresses: tuple[str, ...]
    peer: PeerId = SCHEDULER


class StopAsked(Struct, frozen=True):
    """End everything in order."""


class Warn(Struct, frozen=True):
    """Something a person should read, though everything goes on. `text` is logfmt."""

    text: str


def still_drained(role_id: str) -> str:
    """Why not all roles can be restarted."""
    return f"{role_id} is drained; first use it again: tenuto drain {role_id} --back"
