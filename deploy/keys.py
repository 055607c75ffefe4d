"""The secrets of a cluster that is deployed: what its keys folder lacks, with the command that makes it; and what its gateways read."""

from __future__ import annotations

import shlex
from pathlib import Path

from fabric.errors import ConfigError
from fabric.keys import TRUSTED_FILE, Trusted, key_file, naming_path, read_trusted
from roles.config.gateway import GatewayConfig
from roles.gateway.certificate import Certificate
from roles.gateway.tokens import Tokens


def trusted_in(folder: Path) -> Trusted:
    """Whose keys the cluster trusts. Raises ConfigError where there is no list, or none that can be read."""
    path = folder / TRUSTED_FILE
    with naming_path(path):
        is_there = path.exists()
    if not is_there:
        raise ConfigError(
            f"{path}: there is none; make the keys with `tenuto keys create {shlex.quote(str(folder))} --config FILE`"
        )
    return read_trusted(path)


def remedy(folder: Path, principal: str, trusted: Trusted) -> str:
    """What makes a principal's key, as the end of a message; nothing where there is one that is of no use."""
    if (folder / key_file(principal)).exists():
        return ""
    verb = "rotate" if trusted.of(principal) else "add"
    return f"; tenuto keys {verb} {shlex.quote(str(folder))} {principal}"


def gateway_secrets(config: GatewayConfig) -> dict[str, bytes]:
    """Tokens and certificate, by the key of `cluster.gateway` that names each. Raises ConfigError for what a gateway would refuse: all of them would."""
    Tokens(config.token_file)
    if config.tls_certificate is not None and config.tls_key is not None:
        Certificate(config.tls_certificate, config.tls_key)
    found = {}
    for key, path in config.files.items():
        with naming_path(path):
            found[key] = path.read_bytes()
    return found
