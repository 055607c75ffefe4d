"""Bearer tokens (RFC 6750): who may ask. A file has one token a line, so that a new one can be added before an old one goes."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from pathlib import Path
from typing import Final

from fabric.errors import ConfigError
from fabric.json_files import FileStamp, stamp_of
from roles.gateway.failures import NoToken

CHARS_MIN: Final = 16
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")


class Tokens:
    """Those of a file; without one everybody may ask. Raises ConfigError for a file that others can read, or without tokens."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp: FileStamp | None = None
        self._digests: tuple[bytes, ...] = ()
        if path is not None:
            self._read(path)

    @property
    def is_asked_for(self) -> bool:
        """Whether a token is needed."""
        return self._path is not None

    def refresh(self) -> None:
        """Take over a file that was changed. Raises ConfigError, and keeps what it had."""
        if self._path is not None:
            self._read(self._path)

    def check(self, authorization: str | None) -> None:
        """Raises Unauthorised unless the header field has one of them."""
        if self._path is None:
            return
        kind, _, token = (authorization or "").partition(" ")
        digest = _digest(token.strip())
        # All are compared, each in constant time: how long it takes says nothing about any of them.
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        if kind.lower() != "bearer" or True not in matches:
            raise NoToken("give a token: Authorization: Bearer …")

    def _read(self, path: Path) -> None:
        try:
            status = path.stat()
            if stamp_of(status) == self._stamp:
                return
            lines = path.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token file {path} cannot be read: {error}") from error
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"others may read the token file {path}: chmod 600 it")
        for token in lines:
            if len(token) < CHARS_MIN or not _TOKEN.fullmatch(token):
                raise ConfigError(
                    f"{path}: a token has {CHARS_MIN} characters and more, of letters, digits and . _ ~ + / = -"
                )
        if not lines:
            raise ConfigError(f"{path}: has no token")
        self._digests = tuple(_digest(token) for token in lines)
        self._stamp = stamp_of(status)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
