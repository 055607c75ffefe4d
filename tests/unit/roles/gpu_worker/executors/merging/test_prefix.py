"""Models that share their leading layers: what is merged, what is not, and that no answer changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from roles.gpu_worker.executors.merging import CannotMerge, Member, PrefixGroup

WIDTH = 8
LAYERS = 4
EXAMPLE = {"x": torch.zeros(3, WIDTH)}


class Counted(nn.Linear):
    """A layer that says how many rows it has seen."""

    seen: list[int] = []  # noqa: RUF012  one list for all, emptied by the tests

    def forward(self, x: Tensor) -> Tensor:
        Counted.seen.append(x.shape[0])
        return super().forward(x)


class Net(nn.Module):
    """Layers with functions between them, and a head."""

    def __init__(self, labels: int = 2) -> None:
        super().__init__()
        self.labels = labels
        self.layers = nn.ModuleList(Counted(WIDTH, WIDTH) for _ in range(LAYERS))
        self.drop = nn.Dropout()
        self.head = nn.Linear(WIDTH, labels)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + 1
        out: Tensor = self.head(self.drop(x).mean(1))
        return out


def member(net: nn.Module) -> Member:
    return Member(net, lambda rows: {"y": net(rows["x"])}, EXAMPLE)


def tuned(net: Net, shared: int, labels: int = 2) -> Net:
    """A copy whose layers after the first `shared` ones, and whose head, are its own."""
    other = Net(labels).eval()
    for mine, yours in list(zip(net.layers, other.layers, strict=True))[:shared]:
        yours.load_state_dict(copy.deepcopy(mine.state_dict()))
    return other


def rows(count: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("shared", range(1, LAYERS + 1))
def test_as_many_layers_run_once_as_are_equal_and_no_answer_changes(shared: int) -> None:
    torch.manual_seed(0)
    nets = [Net().eval()]
    nets += [tuned(nets[0], shared, labels) for labels in (2, 5)]
    batches = {str(index): rows(1 + index, index) for index in range(3)}
    with torch.inference_mode():
        expected = {name: nets[int(name)](batch["x"]) for name, batch in batches.items()}
        group = PrefixGroup({str(index): member(net) for index, net in enumerate(nets)})
        Counted.seen.clear()
        found = group.run(batches)
    assert group.merged[:shared] == tuple(f"layers.{place}" for place in range(shared))
    own = [count for count in (1, 2, 3) for _ in range(LAYERS - shared)]
    assert Counted.seen == [6] * shared + own
    for name, value in expected.items():
        torch.testing.assert_close(found[name]["y"], value, rtol=1e-5, atol=1e-5)


def test_shared_weights_are_there_once_and_each_net_still_works_alone() -> None:
    torch.manual_seed(0)
    first = Net().eval()
    second = tuned(first, LAYERS, 5)
    alone = [net(rows(2, 7)["x"]) for net in (first, second)]
    PrefixGroup({"a": member(first), "b": member(second)})
    held = {one.data_ptr() for net in (first, second) for one in net.parameters()}
    assert len(held) == 2 * LAYERS + 2 * 2
    for net, value in zip((first, second), alone, strict=True):
        torch.testing.assert_close(net(rows(2, 7)["x"]), value)


def test_unrelated_weights_share_nothing() -> None:
    with pytest.raises(CannotMerge, match="first layers differ"):
        PrefixGroup({"a": member(Net().eval()), "b": member(Net().eval())})


def test_equal_layers_behind_a_different_one_are_not_shared() -> None:
    first = Net().eval()
    second = tuned(first, LAYERS)
    second.layers[1].load_state_dict(Net().layers[1].state_dict())
    assert PrefixGroup({"a": member(first), "b": member(second)}).merged == ("layers.0",)


def test_a_batch_of_none_is_not_run_and_one_of_a_single_model_runs_alone() -> None:
    first = Net().eval()
    group = PrefixGroup({"a": member(first), "b": member(tuned(first, LAYERS))})
    Counted.seen.clear()
    assert set(group.run({"a": rows(2, 1), "b": {"x": torch.zeros(0, 3, WIDTH)}})) == {"a"}
    assert Counted.seen == [2] * LAYERS
    assert group.run({"a": {"x": torch.zeros(0, 3, WIDTH)}}) == {}


def test_training_mode_is_refused() -> None:
    first = Net()
    with pytest.raises(CannotMerge, match="training mode"):
        PrefixGroup({"a": member(first), "b": member(tuned(first, LAYERS))})


def test_a_tied_layer_that_is_called_twice_ends_the_prefix() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](x))
            out: Tensor = self.head(self.layers[1](x).mean(1))
            return out

    first, second = Twice().eval(), Twice().eval()
    for mine, yours in zip(first.layers, second.layers, strict=True):
        yours.load_state_dict(mine.state_dict())
    assert PrefixGroup({"a": member(first), "b": member(second)}).merged == ("layers.0",)


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
def test_a_model_that_mixes_its_rows_is_found_out_and_left_as_it_was(unit: float) -> None:
    class Mixing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return unit * super().forward(x - x.mean(0, keepdim=True) if x.shape[0] > 1 else x)

    first, second = Mixing().eval(), Mixing().eval()
    for mine, yours in zip(first.layers, second.layers, strict=True):
        yours.load_state_dict(mine.state_dict())
    with pytest.raises(CannotMerge, match="differently"):
        PrefixGroup({"a": member(first), "b": member(second)})
    assert all(isinstance(layer, Counted) for net in (first, second) for layer in net.layers)


def test_inputs_of_different_shapes_cannot_be_joined() -> None:
    first = Net().eval()
    group = PrefixGroup({"a": member(first), "b": member(tuned(first, LAYERS))})
    with pytest.raises(CannotMerge, match="another shape"):
        group.run({"a": rows(1, 0), "b": {"x": torch.zeros(1, 9, WIDTH)}})
    assert set(group.run({"a": rows(1, 0), "b": rows(1, 1)})) == {"a", "b"}


def test_models_of_two_classes_or_one_model_twice_are_refused() -> None:
    first = Net().eval()
    with pytest.raises(CannotMerge, match="own class"):
        PrefixGroup({"a": member(first), "b": member(nn.Linear(WIDTH, 2).eval())})
    with pytest.raises(CannotMerge, match="two models"):
        PrefixGroup({"a": member(first), "b": member(first)})


def test_layers_that_are_equal_crosswise_are_not_merged() -> None:
    first = Net().eval()
    second = tuned(first, LAYERS)
    for mine, yours in ((0, 1), (1, 0)):
        second.layers[yours].load_state_dict(first.layers[mine].state_dict())
    with pytest.raises(CannotMerge, match="first layers differ"):
        PrefixGroup({"a": member(first), "b": member(second)})


def test_weights_that_are_tied_to_shared_ones_stay_tied() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(WIDTH, WIDTH)
            self.decoder.weight = next(self.layers.parameters())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.decoder(self.layers[0](x)).mean(1))
            return out

    first, second = Tied().eval(), Tied().eval()
    second.layers[0].load_state_dict(first.layers[0].state_dict())
    alone = second(rows(2, 3)["x"])
    assert PrefixGroup({"a": member(first), "b": member(second)}).merged == ("layers.0",)
    held = {one.data_ptr() for net in (first, second) for one in net.parameters()}
    assert len(held) == 2 * (2 * LAYERS + 1 + 2) - 2, (
        "each decoder has its own bias, and the weight of the layer that both have"
    )
    torch.testing.assert_close(second(rows(2, 3)["x"]), alone)


def test_dropout_within_the_prefix_is_none_and_dropout_that_stays_on_is_found_out() -> None:
    class Dropping(Net):
        stays_on = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.drop(self.layers[0](x))
            x = nn.functional.dropout(hidden, training=self.stays_on)
            out: Tensor = self.head(self.layers[1](x).mean(1))
            return out

    class StaysOn(Dropping):
        stays_on = True

    for kind in (Dropping, StaysOn):
        first, second = kind().eval(), kind().eval()
        for mine, yours in zip(first.layers, second.layers, strict=True):
            yours.load_state_dict(mine.state_dict())
        members = {"a": member(first), "b": member(second)}
        if kind is Dropping:
            assert PrefixGroup(members).merged == ("layers.0", "drop", "layers.1")
        else:
            with pytest.raises(CannotMerge, match="differently"):
                PrefixGroup(members)


def test_whole_numbers_that_mix_their_rows_are_found_out_too() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, WIDTH)
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(ids + ids[:1]).mean(1))
            return out

    first, second = Words().eval(), Words().eval()
    second.embed.load_state_dict(first.embed.state_dict())
    example = {"x": torch.arange(4)}
    with pytest.raises(CannotMerge, match="differently"):
        PrefixGroup(
            {
                name: Member(net, lambda rows, net=net: {"y": net(rows["x"])}, example)  # type: ignore[misc]
                for name, net in (("a", first), ("b", second))
            }
        )


class Placed(nn.Module):
    """As many places as there may be rows in a batch: a shared answer of that length has no rows."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = nn.Embedding(places, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(self.places.num_embeddings))
        out: Tensor = self.head(self.body(x).mean(1) + places.mean(0))
        return out


