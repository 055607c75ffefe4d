"""GPUs are equal where type, memory, device and price are, and nothing else is looked at."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fabric.ids import ModelId, NodeId, SliceId
from policies.placement.common.base import GpuSlot, PlannedModel, PlannedSlice
from policies.placement.common.differ import reorganised
from policies.placement.common.gpu_kinds import gpu_classes

GPU = GpuSlot(0, "v100", 2**34, NodeId("a"), 0, "emulated", 3.06)
OTHERS: list[dict[str, Any]] = [
    {"gpu_type": "t4"},
    {"memory_bytes": 2**33},
    {"device": "cuda"},
    {"price_per_hour": None},
]


def test_the_node_and_the_number_make_no_kind() -> None:
    far = replace(GPU, index=1, node_id=NodeId("b"), local_index=7)
    assert [equal.gpus for equal in gpu_classes([far, GPU])] == [(GPU, far)]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_gpus_that_differ_in_one_thing_are_not_equal_and_take_nothing_over(other: dict[str, Any]) -> None:
    gpus = [GPU, replace(GPU, index=1, **other)]
    assert [equal.slot.index for equal in gpu_classes(gpus)] == [0, 1]
    resnet = (PlannedModel(ModelId("resnet50")),)
    found = reorganised(
        {SliceId("a"): PlannedSlice(0, None, resnet)}, [PlannedSlice(1, None, resnet)], gpus, lambda _: 0
    )
    assert found.starts == 1
