"""Where many simulated runs are played at once: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

import click

from fabric.errors import PeerLost
from roles.runtime.process import PARENT_VARIABLE, child_environment, die_with_parent
from roles.runtime.spawned import DeafContext

DASK_TIMEOUT_S = 10


@contextmanager
def executor_of(workers: int | None, dask: str | None = None) -> Iterator[tuple[Executor, int]]:
    """An executor, and how many runs it plays at once; `workers` None: one per core.

    Raises PeerLost where the Dask cluster does not answer.
    """
    if dask is not None:
        with _dask_executor(dask) as found:
            yield found
        return
    size = workers or len(os.sched_getaffinity(0))
    os.environ.update(child_environment())
    pool = ProcessPoolExecutor(size, mp_context=DeafContext(), initializer=die_with_parent)
    try:
        yield pool, size
    except BaseException:
        for child in multiprocessing.active_children():  # a run under way may take minutes
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop(PARENT_VARIABLE, None)


@contextmanager
def _dask_executor(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        from distributed import Client  # noqa: PLC0415  an extra, and slow to import
    except ImportError as error:
        raise click.ClickException("--dask needs the extra 'sweep': pip install 'tenuto[sweep]'") from error
    try:
        client = Client(address, timeout=DASK_TIMEOUT_S)
    except (OSError, ValueError) as error:  # a time-out is an OSError too
        raise PeerLost(f"no Dask scheduler answers at {address}: {error}") from error
    with client:
        workers = len(client.nthreads())  # a probe is pure Python and fills a core, so one each
        if workers == 0:
            raise PeerLost(f"the Dask cluster at {address} has no workers")
        yield client.get_executor(pure=False), workers
