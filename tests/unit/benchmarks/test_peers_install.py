from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.peers.catalog import PEERS
from benchmarks.peers.install import STAMP_NAME, install, is_installed


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
