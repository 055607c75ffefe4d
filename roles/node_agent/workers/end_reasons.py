"""Why a worker process ended, in one line for an operator."""

from __future__ import annotations

from roles.node_agent.slice_reports import REASON_CHARS_MAX
from roles.runtime.exit_codes import EXIT_UNKNOWN
from roles.runtime.process_events import explaining_lines


def how_it_ended(code: int) -> str:
    """`code` as of `Popen`: that of `exit`, or minus the signal's number."""
    if code == EXIT_UNKNOWN:
        return "its worker, adopted from a former agent, ended"
    return f"its worker was killed by signal {-code}" if code < 0 else f"its worker exited with code {code}"


def with_last_words(what: str, last_words: str) -> str:
    """One line: what happened, then the last lines that the process said, without those of its log."""
    said = " | ".join(explaining_lines(last_words)[-3:])[-(REASON_CHARS_MAX - 200) :]
    return f"{what}; its last words: {said}" if said else what
