"""How a node agent starts a worker: ``python -P -m roles.gpu_worker AGENT WORKER_ID RUN_DIR ADDRESS [KEYS PRINCIPAL]``.

ADDRESS is this host's, by which frontends of other hosts reach it. It is `tenuto worker` without the command line's own imports, and it makes way for slices that serve.
"""

from __future__ import annotations

import sys
from pathlib import Path

from roles.runtime.idle_import import import_at_idle_priority


def main() -> int:
    """Serve as a worker; the exit code."""
    # Users' models may lie there: behind our own modules, which a user's deploy.py must not hide.
    sys.path.append(str(Path.cwd()))
    import_at_idle_priority("roles.gpu_worker.shell")
    from fabric.keys import Keyring  # noqa: PLC0415  after the gentle way
    from roles.gpu_worker.shell import WorkerOptions, run_worker  # noqa: PLC0415  likewise

    agent, worker_id, run_dir, address, *key = sys.argv[1:]
    keyring = Keyring.of_folder(Path(key[0]), key[1]) if key else None
    return run_worker(agent, worker_id, Path(run_dir), WorkerOptions(address, keyring=keyring))


if __name__ == "__main__":
    sys.exit(main())
