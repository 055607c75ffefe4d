"""A shared layer answers a model only for what that model itself gives it: the code around it may do something else with the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from roles.gpu_worker.executors.merging import CannotMerge, Member, PrefixGroup
from roles.gpu_worker.executors.merging.prefix import DIFFERENCES_MAX

PICTURE = {"x": torch.zeros(3, 4, dtype=torch.uint8)}
WORDS = {"x": torch.full((6,), 5)}
Rows = dict[str, Tensor]


class Pixels(nn.Module):
    """Whatever it is given, a layer and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        torch.manual_seed(seed)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).tanh().mean(1))
        return out


class Scaling(nn.Module):
    """Takes a number beside its input."""

    def forward(self, x: Tensor, by: float) -> Tensor:
        return x / by


class Scaled(Pixels):
    """The same with the scale in a layer."""

    def __init__(self, seed: int, by: float) -> None:
        super().__init__(seed)
        self.scaling, self.by = Scaling(), by

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scaling(x.float(), self.by))


class Words(nn.Module):
    """Attends to what is no padding; all models have the same words and layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        torch.manual_seed(seed)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(ids), src_key_padding_mask=padding)[:, 0])
        return out


def pixels(seed: int, make: Callable[[Tensor], Tensor]) -> Member:
    net = Pixels(seed).eval()
    return Member(net, lambda rows: {"y": net(make(rows["x"]))}, PICTURE)


def scaled(seed: int, by: float) -> Member:
    net = Scaled(seed, by).eval()
    return Member(net, lambda rows: {"y": net(rows["x"])}, PICTURE)


def words(seed: int, padding: int) -> Member:
    net = Words(seed).eval()
    return Member(net, lambda rows: {"y": net(rows["x"], rows["x"] == padding)}, WORDS)


def answers(members: Sequence[Member], batches: Sequence[Tensor]) -> list[Tensor] | None:
    """Of a joint run, where it says that it goes; they are as apart."""
    named = {str(number): one for number, one in enumerate(members)}
    rows: dict[str, Rows] = {str(number): {"x": batch} for number, batch in enumerate(batches)}
    with torch.inference_mode():
        apart = {name: named[name].infer(dict(batch))["y"] for name, batch in rows.items()}
        group = PrefixGroup(named)
        assert group.merged
        found = group.run(rows)
    for name, own in apart.items():
        torch.testing.assert_close(found[name]["y"], own, rtol=1e-5, atol=1e-5, equal_nan=True)
    return list(apart.values())


PICTURES = [torch.randint(0, 256, (count, 3, 4), dtype=torch.uint8) for count in (2, 1)]
IDS = [torch.tensor([[7, 9, 3, 1, 1, 1], [4, 4, 2, 0, 0, 0]]), torch.tensor([[7, 0, 0, 0, 0, 1]])]
DIFFERENT: dict[str, tuple[list[Member], list[Tensor]]] = {
    "scales": ([pixels(1, lambda x: x / 255), pixels(2, lambda x: x / 127.5)], PICTURES),
    "orders": ([pixels(1, lambda x: x / 255), pixels(2, lambda x: x.flip(2) / 255)], PICTURES),
    "paddings": ([words(1, 0), words(2, 1)], IDS),
}
EQUAL: dict[str, tuple[list[Member], list[Tensor]]] = {
    "scales": ([pixels(1, lambda x: x / 255), pixels(2, lambda x: x / 255)], PICTURES),
    "NaN": ([pixels(1, lambda x: x / 0.0), pixels(2, lambda x: x / 0.0)], PICTURES),
    "paddings": ([words(1, 0), words(2, 0)], IDS),
    "a number beside": ([scaled(1, 255), scaled(2, 255)], PICTURES),
    "rounded in another order": (
        [pixels(1, lambda x: x / 255), pixels(2, lambda x: x * (1 / 255))],
        PICTURES,
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_models_that_make_other_values_of_a_request_do_not_answer_from_each_others(what: str) -> None:
    """Their examples, zeros and equal numbers, do not tell them apart."""
    with pytest.raises(CannotMerge, match="is given other values"):
        answers(*DIFFERENT[what])


@pytest.mark.parametrize("what", EQUAL)
def test_models_that_make_the_same_of_it_run_together(what: str) -> None:
    assert answers(*EQUAL[what])


@pytest.mark.parametrize(("by", "other"), [(255.0, 127.5), (255, 127), (1, 2)])
def test_a_number_that_a_layer_is_given_beside_tensors_is_looked_at_too(by: float, other: float) -> None:
    with pytest.raises(CannotMerge, match="is called in another way"):
        answers([scaled(1, by), scaled(2, other)], PICTURES)


def test_where_they_always_differ_nothing_more_is_run_twice() -> None:
    runs: list[str] = []

    def noted(name: str, by: float) -> Member:
        def make(x: Tensor) -> Tensor:
            runs.append(name)
            return x / by

        return pixels(len(name), make)

    named = {"a": noted("a", 255.0), "bb": noted("bb", 127.5)}
    rows = dict(zip(named, ({"x": batch} for batch in PICTURES), strict=True))
    with torch.inference_mode():
        group = PrefixGroup(named)
        same = {name: {"x": batch["x"] * 0} for name, batch in rows.items()}
        for _ in range(2):
            for _ in range(DIFFERENCES_MAX - 1):
                with pytest.raises(CannotMerge, match="other values"):
                    group.run(rows)
            group.run(same)  # what is odd for once is no reason
        for _ in range(DIFFERENCES_MAX):
            with pytest.raises(CannotMerge, match="other values"):
                group.run(rows)
        runs.clear()
        apart = {name: named[name].infer(dict(batch))["y"] for name, batch in rows.items()}
        found = group.run(rows)
    assert runs == ["a", "bb"] * 2
    for name, own in apart.items():
        assert torch.equal(found[name]["y"], own)
