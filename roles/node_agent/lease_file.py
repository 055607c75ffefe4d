"""The epoch that an agent granted last, on its disk: `<run dir>/node-<host>.lease`, for the next agent of this host."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from msgspec.structs import asdict

from fabric.errors import FabricError
from fabric.ids import NodeId
from fabric.json_files import read_json, write_whole
from fabric.limits import check
from fabric.messages import LeaseReport
from roles.node_agent.lease import NO_LEASE, LeaseRecord

log = logging.getLogger("tenuto")


class LeaseFile:
    """Of one node. It stays when the agent ends: what was granted holds."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._directory = run_dir
        self._path = run_dir / f"node-{host}.lease"

    def read(self) -> LeaseRecord:
        """What a former agent granted. Raises FabricError for a file that cannot be read: it may say that an epoch is taken.

        So it does for one that says what no message may, as all schedulers are told of it.
        """
        try:
            record = read_json(self._path, LeaseRecord)
            check(LeaseReport(NodeId(""), record.epoch, record.holder_id, record.incarnation, is_free=True))
        except FileNotFoundError:
            return NO_LEASE
        except (OSError, ValueError) as error:
            raise FabricError(f"the lease in {self._path} cannot be read: {error}") from error
        return record

    def write(self, record: LeaseRecord) -> bool:
        """Whether it is on the disk now, whatever happens to this host: the file, and its name in the directory."""
        try:
            write_whole(self._path, json.dumps(asdict(record)), is_synced=True)
            self._sync_directory()
        except OSError as error:
            log.warning("lease_not_kept path=%s reason=%r", self._path, error.strerror)
            return False
        return True

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
