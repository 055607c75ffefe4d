"""Whatever runs beside it: nothing gets faster, and an idle GPU disturbs nobody."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import ModelId
from profiles.device_model import DeviceModel
from profiles.interference import Interference, Running, interference_named
from profiles.model import ModelProfile
from profiles.store import shipped_profile, shipped_refs

FAMILIES = {
    "none": "symphony-a100",
    "igniter": "igniter-v100",
    "gpulet": "gpulet-2080ti",
    "sm": "thesis-v100",
}


@cache
def profiles_of(name: str) -> dict[ModelId, ModelProfile]:
    family = FAMILIES[name]
    refs = [ref for ref in shipped_refs() if ref.startswith(f"{family}/")]
    return {ModelId(ref.partition("/")[2]): shipped_profile(ref) for ref in refs}


@cache
def interference(name: str) -> Interference:
    return interference_named(name, profiles_of(name), "v100")


def batches(name: str) -> st.SearchStrategy[Running]:
    shares = st.one_of(st.none(), st.floats(20, 100))
    return st.builds(Running, st.sampled_from(list(profiles_of(name))), st.integers(1, 16), shares)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_more_neighbours_never_speed_a_batch_up(name: str, data: st.DataObject) -> None:
    running = data.draw(batches(name))
    neighbours = data.draw(st.lists(batches(name), max_size=4))
    factors = [
        interference(name).slowdown(running, neighbours[:count]) for count in range(len(neighbours) + 1)
    ]
    assert factors[0] >= 1
    assert all(low <= high * (1 + 1e-12) for low, high in pairwise(factors))


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_alone_and_without_a_cap_nothing_is_slowed_down(name: str, data: st.DataObject) -> None:
    running = data.draw(batches(name))
    alone = Running(running.model_id, running.batch_size)
    assert interference(name).slowdown(alone, []) == 1
    if name != "sm":  # there a share costs something although nobody else is on the GPU
        assert interference(name).slowdown(running, []) == 1


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_the_table_alone_never_falls_with_the_batch_nor_rises_with_the_share(
    name: str, data: st.DataObject
) -> None:
    device = DeviceModel(profiles_of(name), interference(name))
    model_id = data.draw(st.sampled_from(list(profiles_of(name))))
    shares = sorted(data.draw(st.lists(st.floats(20, 100), min_size=2, max_size=2)))
    small, large = (device.exec_table(model_id, share) for share in shares)
    assert list(small) == sorted(small)
    assert all(more <= less * (1 + 1e-12) for more, less in zip(large, small, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_the_order_of_neighbours_does_not_matter(name: str, data: st.DataObject) -> None:
    running = data.draw(batches(name))
    neighbours = data.draw(st.lists(batches(name), max_size=4))
    forth, back = (interference(name).slowdown(running, order) for order in (neighbours, neighbours[::-1]))
    assert forth == pytest.approx(back, rel=1e-12)
