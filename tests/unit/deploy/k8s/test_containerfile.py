"""The image's recipe: what it copies is all that Tenuto is built from, and its user is the manifests'."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from deploy.k8s.pods import USER
from deploy.ssh.inventory import inventory_of
from roles.config.read_config import load_config
from tests.unit.deploy.k8s.stage import containers, pod_templates, with_gateway

ROOT = Path(__file__).parents[4]
LINES = (ROOT / "deploy" / "k8s" / "Containerfile").read_text().splitlines()


def test_what_is_copied_makes_a_wheel_with_all_of_tenuto(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for line in LINES:
        if line.startswith("COPY ") and "--from" not in line:
            *paths, target = line.split()[1:]
            for path in paths:
                if (ROOT / path).is_dir():
                    left_out = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / path, source / target, ignore=left_out)
                else:
                    shutil.copy(ROOT / path, source / target)
    (built,) = [line for line in LINES if line.startswith("RUN pip wheel")]
    words = built.removeprefix("RUN ").replace("/wheels", str(tmp_path / "wheels")).split()
    # Its build tools are those here: nothing is fetched.
    command = [sys.executable, "-m", *words, "--no-build-isolation", "--quiet"]
    subprocess.run(command, cwd=source, check=True, timeout=110)
    (wheel,) = (tmp_path / "wheels").glob("tenuto-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    for room in ("fabric", "profiles", "policies", "roles", "deploy"):
        for file in (ROOT / room).rglob("*"):
            if file.suffix in {".py", ".json"} and (file.parent / "__init__.py").exists():
                assert file.relative_to(ROOT).as_posix() in names
    assert any(name.endswith("entry_points.txt") for name in names)


NEEDS = {"--metrics": "metrics", "gateway": "gateway"}
"""Extras by a word of a command, beside those that a host has for what its roles do."""


def test_its_extras_are_those_that_the_manifests_commands_need(tmp_path: Path) -> None:
    stage = with_gateway(tmp_path)
    stage.document["placement"] = "tenuto"
    words = {
        word
        for template in pod_templates(stage.objects()).values()
        for container in containers(template)
        for word in container["command"]
    }
    needed = {extra for word, extra in NEEDS.items() if word in words}
    needed |= {extra for host in inventory_of(load_config(stage.file)).hosts for extra in host.extras}
    assert needed == {"plan", "worker", "metrics", "gateway"}
    (given,) = [line.removeprefix("ARG EXTRAS=") for line in LINES if line.startswith("ARG EXTRAS=")]
    assert set(given.split(",")) == needed
    (small,) = [found[1] for line in LINES if (found := re.search(r'# With EXTRAS="(.*?)"', line))]
    assert set(small.split(",")) == needed - {"worker"}


def test_its_user_is_the_manifests() -> None:
    assert f"USER {USER}:{USER}" in LINES
    assert any(re.search(rf"--uid {USER}\b", line) for line in LINES if line.startswith("RUN useradd"))