@pytest.mark.parametrize("places", [3, 4, 5])
def test_an_answer_that_is_only_as_long_as_the_batch_is_not_cut(places: int) -> None:
    torch.manual_seed(0)
    first = Placed(places).eval()
    other = copy.deepcopy(first)
    nn.init.normal_(other.head.weight)
    apart = copy.deepcopy([first, other])
    group = PrefixGroup({"0": member(first), "1": member(other)})
    assert "places" in group.merged
    batches = {"0": rows(2, 0), "1": rows(places - 2, 1)}
    found = group.run(batches)
    for number, net in enumerate(apart):
        torch.testing.assert_close(found[str(number)]["y"], net(batches[str(number)]["x"]))


class Trimmed(Net):
    """Takes only as many columns as the longest text of the batch has."""

    def forward(self, x: Tensor) -> Tensor:
        longest = int((x[:, :, 0] != 0).sum(1).max())
        return super().forward(x[:, :longest])


def test_who_looks_at_the_whole_batch_is_not_merged_for_such_values() -> None:
    first = Trimmed().eval()
    other = copy.deepcopy(first)
    nn.init.normal_(other.head.weight)
    group = PrefixGroup({"0": member(first), "1": member(other)})
    short = rows(2, 0)
    short["x"][:, 1:] = 0
    with pytest.raises(CannotMerge, match="called in another way for all together"):
        group.run({"0": short, "1": rows(2, 1)})


