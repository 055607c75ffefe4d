"""Files that documents, docstrings and comments name exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fabric", "profiles", "policies", "roles", "deploy", "tests", "benchmarks", "examples")


def test_every_named_file_is_there() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    known = {path.relative_to(ROOT).as_posix() for path in files}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *files]
    dead = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in re.findall(r"`([\w/]+\.py)\b[^`]*`", page.read_text(encoding="utf-8"))
        if not any(path == name or path.endswith(f"/{name}") for path in known)
    ]
    assert dead == []


def test_every_named_page_is_there() -> None:
    """Wherever a program, a script, a test or a page speaks of one."""
    kept = {".py", ".md", ".yaml", ".yml", ".sh", ".sbatch", ".json", ".toml"}
    files = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "Makefile",
        ROOT / "mkdocs.yml",
        *(path for room in (*ROOMS, "docs") for path in (ROOT / room).rglob("*.*") if path.suffix in kept),
    ]
    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
        if not (ROOT / name).is_file()
    ]
    assert dead == []
