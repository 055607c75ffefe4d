"""What `tenuto models add` sends of a file: the scheduler reads it from another folder, and perhaps on another host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roles.cli.models import _sections


def test_every_path_of_a_section_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def zoo(weights: str) -> dict[str, Any]:
        return {"zoo": "torchvision", "arch": "resnet18", "weights": weights}

    for name in ("own.safetensors", "cats.safetensors", "dogs.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "trace.csv").write_text("at_ms\n1\n")
    models = [
        {
            "name": "alone",
            "slo_ms": 50,
            "rate_rps": 1,
            "arrival": {"process": "trace", "path": "trace.csv"},
            "loader": zoo("own.safetensors"),
        },
        {
            "name": "vision",
            "slo_ms": 50,
            "heads": [
                {"name": "cats", "loader": zoo("cats.safetensors")},
                {"name": "dogs", "loader": zoo(str(tmp_path / "dogs.safetensors"))},
            ],
        },
    ]
    file = tmp_path / "more.json"
    file.write_text(json.dumps({"models": models}))
    monkeypatch.chdir("/")
    alone, vision = _sections(str(file), ())
    assert alone["loader"]["weights"] == str(tmp_path / "own.safetensors")
    assert alone["arrival"]["path"] == str(tmp_path / "trace.csv")
    assert [head["loader"]["weights"] for head in vision["heads"]] == [
        str(tmp_path / f"{name}.safetensors") for name in ("cats", "dogs")
    ]
