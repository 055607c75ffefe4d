"""How a worker starts a later stage: ``python -P -m roles.gpu_worker.stages NAME STAGE RUN_DIR THREADS ADDRESS …``.

The addresses are of all stages' sockets in order, the worker's first: it is where this one's outputs go if it is the last.
"""

from __future__ import annotations

import sys
from pathlib import Path

from roles.runtime.idle_import import import_at_idle_priority


def main() -> int:
    """Run the stage; the exit code."""
    sys.path.append(str(Path.cwd()))  # users' models, as for a worker
    import_at_idle_priority("roles.gpu_worker.stages.process")
    from roles.gpu_worker.stages.process import run_stage  # noqa: PLC0415  after the gentle way

    name, stage, run_dir, threads, *addresses = sys.argv[1:]
    return run_stage(name, int(stage), Path(run_dir), int(threads), addresses)


if __name__ == "__main__":
    sys.exit(main())
