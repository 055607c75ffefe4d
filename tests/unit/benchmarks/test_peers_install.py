from __future__ import annotations

import site
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.cases import CASES
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.install import ROOT, STAMP_NAME, install, interpreter_of, is_installed
from tests.unit.benchmarks.peers_builders import a_real_case


def test_a_peer_whose_python_is_not_here_is_skipped_with_the_reason(tmp_path: Path) -> None:
    peer = replace(PEERS["triton"], interpreter="/nowhere/python3")
    assert install([peer], tmp_path) == {"triton": "it needs /nowhere/python3, which is not here"}
    assert not is_installed(peer, tmp_path)


def test_a_peer_that_needs_another_python_is_skipped_with_the_reason(tmp_path: Path) -> None:
    peer = replace(PEERS["triton"], interpreter=None, python_version="3.11.999")
    assert "it needs Python 3.11.999" in install([peer], tmp_path)["triton"]


def test_what_was_installed_in_another_version_is_not_installed(tmp_path: Path) -> None:
    peer = PEERS["mosec"]
    stamp = tmp_path / peer.name / STAMP_NAME
    stamp.parent.mkdir()
    stamp.write_text("mosec==0.9.8\n", encoding="utf-8")
    assert is_installed(peer, tmp_path)
    assert install([peer], tmp_path) == {}
    assert not is_installed(replace(peer, requirements=("mosec==0.9.9",)), tmp_path)


def test_a_peer_that_our_interpreter_has_is_run_by_it(tmp_path: Path) -> None:
    peer = replace(PEERS["mosec"], requirements=(f"numpy=={version('numpy')}",))
    assert is_installed(peer, tmp_path)
    found = interpreter_of(peer, tmp_path, CASES[0])
    assert found.python == Path(sys.executable)
    assert (found.base / "numpy").is_dir()
    assert not is_installed(replace(peer, requirements=("numpy==0.0.1",)), tmp_path)


def test_what_runs_us_finds_the_user_s_own_packages_at_a_peer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    own = site.getusersitepackages()
    here = replace(PEERS["mosec"], requirements=(f"numpy=={version('numpy')}",))
    assert interpreter_of(here, tmp_path, CASES[0]).path == (own,)
    real = a_real_case({"image": np.zeros(1, np.float32)})
    assert interpreter_of(PEERS["mosec"], tmp_path, real).path == (str(ROOT), own)
    assert interpreter_of(PEERS["mosec"], tmp_path, CASES[0]).path == ()


def test_a_real_model_is_run_by_our_interpreter_with_the_peer_s_packages(tmp_path: Path) -> None:
    peer = PEERS["mosec"]
    packages = tmp_path / "mosec" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    found = interpreter_of(peer, tmp_path, a_real_case({"image": np.zeros(1, np.float32)}))
    assert found.python == Path(sys.executable)
    assert found.path[:2] == (str(ROOT), str(packages))
    assert found.base == tmp_path / "mosec"
    assert interpreter_of(peer, tmp_path, CASES[0]).python == tmp_path / "mosec" / "bin" / "python"
