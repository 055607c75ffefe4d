"""The JSON Schema of the file, held against the reader of the file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fabric.errors import ConfigError
from roles.config.documents import read_document
from roles.config.json_schema import json_schema
from roles.config.read_config import parse_config

ROOT = Path(__file__).parents[4]
FILES = sorted(
    path
    for folder in ("examples", "deploy")
    for path in (ROOT / folder).rglob("*.yaml")
    if "models:" in path.read_text(encoding="utf-8") and "cluster:" in path.read_text(encoding="utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(json.loads(json.dumps(json_schema())))


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_ships_fits(path: Path) -> None:
    assert list(VALIDATOR.iter_errors(read_document(path))) == []


DOCUMENT: dict[str, Any] = {
    "models": [
        {"name": "a", "slo_ms": 25, "rate_rps": [[0, 5], [10, 20]], "profile": {"table": {"1": 5.9, "2": 7}}}
    ],
    "cluster": {"gpus": 1, "interference": "none"},
    "batching": {"deferred": {"drop": "simple"}},
    "placement": "symphony",
}


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ((), "unknown", 1),
        (("models", 0), "slo", 25),
        (("models", 0), "slo_ms", "soon"),
        (("models", 0), "name", None),
        (("cluster",), "gpus", "many"),
        (("cluster",), "interference", "noise"),
        ((), "batching", "never"),
        ((), "batching", {"never": {}}),
        ((), "placement", {"symphony": {}, "igniter": {}}),
        ((), "graph_deadlines", "none"),
        ((), "graph_deadlines", {"nexus": {}, "equal": {}}),
    ],
)
def test_what_it_refuses_the_reader_refuses_too(where: tuple[Any, ...], key: str, value: object) -> None:
    parse_config(DOCUMENT, ROOT)
    assert list(VALIDATOR.iter_errors(DOCUMENT)) == []
    wrong: Any = copy.deepcopy(DOCUMENT)
    inner = wrong
    for step in where:
        inner = inner[step]
    inner[key] = value
    assert list(VALIDATOR.iter_errors(wrong))
    with pytest.raises(ConfigError):
        parse_config(wrong, ROOT)
