"""Nets merged into one graph with super-operators: what is merged, what is not, and that no answer changes."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from torch import Tensor, nn

from roles.gpu_worker.executors.merging import CannotMerge, Member, OperatorGroup
from tests.unit.roles.gpu_worker.executors.merging.families import (
    WIDTH,
    Layers,
    Pictures,
    assert_as_apart,
    held,
    made,
    members,
    tuned,
)

LAYERS = [f"layers.{place}" for place in range(4)]


def copies(*nets: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(net) for net in nets]


@pytest.mark.parametrize("shared", range(1, 5))
def test_two_tuned_copies_with_k_equal_layers_have_k_merges(shared: int) -> None:
    first = made(Layers, 0)
    nets = [first, tuned(first, *LAYERS[shared:], "head")]
    apart = copies(*nets)
    group = OperatorGroup(members(*nets))
    assert group.merged == tuple(LAYERS[:shared])
    assert_as_apart(group, apart, 1, 4)
    assert held(*nets) == 2 * shared + 2 * 2 * (5 - shared), "equal weights and biases are there once"


def test_weights_that_are_held_no_longer_are_freed() -> None:
    first = made(Layers, 0)
    second = tuned(first, LAYERS[0])
    theirs = [weakref.ref(parameter) for parameter in second.get_submodule(LAYERS[1]).parameters()]
    group = OperatorGroup(members(first, second))
    gc.collect()
    assert group.merged == (*LAYERS[1:], "head")
    assert [one() for one in theirs] == [None, None]


def test_equal_layers_behind_a_different_one_are_merged_too() -> None:
    first = made(Layers, 0)
    nets = [first, tuned(first, LAYERS[0], LAYERS[2])]
    apart = copies(*nets)
    group = OperatorGroup(members(*nets))
    assert group.merged == (LAYERS[1], LAYERS[3], "head")
    assert_as_apart(group, apart, 3, 2)


def test_unrelated_weights_have_nothing_to_merge() -> None:
    with pytest.raises(CannotMerge, match="no convolutions or linear layers"):
        OperatorGroup(members(made(Layers, 0), made(Layers, 1)))


def test_pairs_that_cross_are_not_both_merged() -> None:
    first, second = made(Layers, 0), made(Layers, 1)
    assert isinstance(first, Layers)
    assert isinstance(second, Layers)
    second.layers[2].load_state_dict(first.layers[1].state_dict())
    second.layers[1].load_state_dict(first.layers[2].state_dict())
    apart = copies(first, second)
    group = OperatorGroup(members(first, second))
    assert len(group.merged) == 1
    assert_as_apart(group, apart, 2, 3)


def test_a_layer_more_shifts_the_others_and_they_are_merged_all_the_same() -> None:
    first, second = made(Layers, 0, 4), made(Layers, 1, 5)
    assert isinstance(first, Layers)
    assert isinstance(second, Layers)
    for mine, theirs in zip(first.layers, list(second.layers)[1:], strict=True):
        theirs.load_state_dict(mine.state_dict())
    apart = copies(first, second)
    group = OperatorGroup(members(first, second))
    assert group.merged == tuple(LAYERS)
    assert_as_apart(group, apart, 2, 3)


def test_third_and_later_nets_are_matched_with_what_is_merged_already() -> None:
    first = made(Layers, 0)
    nets = [first, tuned(first, "head"), tuned(first, LAYERS[3], "head", seed=8), made(Layers, 9)]
    apart = copies(*nets)
    group = OperatorGroup(members(*nets))
    assert group.merged == tuple(LAYERS)
    assert held(*nets[:3]) == 2 * 4 + 2 + 3 * 2
    assert_as_apart(group, apart, 1, 2, 3, 1)


@pytest.mark.parametrize("counts", [(0, 2, 1), (2, 0, 1), (1, 2, 0), (0, 0, 2), (0, 0, 0)])
def test_a_net_without_rows_is_not_in_the_answer(counts: tuple[int, ...]) -> None:
    first = made(Layers, 0)
    nets = [first, tuned(first, "head"), tuned(first, LAYERS[1], "head")]
    apart = copies(*nets)
    assert_as_apart(OperatorGroup(members(*nets)), apart, *counts)


def test_blocks_of_partly_equal_weights_are_merged_at_other_rows_and_columns() -> None:
    first, second = made(Layers, 0), made(Layers, 1)
    theirs, mine = first.get_submodule(LAYERS[1]), second.get_submodule(LAYERS[1])
    assert isinstance(theirs, nn.Linear)
    assert isinstance(mine, nn.Linear)
    with torch.no_grad():
        mine.weight[1:8, 2:8] = theirs.weight[0:7, 0:6]
    apart = copies(first, second)
    third = copy.deepcopy(second)
    apart.append(copy.deepcopy(third))
    group = OperatorGroup(members(first, second, third))
    assert LAYERS[1] in group.merged
    assert_as_apart(group, apart, 2, 3, 1)


def test_convolutions_are_merged_wholly_or_by_output_channels() -> None:
    example = {"x": torch.zeros(3, 9, 9)}
    first = made(Pictures, 0)
    second = tuned(first, "head")
    last = second.get_submodule("body.4")
    with torch.no_grad():
        assert isinstance(last.weight, Tensor)
        last.weight[:4] = 1.0
    apart = copies(first, second)
    group = OperatorGroup(members(first, second, example=example))
    assert group.merged == ("body.0", "body.3", "body.4")
    assert_as_apart(group, apart, 2, 3, example=example)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.second(self.first(x)).mean(1))
            return out

    first = made(Tied, 0)
    nets = [first, tuned(first, "head")]
    assert held(*nets) == 2 * 5
    apart = copies(*nets)
    group = OperatorGroup(members(*nets))
    assert len(group.merged) == 2
    assert nets[1].get_submodule("second").weight is nets[1].get_submodule("first").weight
    assert nets[1].get_submodule("second").weight is nets[0].get_submodule("first").weight
    assert_as_apart(group, apart, 2, 1)


def test_dropout_that_is_off_is_merged_over_and_what_draws_at_random_is_found_out() -> None:
    class StaysOn(Layers):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(nn.functional.dropout(x, training=True).mean(1))
            return out

    first = made(StaysOn, 0)
    with pytest.raises(CannotMerge, match="differently"):
        OperatorGroup(members(first, copy.deepcopy(first)))
    with pytest.raises(CannotMerge, match="training mode"):
        OperatorGroup(members(made(Layers, 0).train(), made(Layers, 1)))


def test_code_that_looks_at_values_cannot_be_traced_and_that_is_said() -> None:
    class Choosing(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                x = x + 1
            return super().forward(x)

    first = made(Choosing, 0)
    with pytest.raises(CannotMerge, match=r"0 cannot be traced by torch.export \(.*data-dependent"):
        OperatorGroup(members(first, tuned(first, "head")))


def test_a_net_that_counts_its_runs_is_not_merged() -> None:
    class Counting(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("runs", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.runs, Tensor)
            self.runs.add_(1)
            out: Tensor = self.head(x.mean(1))
            return out

    first = made(Counting, 0)
    with pytest.raises(CannotMerge, match="changes its own buffers"):
        OperatorGroup(members(first, copy.deepcopy(first)))


def test_half_precision_that_rounds_differently_is_said_to_be_the_reason() -> None:
    class Rounding(Layers):
        """As kernels that take another order of summing for a larger batch."""

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x + 0.1 * x.mean())
            return out

    example = {"x": torch.zeros(3, WIDTH, dtype=torch.bfloat16)}
    first = made(Rounding, 0).bfloat16()
    alike = made(Layers, 0).bfloat16()
    with pytest.raises(
        CannotMerge, match=r"differently .*\(bfloat16 rounds differently for each batch size\)"
    ):
        OperatorGroup(members(first, tuned(first, "head"), example=example))
    assert OperatorGroup(members(alike, tuned(alike, "head"), example=example)).merged == tuple(LAYERS)


def test_code_around_the_net_is_run_as_it_is_and_must_call_it_once() -> None:
    first = made(Layers, 0)
    nets = [first, tuned(first, "head")]
    apart = copies(*nets)

    def doubled(net: nn.Module) -> Member:
        return Member(net, lambda rows: {"y": 2 * net(rows["x"] + 1)}, {"x": torch.zeros(3, WIDTH)})

    def twice(net: nn.Module) -> Member:
        return Member(net, lambda rows: {"y": net(rows["x"]) + net(rows["x"])}, {"x": torch.zeros(3, WIDTH)})

    group = OperatorGroup({str(number): doubled(net) for number, net in enumerate(nets)})
    rows = torch.randn(2, 3, WIDTH)
    found = group.run({"0": {"x": rows}, "1": {"x": rows}})
    for number, net in enumerate(apart):
        torch.testing.assert_close(found[str(number)]["y"], 2 * net(rows + 1), rtol=1e-5, atol=1e-5)
    with pytest.raises(CannotMerge, match="more than once"):
        OperatorGroup({str(number): twice(net) for number, net in enumerate(apart)})


def test_any_family_answers_as_its_members_do_apart() -> None:
    """Against an independent way: copies of all members, each run by itself."""
    for seed in range(6):
        draw = random.Random(seed)
        first = made(Layers, seed)
        nets = [first]
        for number in range(draw.randint(1, 3)):
            own = draw.sample([*LAYERS, "head"], draw.randint(0, 3))
            nets.append(tuned(first, *own, seed=100 * seed + number))
        apart = copies(*nets)
        group = OperatorGroup(members(*nets))
        for _ in range(3):
            assert_as_apart(group, apart, *(draw.randint(0, 3) for _ in nets))
