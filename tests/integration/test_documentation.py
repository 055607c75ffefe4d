"""Every page as a reader does it: its files are written, its commands and its Python are run in their order, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from roles.runtime.run_directory import UP_FILE
from tests.documentation import PAGES, ROOT, Block, blocks

pytestmark = pytest.mark.timeout(
    600
)  # torch is imported several times in some of them, perhaps on a busy host
COMMAND_LIMIT_S = 200
PORTS = (5555, 8000, 8001, 9100)
"""That pages use, and that others may have here."""


def is_to_run(block: Block) -> bool:
    return block.mark is None and block.language in {"console", "python"} and block.file_name is None


@dataclass
class Reader:
    """Who follows a page."""

    home: Path
    ports: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """A folder with what a reader has: the examples, a file and an array of their own, and the commands."""
        shutil.copytree(ROOT / "examples", self.home / "examples")
        with ExitStack() as stack:
            for port in PORTS:
                bound = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                self.ports[f":{port}"] = f":{bound.getsockname()[1]}"
        example = self.home / "examples" / "cluster.yaml"
        example.write_text(self.moved(example.read_text(encoding="utf-8")), encoding="utf-8")
        shutil.copy(example, self.home)  # of a page that speaks of a cluster.yaml and shows none
        np.save(self.home / "x.npy", np.zeros((1, 8, 8), np.float32))
        (self.home / "bin").mkdir()
        for name, command in (("tenuto", "-m roles.cli"), ("python", "")):
            script = self.home / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
            script.chmod(0o755)

    def moved(self, text: str) -> str:
        """With ports that are free."""
        return re.sub(r":(\d{4})\b", lambda found: self.ports.get(found[0], found[0]), text)

    def follow(self, block: Block) -> None:
        if block.file_name is not None:
            path = self.home / block.file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.moved(block.text), encoding="utf-8")
        elif block.mark is None and block.language == "python":
            self.run(shlex.join(["python", "-c", self.moved(block.text)]), block.where, {0})
        elif block.mark is None and block.language == "console":
            for line in block.commands:
                command, _, promised = self.moved(line).partition(" # exit ")
                self.run(
                    command, block.where, {int(code) for code in re.findall(r"\b\d+\b", promised)} or {0}
                )

    def run(self, command: str, where: str, promised: set[int]) -> None:
        ran = subprocess.run(
            ["bash", "-c", command],
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
            env={
                **os.environ,
                "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "TENUTO_RUN_DIR": str(self.home / "run"),
                "COLUMNS": "120",
            },
        )
        assert ran.returncode in promised, f"{where}: {command}\n{ran.stdout}\n{ran.stderr}"


@pytest.fixture
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    found = Reader(tmp_path_factory.mktemp("d"))
    found.prepare()
    yield found
    if (found.home / "run" / UP_FILE).exists():
        found.run("tenuto down", "at the end", {0})


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(is_to_run(block) for block in blocks(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_does_what_it_says(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        reader.follow(block)
