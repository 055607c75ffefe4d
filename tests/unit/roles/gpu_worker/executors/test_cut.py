"""A model cut into stages answers what it answers whole; what cannot be cut is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from fabric.clock import MonotonicClock
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.cut import CutError, Stage, Traced
from roles.gpu_worker.executors.loaders.base import UserModel
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.profiled import ProfiledModel
from tests.worker_builders import SteppingClock

CLOCK = MonotonicClock()


CPU = torch.device("cpu")
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
BERT = LoaderSpec(
    zoo="transformers",
    arch="bert",
    sequence_length=8,
    config=tuple((key, json.dumps(value)) for key, value in TINY.items()),
)


@pytest.fixture(autouse=True)
def quiet_export() -> None:
    """Its own trace would be thousands of lines in pytest's capture, and take most of the time."""
    for name in ("torch", "torch.__trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Chain:
    """A user's class around a plain `nn.Sequential`, with a part behind it that has no weights."""

    def __init__(self) -> None:
        self.load("cpu")

    def load(self, device: str) -> None:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(5)]
        self.net = nn.Sequential(*layers).eval().to(device)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = self.net(batch["x"] * 2)
        return {"best": out.argmax(dim=1), "out": out.softmax(dim=1)}

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.ones(6)}


class Residual(Chain):
    """Blocks with a way around them: within a block two activations are needed."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = batch["x"]
        for block in self.net:
            out = out + block(out)
        return {"out": out}


class WritesThroughViews(Chain):
    """Values that follow from the inputs, or from weights, are written in place through views of them."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        away = torch.zeros_like(x)
        away[:, 1:].masked_fill_(x[:, 1:] < 0, -100.0)
        out = x
        for block in self.net:
            out = block(out) + away
            out[:, :2].mul_(2)
        return {"out": out}


class ChangesItself(Chain):
    def load(self, device: str) -> None:
        super().load(device)
        self.net.register_buffer("calls", torch.zeros(1))

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.net.get_buffer("calls").add_(1)
        return {"out": self.net(batch["x"]) * self.net.get_buffer("calls")}


