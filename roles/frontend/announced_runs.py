"""Runs of seqs: how a frontend and the scheduler speak of many requests in few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fabric.ids import ModelId
from fabric.messages import REQUESTS_TOLD_MAX, SeqRun, Withdraw


def coded(seqs: Iterable[int]) -> tuple[SeqRun, ...]:
    """Run-length code seqs; any order in, ascending runs out."""
    runs: list[SeqRun] = []
    first = following = 0
    for seq in sorted(seqs):
        if following > first and seq == following:
            following += 1
            continue
        if following > first:
            runs.append(SeqRun(first, following - first))
        first, following = seq, seq + 1
    if following > first:
        runs.append(SeqRun(first, following - first))
    return tuple(runs)


@dataclass(slots=True)
class AnnouncedRun:
    """An announced run as the scheduler still has it queued: `left` requests, of them `dead` without a reader.

    Telling the scheduler of every dead request would cost a message each; never telling would let it plan
    batches of the dead. So it is told when half of what it has is dead, which is at most twice per halving.
    """

    model_id: ModelId
    left: int
    dead: list[int] = field(default_factory=list)

    def note_left(self) -> None:
        """One was granted or dropped."""
        self.left -= 1

    def note_dead(self, seq: int) -> Withdraw | None:
        """One was cancelled or expired; a `Withdraw` of all dead so far if they are half of the run now, or no more go into one."""
        self.dead.append(seq)
        if 2 * len(self.dead) < self.left and len(self.dead) < REQUESTS_TOLD_MAX:
            return None
        self.left -= len(self.dead)
        withdraw = Withdraw(self.model_id, coded(self.dead))
        self.dead.clear()
        return withdraw
