"""`models[].heads` of a file: what they need, what they do not go with, and that plans take them for one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import MERGES, HeadSpec, LoaderSpec
from roles.config.read_config import parse_config
from roles.gpu_worker.executors.merging import GROUPS
from roles.lab.plan import plan_json
from roles.scheduler.settings import settings_from

PROFILE = {"alpha_ms": 1.0, "beta_ms": 5.0}
LOADER = {"python": "a.b:C"}
HEADS: list[dict[str, Any]] = [{"name": "cats"}, {"name": "dogs", "slo_ms": 80}]


def document(**model: Any) -> dict[str, Any]:
    vision = {"name": "vision", "slo_ms": 50, "rate_rps": 100, "profile": PROFILE, "heads": HEADS, **model}
    return {"models": [vision], "cluster": {"gpus": 1}}


def parsed(written: dict[str, Any]) -> Any:
    return parse_config(written, Path())


def test_heads_take_the_models_slo_unless_they_allow_more_and_are_asked_by_their_names() -> None:
    (model,) = parsed(document()).models
    assert model.heads == (HeadSpec(ModelId("cats")), HeadSpec(ModelId("dogs"), 80.0))
    assert model.head_names == ("cats", "dogs")
    assert not model.has_loader


def test_the_loaders_of_heads_count_as_the_models() -> None:
    heads = [{**head, "loader": LOADER} for head in HEADS]
    (model,) = parsed(document(heads=heads, profile=None)).models
    assert model.has_loader
    assert model.heads[0].loader == LoaderSpec(python="a.b:C")


def test_one_plan_for_all_heads_with_their_memory_once_and_a_reason() -> None:
    config = parsed(document(memory_mb=300))
    placement = config.place()
    (planned,) = placement.slices
    assert [model.model_id for model in planned.models] == ["vision"]
    why: Any = plan_json(config, "symphony", placement, with_why=True)["why"]
    told = next(one for one in why if one["subject"] == "model vision")
    assert (
        told["chosen"] == "placed as one model with 2 heads (cats, dogs): joint batches, memory counted once"
    )
    settings = settings_from(config)
    assert [(one.model_id, one.heads) for one in settings.models] == [("vision", config.models[0].heads)]
    ((_, spec),) = settings.slices
    assert (spec.models[0].memory_bytes, len(spec.models[0].heads)) == (300 << 20, 2)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"heads": HEADS[:1]}, r"models\[0\].heads: their number: is 1; it must be"),
        (
            {"heads": [{"name": "a"}, {"name": "a"}]},
            r"heads\[1\].name: 'a' is already the name at models\[0\].heads\[0\]",
        ),
        (
            {"heads": [{"name": "a"}, {"name": "vision"}]},
            r"heads\[1\].name: 'vision' is already the name at models\[0\]",
        ),
        ({"heads": [{"name": "a b"}, {"name": "c"}]}, r"heads\[0\].name: is 'a b'"),
        ({"heads": [{"name": "a", "slo_ms": 10}, {"name": "c"}]}, r"heads\[0\].slo_ms: is 10; it must be"),
        ({"loader": LOADER}, "loader: goes without heads"),
        (
            {"heads": [{"name": "a", "loader": LOADER}, {"name": "c"}]},
            r"heads\[1\].loader: all heads of a model have a loader, or none",
        ),
        (
            {"heads": [{"name": "a", "loader": {**LOADER, "ranks": 2}}, {"name": "c"}]},
            "a head runs whole on one GPU",
        ),
        ({"merge": "operator"}, r"models\[0\].merge: there is no 'operator'; did you mean operators"),
        ({"merge": "stacked", "heads": []}, r"models\[0\].merge: goes with heads"),
        ({"profile": None}, "has neither profile nor loader"),
        ({"heads": [{"nmae": "a"}, {"name": "c"}]}, r"heads\[0\].nmae: unknown key; did you mean"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parsed(document(**model))


@pytest.mark.parametrize("merge", MERGES)
def test_how_heads_run_together_goes_to_their_worker(merge: str) -> None:
    config = parsed(document(merge=merge))
    ((_, spec),) = settings_from(config).slices
    assert (config.models[0].merge, spec.models[0].merge) == (merge, merge)
    assert parsed(document()).models[0].merge == "prefix"
    assert set(MERGES) == set(GROUPS)


def test_stages_of_applications_cannot_ask_a_model_with_heads() -> None:
    written = document(rate_rps=None) | {
        "applications": [
            {"name": "app", "slo_ms": 100, "rate_rps": 10, "stages": {"see": {"model": "vision"}}}
        ]
    }
    with pytest.raises(ConfigError, match="vision has heads, which stages cannot ask"):
        parsed(written)
