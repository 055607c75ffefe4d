"""Workers written down by their agent, so that the next one of this host can find, check and adopt them."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from fabric.ids import WORKER_PREFIX, Incarnation
from roles.node_agent.events import Orphan
from roles.runtime.children import Processes
from roles.runtime.identities import (
    ProcessIdentity,
    end,
    identity_in,
    identity_of,
    read_record,
    send_signal,
    write_record,
)
from roles.runtime.process import remove_file

KILL_WITHIN_S = 1.0

log = logging.getLogger("tenuto")


class WorkerRecord(Struct, frozen=True):
    """One worker. `gpu`: whose MPS client it is; None: nobody's."""

    orphan: Orphan
    identity: ProcessIdentity
    gpu: int | None


class WorkerRecords:
    """The files of one node: ``<run dir>/workers-<host>/<worker id>.json``."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._directory = run_dir / f"workers-{host}"

    def write(self, orphan: Orphan, gpu: int | None) -> None:
        """Write a living worker down; nothing if it has just ended.

        Where it cannot be written, as on a full disk, the worker serves on, but the next agent cannot adopt it.
        """
        identity = identity_of(orphan.pid)
        if identity is None:
            return
        record = {"process": identity, "incarnation": orphan.incarnation, "gpu": gpu}
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            write_record(self._path(orphan.worker_id), record)
        except OSError as error:
            log.warning("worker_not_written_down worker=%s reason=%r", orphan.worker_id, error.strerror)

    def forget(self, worker_id: str) -> None:
        """It has ended."""
        remove_file(self._path(worker_id))

    def take_over(
        self, processes: Processes, daemons: Iterable[int], *, is_adopting: bool
    ) -> list[WorkerRecord]:
        """Those of a former agent that live and may serve on; the others are ended here.

        A client of MPS may serve on only where its daemon does too: else its share would be a word.
        """
        kept, gpus = [], tuple(daemons)  # what a file says of a GPU need not be a number
        for record in list(self._read()):
            has_its_share = record.gpu is None or record.gpu in gpus
            worker_id = record.orphan.worker_id
            if is_adopting and has_its_share and processes.adopt(worker_id, record.identity):
                kept.append(record)
            else:
                self._end(record)
        return kept

    def end_all(self) -> None:
        """No agent comes any more that would adopt them."""
        records = list(self._read())
        for record in records:  # all at once, as each takes its time
            send_signal(record.identity, signal.SIGKILL)
        for record in records:
            self._end(record)
        self.remove()

    def remove(self) -> None:
        """Take the directory away, when nobody is in it."""
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def _end(self, record: WorkerRecord) -> None:
        worker_id = record.orphan.worker_id
        if not end(record.identity, KILL_WITHIN_S):
            log.error("orphan_stuck worker=%s pid=%d", worker_id, record.identity.pid)
        self.forget(worker_id)

    def _read(self) -> Iterator[WorkerRecord]:
        if not self._directory.is_dir():
            return
        for path in sorted(self._directory.glob(f"{WORKER_PREFIX}*.json")):
            record = read_record(path)
            identity = identity_in(record, "process")
            if identity is None:
                remove_file(path)
                continue
            gpu = record.get("gpu")
            incarnation = Incarnation(str(record.get("incarnation")))
            yield WorkerRecord(Orphan(path.stem, identity.pid, incarnation, gpu is not None), identity, gpu)

    def _path(self, worker_id: str) -> Path:
        return self._directory / f"{worker_id}.json"
