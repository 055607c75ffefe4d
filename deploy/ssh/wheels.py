"""Wheels: the one of this very Tenuto, and which of a wheelhouse it needs.

The distribution that runs here is packed as a wheel again, from its own files, so what is carried to hosts is what was tried
here, installed from an index or from a working tree. Its version ends in a hash of its content: two that differ never share a
folder on a host, and the same one is never carried twice.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from fabric.errors import ConfigError
from fabric.keys import naming_path

PACKAGES: Final = ("fabric", "profiles", "policies", "roles", "deploy")
_LEFT_OUT: Final = ("__pycache__", ".pyc", ".so")
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_WHEEL_FILE: Final = "Wheel-Version: 1.0\nGenerator: tenuto\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_NEEDS = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel's name and content: a file here, or made just now."""

    name: str
    size: int
    sha256: str
    path: Path | None = None
    content: bytes = b""

    @property
    def distribution(self) -> str:
        """The name of what is in it, as names are compared."""
        return _comparable(self.name.partition("-")[0])

    def read(self) -> bytes:
        """Its bytes. Raises ConfigError where the file cannot be read."""
        if self.path is None:
            return self.content
        with naming_path(self.path):
            return self.path.read_bytes()


@dataclass(frozen=True, slots=True)
class OwnWheel:
    """This Tenuto. `version` has the hash of its content behind a plus sign."""

    wheel: Wheel
    version: str


def own_wheel() -> OwnWheel:
    """Pack what runs here. Raises ConfigError where it is not installed as a distribution."""
    try:
        found = distribution("tenuto")
    except PackageNotFoundError as error:
        raise ConfigError("tenuto is not installed here as a distribution: pip install it") from error
    files = {name: path.read_bytes() for name, path in _package_files()}
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    metadata = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    digest.update(metadata.encode())
    version = f"{found.version.partition('+')[0]}+{digest.hexdigest()[:12]}"
    metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}", metadata, count=1)
    info = f"tenuto-{version}.dist-info"
    files |= {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": _WHEEL_FILE.encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\ntenuto = roles.cli:main\n",
        f"{info}/top_level.txt": "".join(f"{package}\n" for package in PACKAGES).encode(),
    }
    content = _zipped(files, f"{info}/RECORD")
    name = f"tenuto-{version}-py3-none-any.whl"
    return OwnWheel(Wheel(name, len(content), hashlib.sha256(content).hexdigest(), content=content), version)


def wheels_in(folder: Path) -> list[Wheel]:
    """Every wheel of a wheelhouse. Raises ConfigError where there is none, or one cannot be read."""
    if not folder.is_dir():
        raise ConfigError(f"deploy.wheelhouse: there is no folder {folder}")
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        with naming_path(path), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            wheels.append(Wheel(path.name, path.stat().st_size, sha256, path))
    if not wheels:
        raise ConfigError(f"deploy.wheelhouse: there is no wheel in {folder}; fill it with `pip download -d`")
    return wheels


def needed_wheels(
    own: OwnWheel, wheelhouse: Sequence[Wheel], extras: Sequence[str], beside: Sequence[str]
) -> list[Wheel]:
    """Those of a wheelhouse that Tenuto with these extras needs, and the distributions `beside` it; itself first.

    Markers but for extras are taken as true: a wheel too many is carried, none too few. Raises ConfigError for one of
    Tenuto's own needs that the wheelhouse lacks.
    """
    by_name: dict[str, list[Wheel]] = {}
    for wheel in wheelhouse:
        by_name.setdefault(wheel.distribution, []).append(wheel)
    taken: dict[tuple[str, frozenset[str]], None] = {}
    wanted = [(name, frozenset[str]()) for name in beside]
    wanted += list(_needs(own.wheel, frozenset(extras)))
    missing = sorted({name for name, _ in wanted if name not in by_name})
    if missing:
        raise ConfigError(
            f"deploy.wheelhouse: lacks {', '.join(missing)}; add them with `pip download -d FOLDER {' '.join(missing)}`"
        )
    while wanted:
        one = wanted.pop()
        if one in taken:
            continue
        taken[one] = None
        for wheel in by_name.get(one[0], ())[:1]:
            wanted.extend(_needs(wheel, one[1]))
    names = {name for name, _ in taken}
    return [own.wheel, *(wheel for wheel in wheelhouse if wheel.distribution in names)]


def _needs(wheel: Wheel, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for line in _metadata(wheel).get("requires-dist", ()):
        parts = _NEEDS.fullmatch(line.strip())
        if parts is None:
            continue
        name, its_extras, marker = parts.groups()
        of_extra = _EXTRA.search(marker or "")
        if of_extra is None or of_extra[1] in extras:
            listed = frozenset(one.strip() for one in (its_extras or "").split(",") if one.strip())
            if _comparable(name) == "tenuto":  # an extra made of others
                yield from _needs(wheel, listed)
            else:
                yield _comparable(name), listed


def _metadata(wheel: Wheel) -> Mapping[str, Sequence[str]]:
    source = io.BytesIO(wheel.content) if wheel.path is None else wheel.path
    try:
        with zipfile.ZipFile(source) as archive:
            (name,) = [one for one in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", one)]
            parsed = BytesParser().parsebytes(archive.read(name), headersonly=True)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.path or wheel.name}: is no wheel: {error}") from error
    return {"requires-dist": [str(line) for line in parsed.get_all("Requires-Dist", [])]}


def _package_files() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        folder = Path(importlib.import_module(package).__file__ or "").parent
        for path in sorted(folder.rglob("*")):
            name = f"{package}/{path.relative_to(folder).as_posix()}"
            if path.is_file() and not any(part in name for part in _LEFT_OUT):
                yield name, path


def _zipped(files: Mapping[str, bytes], record: str) -> bytes:
    lines = []
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}\n")
            _add(archive, name, content)
        _add(archive, record, "".join([*lines, f"{record},,\n"]).encode())
    return out.getvalue()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    archive.writestr(info, content)


def _comparable(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
