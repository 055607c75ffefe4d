"""What manifests are filled with: the contents of the files that a cluster's file names, and its keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.k8s.requirements import Wanted
from deploy.keys import remedy, trusted_in
from fabric.errors import ConfigError
from fabric.keys import FRONTEND, SCHEDULER, TRUSTED_FILE, Keyring, key_file, naming_path, principal_of_node

CONFIG_BYTES_MAX: Final = 1 << 20
"""Of a ConfigMap."""


@dataclass(frozen=True, slots=True)
class Material:
    """`config`: by path in the folder. `keys`: by file, with `key_ids` that tell one from the next and are no secret.

    A gateway's tokens and certificates are among the keys, by the key of `cluster.gateway` that names each.
    """

    config: Mapping[str, bytes]
    trusted: bytes
    keys: Mapping[str, bytes]
    key_ids: Mapping[str, str]

    @property
    def config_id(self) -> str:
        """Changes with the configuration."""
        digest = hashlib.sha256()
        for path, content in sorted(self.config.items()):
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:12]


def gather(wanted: Wanted) -> Material:
    """Read it all. Raises ConfigError for what is missing, and for more than a ConfigMap holds."""
    config = {path: _content(source) for path, source in sorted(wanted.files.items())}
    size = sum(map(len, config.values()))
    if size > CONFIG_BYTES_MAX:
        largest = max(config, key=lambda path: len(config[path]))
        raise ConfigError(
            f"the file and what it names are {size:,} bytes ({largest}: {len(config[largest]):,}), and a ConfigMap holds"
            f" {CONFIG_BYTES_MAX:,}: put large files into the image, and name them by their absolute path there"
        )
    nodes = [principal_of_node(node.host) for group in wanted.agents for node in group.nodes]
    trusted = trusted_in(wanted.keys)
    keys, key_ids = {}, {}
    for principal in (SCHEDULER, FRONTEND, *nodes):
        name = key_file(principal)
        try:
            public = Keyring.of_folder(wanted.keys, principal).own.public
        except ConfigError as error:
            raise ConfigError(f"{error}{remedy(wanted.keys, principal, trusted)}") from error
        key_ids[name] = hashlib.sha256(public.encode()).hexdigest()[:12]
        keys[name] = _content(wanted.keys / name)
    for name, path in ({} if wanted.gateway is None else wanted.gateway.files).items():
        keys[name] = _content(path)
        key_ids[name] = hashlib.sha256(keys[name]).hexdigest()[:12]
    return Material(config, _content(wanted.keys / TRUSTED_FILE), keys, key_ids)


def _content(source: Path | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    with naming_path(source):
        if source.stat().st_size > CONFIG_BYTES_MAX:
            raise ConfigError(
                f"{source}: has {source.stat().st_size:,} bytes, and a ConfigMap holds {CONFIG_BYTES_MAX:,}: put it into"
                " the image, and name it by its absolute path there"
            )
        return source.read_bytes()
