"""What `tenuto doctor` finds beside the versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roles.cli.doctor import OK, WARN, examine


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    for name, source in sources.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("source", "state", "detail"),
    [
        ("import torch", OK, "works"),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            WARN,
            "RuntimeError: operator torchvision::nms does not exist; the zoo's classifiers run even so",
        ),
        ("import sys; sys.exit(3)", WARN, "ended with code 3"),
    ],
)
def test_a_pair_of_wheels_that_does_not_go_together_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, state: str, detail: str
) -> None:
    installed(tmp_path, monkeypatch, torch="", torchvision=source)
    (finding,) = [one for one in examine() if one.name == "import torchvision"]
    assert finding.state == state
    assert detail in finding.detail
