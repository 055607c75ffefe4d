"""Nets of one architecture as one stacked net: when they are, what they answer, and what they hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from roles.gpu_worker.executors.merging import CannotMerge, StackedGroup
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


@pytest.fixture(autouse=True)
def _always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is, is a matter of the host; of one that says so here, all else is tested."""
    monkeypatch.setattr(StackedGroup, "_measured_gain", lambda _: 100.0)


def test_unrelated_weights_of_one_architecture_are_one_net() -> None:
    nets = [made(Layers, seed) for seed in range(4)]
    apart = [copy.deepcopy(net) for net in nets]
    group = StackedGroup(members(*nets))
    assert group.merged == ("layers", "drop", "head")
    for counts in ((1, 1, 1, 1), (3, 1, 2, 1), (0, 2, 1, 0), (0, 0, 0, 2), (0, 0, 0, 0)):
        assert_as_apart(group, apart, *counts)


def test_weights_are_views_of_the_stacked_ones_and_equal_ones_are_there_once() -> None:
    first = made(Layers, 0)
    second = tuned(first, "layers.3", "head")
    apart = [copy.deepcopy(net) for net in (first, second)]
    group = StackedGroup(members(first, second))
    assert held(first, second) == 2 * 3 + 2 * 2 * 2
    stacked = {
        one.untyped_storage().data_ptr()
        for net in (first, second)
        for one in net.get_submodule("layers.3").parameters()
    }
    assert len(stacked) == 2, "a weight's and a bias's, both nets in each"
    assert_as_apart(group, apart, 2, 1)
    for net, before in zip((first, second), apart, strict=True):
        torch.testing.assert_close(net(torch.ones(1, 3, WIDTH)), before(torch.ones(1, 3, WIDTH)))


def test_convolutions_and_the_buffers_of_batch_norms_are_stacked_too() -> None:
    example = {"x": torch.zeros(3, 9, 9)}
    nets = [made(Pictures, seed) for seed in range(3)]
    for seed, net in enumerate(nets):
        norm = net.get_submodule("body.1")
        assert isinstance(norm, nn.BatchNorm2d)
        assert isinstance(norm.running_mean, Tensor)
        norm.running_mean += seed
    apart = [copy.deepcopy(net) for net in nets]
    group = StackedGroup(members(*nets, example=example))
    assert_as_apart(group, apart, 1, 2, 0, example=example)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).relu())
            return out

    nets = [made(Tied, seed) for seed in range(2)]
    apart = [copy.deepcopy(net) for net in nets]
    group = StackedGroup(members(*nets))
    for net in nets:
        assert net.get_submodule("first").weight is net.get_submodule("second").weight
    assert held(*nets) == 2 * 3
    assert_as_apart(group, apart, 2, 1)


def test_a_batch_that_would_be_padded_too_much_runs_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StackedGroup, "_measured_gain", lambda _: 1.5)
    runs: list[int] = []

    class Noting(Layers):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(x.shape[0])
            return super().forward(x)

    nets = [made(Noting, seed) for seed in range(4)]
    apart = [made(Layers, seed) for seed in range(4)]
    group = StackedGroup(members(*nets))
    runs.clear()
    assert_as_apart(group, apart, 2, 2, 2, 1)  # 8 rows for 7
    assert runs == []
    assert_as_apart(group, apart, 7, 1, 0, 0)  # 28 rows for 8
    assert runs == [7, 1]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: made(Layers, 1, 4, 5), r"head.weight has other shapes \(\[2, 8\], \[5, 8\]\)"),
        (lambda: made(Layers, 1, 3), "other weights"),
        (lambda: made(Layers, 1).train(), "training mode"),
    ],
)
def test_what_cannot_be_stacked_says_why(other: object, why: str) -> None:
    assert callable(other)
    with pytest.raises(CannotMerge, match=why):
        StackedGroup(members(made(Layers, 0), other()))


def test_what_draws_at_random_or_looks_at_values_is_not_stacked() -> None:
    class StaysOn(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, training=True)

    class Choosing(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else x + 1

    with pytest.raises(CannotMerge, match="vmap cannot run them"):
        StackedGroup(members(made(StaysOn, 0), made(StaysOn, 1)))
    with pytest.raises(CannotMerge, match=r"cannot be traced by torch.export"):
        StackedGroup(members(made(Choosing, 0), made(Choosing, 1)))


def test_settings_that_differ_are_found_out() -> None:
    class Scaled(Layers):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.factor)

    other = made(Scaled, 1)
    other.factor = 2.0  # type: ignore[assignment]
    with pytest.raises(CannotMerge, match="other settings"):
        StackedGroup(members(made(Scaled, 0), other))


def test_where_it_is_no_faster_they_are_left_apart_and_the_times_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    took_ms = iter([4.0, 6.0])
    monkeypatch.setattr("roles.gpu_worker.executors.merging.stacked._took_ms", lambda _: next(took_ms))
    with pytest.raises(CannotMerge, match="no faster here: 6 ms for a row each, 4 ms one after the other"):
        StackedGroup(members(made(Layers, 0), made(Layers, 1)))


class Limited(Layers):
    limit = 20.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-self.limit, self.limit))


def test_settings_that_no_trial_gets_to_are_compared() -> None:
    other = made(Limited, 1)
    other.limit = 6.0  # type: ignore[assignment]
    with pytest.raises(CannotMerge, match="other settings"):
        StackedGroup(members(made(Limited, 0), other))