class LooksAtValues(Chain):
    """What it does depends on what it is given: that is no list of operations."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"out": self.net(batch["x"]) if batch["x"].sum() > 0 else batch["x"]}


class WithoutWeights(Chain):
    def load(self, device: str) -> None:
        del device

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"out": batch["x"] + 1}


@cache
def bert() -> tuple[UserModel, Traced]:
    loaded = load_model(BERT, CPU)
    return loaded.model, Traced(loaded.model, loaded.example)


def run(stages: Sequence[Stage], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values: tuple[Tensor, ...] = tuple(batch.values())
    with torch.inference_mode():
        for stage in stages:
            values = stage.run(values)
            assert all(len(value) == len(next(iter(batch.values()))) for value in values), "rows of the batch"
    return dict(zip(stages[-1].gives, values, strict=True))


def check_same(model: UserModel, stages: Sequence[Stage], batch: dict[str, Tensor]) -> None:
    with torch.inference_mode():
        whole = model.infer(batch)
    cut = run(stages, batch)
    assert cut.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.allclose(cut[key], value, rtol=0, atol=1e-5)


def weights(stage: Stage) -> set[str]:
    return {name for name, _ in stage.module.named_parameters()}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_transformer_answers_the_same_in_so_many_stages(count: int) -> None:
    model, traced = bert()
    stages = traced.cut(traced.balanced(count, SteppingClock()))
    assert len(stages) == count
    for size in (1, 3):
        ids = torch.randint(0, 100, (size, 8), generator=torch.Generator().manual_seed(size))
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        check_same(model, stages, {"input_ids": ids, "attention_mask": mask})
    # Every weight is in one stage, so the memory of a stage is its own part.
    everywhere = [name for stage in stages for name in weights(stage)]
    assert len(everywhere) == len(set(everywhere))
    if count == 4:
        sizes = [sum(one.numel() for one in stage.module.parameters()) for stage in stages]
        assert max(sizes) < 0.6 * sum(sizes)


def test_a_classifier_of_torchvision_answers_the_same_in_so_many_stages() -> None:
    model = load_model(LoaderSpec(zoo="torchvision", arch="resnet18"), CPU).model
    traced = Traced(model, {"image": torch.zeros(3, 64, 64)})
    stages = traced.cut(traced.balanced(3, SteppingClock()))
    assert [len(stage.takes) for stage in stages] == [1, 1, 1], "one activation goes on, and nothing else"
    check_same(model, stages, {"image": torch.randn(2, 3, 64, 64)})


def test_a_transformer_is_cut_where_the_user_says() -> None:
    model, traced = bert()
    stages = traced.cut(traced.begun_at(["bert.encoder.layer.1", "bert.encoder.layer.3"]))
    of = [[name for name in weights(stage) if ".layer." in name] for stage in stages]
    numbers = [sorted({int(name.split("layer.")[1].split(".")[0]) for name in names}) for names in of]
    assert numbers == [[0], [1, 2], [3]]
    ids = torch.randint(0, 100, (2, 8))
    check_same(model, stages, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


@pytest.mark.parametrize("make", [Chain, Residual, WritesThroughViews])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_users_class_answers_the_same_in_so_many_stages(make: type[Chain], count: int) -> None:
    model = make()
    traced = Traced(model, model.example())
    stages = traced.cut(traced.balanced(count, SteppingClock()))
    for size in (1, 4):
        check_same(model, stages, {"x": torch.randn(size, 6)})


def test_no_stage_begins_within_a_block() -> None:
    """There the way around the block would have to be sent as well. (Around the first one that is the input, which goes along.)"""
    model = Residual()
    layers = Traced(model, model.example()).layers
    for block in "1234":
        (own,) = (layer for layer in layers if f"{block}.0" in layer.modules)
        assert f"{block}.1" in own.modules


def test_what_cannot_be_cut_is_said() -> None:
    _, traced = bert()
    layers = len(traced.layers)
    with pytest.raises(
        CutError, match=f"it has {layers} layers, which cannot be 60 stages; at most {layers}"
    ):
        traced.balanced(60, SteppingClock())
    with pytest.raises(CutError, match=r"no module 'bert.encoder.layer.7'; did you mean 'bert.encoder.layer"):
        traced.begun_at(["bert.encoder.layer.7"])
    with pytest.raises(CutError, match="another one begins there, or behind it"):
        traced.begun_at(["bert.encoder.layer.2", "bert.encoder.layer.1"])
    for make, said in (
        (LooksAtValues, "torch.export cannot write it down"),
        (WithoutWeights, "no weights"),
        (ChangesItself, "changes its own buffers"),
    ):
        other = make()
        with pytest.raises(CutError, match=said):
            Traced(other, other.example())


def test_the_profiler_measures_the_stages_it_can_and_says_why_not_the_others() -> None:
    found = dict(ProfiledModel(BERT, CPU).stages_ms([2, 60], CLOCK))
    two, sixty = found[2], found[60]
    assert isinstance(two, list)
    assert len(two) == 2
    assert min(two) > 0
    assert isinstance(sixty, str)
    assert "cannot be 60 stages" in sixty


class Normed:
    """A batch norm with statistics, a scale that is a plain number, and a tensor that no module holds."""

    by = 2.0
    shift = torch.arange(6.0)

    def __init__(self) -> None:
        self.load("cpu")

    def load(self, device: str) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).eval().to(device)

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.net(batch["x"] * self.by + self.shift)}

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(6)}


def other_statistics(model: Normed) -> None:
    model.net.get_buffer("1.running_mean").add_(0.5)


def other_order(model: Normed) -> None:
    weight = model.net.get_parameter("0.weight")
    weight.data = weight.data.flip(1)  # with the same sum


def other_number(model: Normed) -> None:
    model.by = 3.0


def other_tensor(model: Normed) -> None:
    model.shift = torch.arange(6.0).flip(0)


@pytest.mark.parametrize("change", [other_statistics, other_order, other_number, other_tensor])
def test_a_model_with_anything_else_in_it_is_another_one(change: Callable[[Normed], None]) -> None:
    model, other = Normed(), Normed()
    digest = Traced(model, model.example()).digest
    assert Traced(other, other.example()).digest == digest
    change(other)
    assert Traced(other, other.example()).digest != digest


class WritesToItsInput(Chain):
    """Shifts what it is given where it lies."""

    def infer(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch["x"] -= 0.5
        return {"y": self.net(batch["x"])}


def test_a_model_that_writes_to_its_input_is_cut_and_its_example_stays() -> None:
    model = WritesToItsInput()
    example = {"x": torch.arange(6.0)}
    traced = Traced(model, example)
    stages = traced.cut([2])
    for _ in range(2):
        traced.check(stages)
        traced.times_ms(stages, CLOCK)
    expected = model.infer({"x": torch.arange(6.0)[None]})["y"]
    values: Sequence[Tensor] = (torch.arange(6.0)[None],)
    with torch.inference_mode():
        for stage in stages:
            values = stage.run(values)
    assert torch.allclose(values[0], expected)
    assert example["x"].tolist() == [0, 1, 2, 3, 4, 5]
