"""The process that makes one plan: ``python -m roles.scheduler.planning.plan_process``.

One packed question on stdin, one packed answer on what was stdout at the start. What a policy, a solver or a process
of theirs prints goes to stderr: it is no part of the answer.
"""

from __future__ import annotations

import os
import sys

from roles.runtime.idle_import import import_at_idle_priority

NICENESS = 10  # batches come first, on cores that are shared with workers


def main() -> None:
    """Answer and end."""
    import_at_idle_priority("roles.scheduler.planning.make_plan")
    # Only now: an import that got no core begins the process anew, which must find its stdout as it was.
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from fabric.messages import PlanAsked  # noqa: PLC0415  after the gentle way
    from roles.runtime.journal import packed, unpacked  # noqa: PLC0415  as above
    from roles.runtime.process import die_with_parent  # noqa: PLC0415  as above
    from roles.scheduler.planning.make_plan import make_plan  # noqa: PLC0415  as above

    die_with_parent()
    os.nice(NICENESS)
    asked = unpacked(sys.stdin.buffer.read())
    assert isinstance(asked, PlanAsked), "our own parent"
    with open(answer, "wb") as out:  # noqa: PTH123  a descriptor, not a path
        out.write(packed(make_plan(asked, is_live=True)))


if __name__ == "__main__":
    main()