class Limited(Net):
    """A part between the layers has a setting of its own."""

    def __init__(self, limits: list[float], kept_as: str) -> None:
        super().__init__()
        self.middle = Middle(limits, kept_as)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.middle(x))


class Middle(nn.Module):
    """`kept_as`: the attribute that holds the setting; a private one is one too."""

    def __init__(self, limits: list[float], kept_as: str) -> None:
        super().__init__()
        self.kept_as = kept_as
        setattr(self, kept_as, limits)
        self.same = nn.Linear(WIDTH, WIDTH)
        nn.init.eye_(self.same.weight)
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(self.same(x.clamp(*getattr(self, self.kept_as))))
        return out


@pytest.mark.parametrize("kept_as", ["limits", "_limits"])
def test_layers_in_a_part_with_other_settings_are_not_shared(kept_as: str) -> None:
    first, other = Limited([-6, 6], kept_as).eval(), Limited([-20, 20], kept_as).eval()
    other.middle.same.load_state_dict(first.middle.same.state_dict())
    with pytest.raises(CannotMerge, match="differ already"):
        PrefixGroup({"0": member(first), "1": member(other)})


def test_wrappers_are_taken_out_again_whatever_goes_wrong() -> None:
    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            assert len(self.layers)
            assert self.layers[0].__class__ is Counted, "a part that is not as it was"
            return super().forward(x)

    first = Counting().eval()
    with pytest.raises(AssertionError, match="not as it was"):
        PrefixGroup({"0": member(first), "1": member(copy.deepcopy(first))})
    first(torch.zeros(1, 3, WIDTH))


class Words(nn.Module):
    """Texts: a table of words, which only rare ones tell apart, then layers. `uses`: how it takes words out of the table."""

    def __init__(self, uses: Callable[[Words, Tensor], Tensor]) -> None:
        super().__init__()
        self.uses = uses
        self.before = nn.Embedding(100, WIDTH)
        self.embed = nn.Embedding(100, WIDTH)
        self.table = nn.Parameter(torch.randn(100, WIDTH))
        self.register_buffer("kept", torch.randn(100, WIDTH))
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.before(ids) + self.uses(self, ids)).mean(1))
        return out


USES: dict[str, Callable[[Words, Tensor], Tensor]] = {
    "a weight of the whole": lambda net, ids: net.table[ids],
    "a buffer of the whole": lambda net, ids: net.get_buffer("kept")[ids],
    "a weight whose module is not called": lambda net, ids: nn.functional.embedding(ids, net.embed.weight),
    "values of such a weight": lambda net, ids: net.embed.weight.data[ids],
}


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_a_weight_that_differs_ends_the_prefix_though_no_module_that_holds_it_is_called(
    uses: Callable[[Words, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    first = Words(uses).eval()
    other = copy.deepcopy(first)
    with torch.no_grad():
        for table in (other.embed.weight, other.table, other.get_buffer("kept")):
            table[50:] += 1  # the example has no such word
    apart = copy.deepcopy([first, other])
    example = {"x": torch.arange(4)}
    with torch.inference_mode():
        group = PrefixGroup(
            {
                name: Member(net, lambda rows, net=net: {"y": net(rows["x"])}, example)  # type: ignore[misc]
                for name, net in (("0", first), ("1", other))
            }
        )
        assert group.merged == ("before",)
        rare = torch.tensor([[60, 1, 2, 3]])
        found = group.run({"0": {"x": rare}, "1": {"x": rare}})
        for number, net in enumerate(apart):
            torch.testing.assert_close(found[str(number)]["y"], net(rare))


def test_a_weight_that_differs_and_is_used_behind_the_shared_layers_does_not_end_them() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    first = Scaled().eval()
    other = copy.deepcopy(first)
    for one in (other.scale, other.head.weight):
        nn.init.normal_(one)
    merged = PrefixGroup({"0": member(first), "1": member(other)}).merged
    assert merged == (*(f"layers.{place}" for place in range(LAYERS)), "drop")


def test_a_mark_of_where_a_layer_came_from_is_no_setting() -> None:
    """transformers sets it on the layers that it has looked at, which depends on what a checkpoint lacks."""
    first = Net().eval()
    other = tuned(first, LAYERS)
    for layer in other.layers:
        layer._is_hf_initialized = True  # type: ignore[assignment]
    assert len(PrefixGroup({"0": member(first), "1": member(other)}).merged) >= LAYERS
