"""What may be wanted: changes that are refused before anything of them is done."""

from __future__ import annotations

import json

import pytest

from fabric.ids import ModelId, NodeId
from fabric.messages import DrainAsked, GpuRef, ModelsAdd, ModelsRemove
from roles.scheduler.planning.desired_state import (
    INVALID_CONFIG,
    NESTED_MAX,
    UNKNOWN_GPU,
    ChangeRefused,
    Desired,
)

SHOP = {
    "name": "shop",
    "slo_ms": 90,
    "stages": {"one": {"model": "a"}, "two": {"model": "b", "after": "one"}},
}


@pytest.mark.parametrize("removed", [("a",), ("c", "b"), ("a", "b", "c")])
def test_a_model_that_an_application_asks_stays(removed: tuple[str, ...]) -> None:
    """Its requests were refused at once, and no plan could be made without it: neither it nor the application served again."""
    desired = Desired(tuple({"name": name} for name in "abc"), {"applications": [SHOP]}, ".", ())
    refused = desired.changed(ModelsRemove(1, tuple(map(ModelId, removed))))
    assert isinstance(refused, ChangeRefused)
    assert refused.code == INVALID_CONFIG
    assert "of application 'shop' asks" in refused.reason


def test_who_drains_what_is_not_there_hears_what_is() -> None:
    gpus = tuple(GpuRef(NodeId("a"), number) for number in (0, 1))
    refused = Desired((), {}, ".", gpus).changed(DrainAsked(1, NodeId("x"), None))
    assert isinstance(refused, ChangeRefused)
    assert refused.code == UNKNOWN_GPU
    assert all(name in refused.reason for name in ("there is no x", "a", "a/gpu0", "a/gpu1"))


def test_a_model_that_no_application_asks_goes() -> None:
    desired = Desired(tuple({"name": name} for name in "abc"), {"applications": [SHOP]}, ".", ())
    left = desired.changed(ModelsRemove(1, (ModelId("c"),)))
    assert isinstance(left, Desired)
    assert left.model_ids == ("a", "b")


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"deeper": ', "}")])
def test_a_model_however_deeply_nested_is_refused_or_can_be_written_again(opens: str, closes: str) -> None:
    """A document has its models deeper than they came: of one exact depth the scheduler ended."""
    taken = []
    for levels in (*range(1, 2 * NESTED_MAX), *range(900, 1_010), 100_000):
        document = f'[{{"name": "a", "y": {opens * levels}0{closes * levels}}}]'
        found = Desired((), {}, ".", ()).changed(ModelsAdd(1, document))
        if isinstance(found, Desired):
            taken.append(levels)
            assert json.loads(found.document)["models"] == json.loads(document)
        else:
            assert found.code == INVALID_CONFIG
    assert taken == list(range(1, NESTED_MAX))
