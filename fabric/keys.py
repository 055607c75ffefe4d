"""Who may speak: the key pair of this process, and the public keys that are trusted.

A *principal* is who a key speaks for: `scheduler`, `frontend`, `operator`, `node/NAME` (a host's agent and its workers) or
`client/NAME`. Keys are Curve25519 pairs, written as ZeroMQ does (40 characters, Z85).

A keys folder holds `trusted.json`, which is public and the same on every host, and one file with a secret for each principal that
runs on this host. While a key is rotated a principal has two trusted keys, the newest first. What is revoked is refused at the next
message: the folder is looked at again when its list has changed, at most once a second.

A client gets one file, which holds its own pair and the frontends' public keys. It is followed in the same way, so that a client
that runs takes over the file of its next key.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError
from fabric.json_files import FileStamp, read_json, stamp_of, write_whole

SCHEDULER: Final = "scheduler"
FRONTEND: Final = "frontend"
OPERATOR: Final = "operator"
NODE: Final = "node"
CLIENT: Final = "client"
KINDS: Final = (SCHEDULER, FRONTEND, OPERATOR, NODE, CLIENT)
NAMED: Final = (NODE, CLIENT)
"""Kinds of which there are several, each with its own key."""

TRUSTED_FILE: Final = "trusted.json"
KEY_SUFFIX: Final = ".key"
TRUSTED_MAX: Final = 10_000
LOOK_EVERY_MS: Final = 1_000.0
_FILE_BYTES_MAX: Final = 4 << 20
log: Final = logging.getLogger("tenuto")
_DAY: Final = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})?")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FileT = TypeVar("_FileT", bound=msgspec.Struct)
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class TrustedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key, and whose it is. `since`: the day it was made, for people."""

    principal: str
    public: str
    since: str


class Trusted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list that every host has, the newest first."""

    keys: tuple[TrustedKey, ...] = ()

    def of(self, principal: str) -> tuple[str, ...]:
        """A principal's public keys, the newest first."""
        return tuple(key.public for key in self.keys if key.principal == principal)


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A principal's own key. `trusted`: whom a client trusts that has no folder."""

    principal: str
    public: str
    secret: str
    trusted: tuple[TrustedKey, ...] = ()

    def __repr__(self) -> str:
        return f"KeyPair({self.principal!r}, {self.public!r})"  # a secret is in no log


@dataclass(slots=True)
class Keyring:
    """What one process knows: its own pair, and whom it trusts.

    `path`: the folder's list, or a client's file, whose changes `look_again` follows; None: nothing changes.
    """

    own: KeyPair
    trusted: Trusted
    path: Path | None = None
    clock: Clock = MonotonicClock()  # noqa: RUF009  it has no state
    failures: int = 0
    """Looks at a list that could not be read, or was refused: whom it revokes still gets in."""
    changes: int = 0
    """How often somebody came or went."""
    _stamp: FileStamp = (0, 0, 0, 0)
    _looked_at_ms: float = 0.0
    _trouble: str = ""
    _principals: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take(self.trusted)

    def _take(self, trusted: Trusted) -> None:
        self.trusted = trusted
        self._principals = {key.public: key.principal for key in trusted.keys}
        self.changes += 1

    @classmethod
    def of_folder(cls, folder: Path, principal: str) -> Self:
        """Raises ConfigError where the folder lacks that principal's key, or what is there cannot be used."""
        own = read_pair(folder / key_file(principal))
        if own.principal != principal:
            raise ConfigError(f"{folder / key_file(principal)} is the key of {own.principal}")
        path = folder / TRUSTED_FILE
        stamp = _stamp_of(path)  # first: what is replaced in between is read again
        trusted = read_trusted(path)
        if own.public not in trusted.of(principal):
            raise ConfigError(f"{path} does not trust the key of {principal} that lies beside it")
        return cls(own, trusted, path, _stamp=stamp)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """A client's one file, or one of a keys folder. Raises ConfigError for what is no key file."""
        stamp = _stamp_of(path)
        own = read_pair(path)
        if kind_of(own.principal) != CLIENT:
            return cls.of_folder(path.parent, own.principal)
        return cls(own, Trusted(own.trusted), path, _stamp=stamp)

    def look_again(self) -> None:
        """Take over a list that has changed; one that cannot be read changes nothing."""
        now_ms = self.clock.now_ms()
        if self.path is None or now_ms - self._looked_at_ms < LOOK_EVERY_MS:
            return
        self._looked_at_ms = now_ms
        try:
            stamp = _stamp_of(self.path)
            if stamp != self._stamp:
                if self.path.name == TRUSTED_FILE:
                    self._take(read_trusted(self.path))
                else:
                    self._take_file(self.path)
                self._stamp = stamp
        except ConfigError as error:
            self.failures += 1  # the disk is gone, say: whom we trusted we trust
            self._note(str(error))
        else:
            self._note("")

    def _note(self, trouble: str) -> None:
        """Say it once: whoever has revoked a key takes it for refused."""
        if trouble and trouble != self._trouble:
            log.warning("keys_not_taken_over reason=%r", trouble)
        elif self._trouble and not trouble:
            log.info("keys_taken_over path=%s", self.path)
        self._trouble = trouble

    def _take_file(self, path: Path) -> None:
        own = read_pair(path)
        if own.principal != self.own.principal:
            raise ConfigError(f"{path} is the key of {own.principal} now")
        self.own = own
        self._take(Trusted(own.trusted))

    def principal_of(self, public: str) -> str | None:
        """Whose key that is; None: nobody's that is trusted."""
        self.look_again()
        return self._principals.get(public)

    def public_keys(self, principal: str) -> tuple[str, ...]:
        """Those of a principal, the newest first; none where it is not known."""
        self.look_again()
        return self.trusted.of(principal)


