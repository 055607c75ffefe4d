"""A configuration as it was read, and what a scheduler of it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from roles.config.cluster import ClusterConfig
from roles.config.shards import shard_document
from roles.scheduler.planning.carried_over import carried_over
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.planning.saved_plan import Begun
from roles.scheduler.settings import settings_from


class Written(Struct, frozen=True):
    """A configuration, and the document that it was read from; paths in that are relative to `base_dir`."""

    config: ClusterConfig
    document: Mapping[str, Any]
    base_dir: Path

    def of_shard(self, shard: int) -> Written:
        """The part of one shard, as a cluster of its own."""
        config = self.config
        if config.shards == 1:
            return self
        return Written(config.of_shard(shard), shard_document(self.document, config, shard), self.base_dir)

    def first_plan(self) -> Begun:
        """Where nothing runs yet. Raises ConfigError for a plan that cannot be."""
        config = self.config
        placement = config.place()
        settings = settings_from(config, placement)
        base_dir = str(self.base_dir.absolute())
        return settings, controller_settings(config, self.document, base_dir, placement, settings)

    def carried_over(self, whole: Written, ran: Begun) -> Begun | None:
        """Where another file was served until now; see `carried_over`. `whole`: of which this is a shard's part."""
        models = [model.model_id for model in whole.config.models]
        return carried_over(self.config, self.document, self.base_dir, ran, models)
