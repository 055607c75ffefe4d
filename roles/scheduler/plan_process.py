"""The process that makes one plan: ``python -m roles.scheduler.plan_process``.

One packed question on stdin, one packed answer on stdout.
"""

from __future__ import annotations

import os
import sys

from roles.gently import import_gently

NICENESS = 10  # batches come first, on cores that are shared with workers


def main() -> None:
    """Answer and end."""
    import_gently("roles.scheduler.planning")
    from fabric.messages import PlanAsked  # noqa: PLC0415  after the gentle way
    from roles.journal import packed, unpacked  # noqa: PLC0415  as above
    from roles.process import die_with_parent  # noqa: PLC0415  as above
    from roles.scheduler.planning import make_plan  # noqa: PLC0415  as above

    die_with_parent()
    os.nice(NICENESS)
    asked = unpacked(sys.stdin.buffer.read())
    assert isinstance(asked, PlanAsked), "our own parent"
    sys.stdout.buffer.write(packed(make_plan(asked)))


if __name__ == "__main__":
    main()