def checked_principal(principal: str) -> str:
    """The same. Raises ConfigError for what is none, saying what would be right."""
    kind, slash, name = principal.partition("/")
    if kind in NAMED and _NAME.fullmatch(name):
        return principal
    if kind in KINDS and kind not in NAMED and not slash:
        return principal
    raise ConfigError(
        f"{principal[:100]!r} is no principal: it must be scheduler, frontend, operator, node/NAME or client/NAME, with a NAME of"
        " up to 128 letters, digits, dots, dashes and underscores"
    )


def principal_of_node(name: str) -> str:
    """Whose key an agent and its workers have."""
    return checked_principal(f"{NODE}/{name}")


def kind_of(principal: str) -> str:
    """The first part of a principal."""
    return principal.partition("/")[0]


def key_file(principal: str) -> str:
    """The name of its secret's file in a keys folder."""
    return checked_principal(principal).replace("/", "-") + KEY_SUFFIX


def read_trusted(path: Path) -> Trusted:
    """Raises ConfigError where there is none, or it is no such list."""
    trusted = _read(path, Trusted)
    with naming_path(path):
        found = path.stat()
    if found.st_mode & 0o022 or found.st_uid not in {0, os.geteuid()}:
        raise ConfigError(f"{path}: others may write it, and so let in whom they like; chmod 644 {path}")
    if len(trusted.keys) > TRUSTED_MAX:
        raise ConfigError(f"{path}: has {len(trusted.keys)} keys; it may have {TRUSTED_MAX}")
    _check_keys(path, trusted.keys)
    return trusted


def read_pair(path: Path) -> KeyPair:
    """Raises ConfigError where there is none, or others of this host may read it."""
    pair = _read(path, KeyPair)
    with naming_path(path):
        mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"{path}: others may read it (mode {mode:04o}); chmod 600 {path}, or rotate the key"
        )
    for text in (pair.public, pair.secret):
        if not _Z85.fullmatch(text):
            raise ConfigError(f"{path}: is no key file")
    checked_principal(pair.principal)
    _check_keys(path, pair.trusted)
    return pair


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[None]:
    """One change of a keys folder at a time. Raises ConfigError where it cannot be written."""
    with naming_path(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_private(path: Path, content: Trusted | KeyPair) -> None:
    """A whole new file that only this user can read, or the old one; never a half. Raises ConfigError."""
    text = msgspec.json.format(msgspec.json.encode(content)).decode()
    with naming_path(path):
        write_whole(path, f"{text}\n", is_synced=True)


@contextlib.contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Turn what the system says about a file into a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error


def _check_keys(path: Path, keys: Sequence[TrustedKey]) -> None:
    for key in keys:
        checked_principal(key.principal)
        if not _Z85.fullmatch(key.public):
            raise ConfigError(f"{path}: the key of {key.principal} is none")
        if not _DAY.fullmatch(key.since):
            raise ConfigError(f"{path}: the key of {key.principal} has no day of a kind like 2026-11-23")


def _read(path: Path, type_: type[_FileT]) -> _FileT:
    with naming_path(path):
        try:
            return read_json(path, type_, _FILE_BYTES_MAX)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error


def _stamp_of(path: Path) -> FileStamp:
    with naming_path(path):
        return stamp_of(path.stat())
