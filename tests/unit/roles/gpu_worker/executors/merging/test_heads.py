"""Several models on one backbone as one that a slice hosts: who gets which row, what is shared, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from fabric.clock import MonotonicClock
from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import PREFIX, HeadSpec, LoaderSpec, ModelSpec, SliceSpec
from roles.gpu_worker.executors.base import HEAD_INPUT, Job, JobPart
from roles.gpu_worker.executors.loaders.base import LoadedModel, LoaderError, NotAModel
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.merging import GROUPS
from roles.gpu_worker.executors.merging import heads as heads_module
from roles.gpu_worker.executors.merging.heads import load_heads
from roles.gpu_worker.executors.merging.stacked import StackedGroup
from roles.gpu_worker.executors.torch import TorchDevice

CPU = torch.device("cpu")
WIDTH = 6
HERE = __name__
SLICE = SliceId("a/gpu0/0")


class Backbone(nn.Module):
    """Layers that all copies have, and a head of their own."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        torch.manual_seed(classes)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Two:
    """A user's class with two classes."""

    classes = 2

    def load(self, device: str) -> None:
        self.net = Backbone(self.classes).eval().to(device)

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {"logits": self.net(batch["x"])}

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(WIDTH)}


class Five(Two):
    classes = 5


class Scaled(Two):
    """Whose inputs are changed before they come to the shared layers."""

    def pre(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": 2 * batch["x"]}


class Unrelated(Two):
    def load(self, device: str) -> None:
        super().load(device)
        nn.init.normal_(next(self.net.parameters()))


class OtherInputs(Two):
    def example(self) -> dict[str, Tensor]:
        return {"x": torch.zeros(WIDTH, dtype=torch.float64)}


class OtherOutputs(Two):
    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {"scores": self.net(batch["x"])}


class WithoutNet(Two):
    """A model that holds more than one module: which one would be shared?"""

    def load(self, device: str) -> None:
        super().load(device)
        self.other = nn.Identity()


def head(name: str, class_: type[Two]) -> HeadSpec:
    return HeadSpec(ModelId(name), None, LoaderSpec(python=f"{HERE}:{class_.__name__}"))


def weights(net: object) -> int:
    assert isinstance(net, nn.Module)
    return len({one.data_ptr() for one in net.parameters()})


def hosted(*heads: HeadSpec, merge: str = PREFIX) -> tuple[TorchDevice, SliceSpec]:
    model = ModelSpec(ModelId("all"), 1_000.0, 8, heads=heads, merge=merge)
    return TorchDevice(MonotonicClock()), SliceSpec(SLICE, 0, "cpu", None, (model,))


@pytest.mark.parametrize("merge", ["prefix", "operators"])
def test_each_row_is_answered_by_its_own_head_as_if_it_ran_alone(merge: str) -> None:
    device, spec = hosted(head("two", Two), head("five", Five), merge=merge)
    (replica,) = device.load(spec)
    assert [(one.model_id, one.outputs[0].shape) for one in replica.heads] == [("two", (2,)), ("five", (5,))]
    assert [info.name for info in replica.inputs] == ["x"], "which head a row is for is no input of a client"
    assert not replica.not_merged
    rows = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    names = [ModelId(name) for name in ("five", "two", "five", "two", "two")]
    parts = [
        JobPart(2, [NamedTensor("x", row) for row in rows[:2]], names[:2]),
        JobPart(3, [NamedTensor("x", row) for row in rows[2:]], names[2:]),
    ]
    ran = device.run(Job(SLICE, BatchId(1), ModelId("all"), parts))
    assert not ran.rejected
    (logits,) = ran.outputs
    for row, name, given in zip(rows, names, logits.array, strict=True):
        classes = 2 if name == "two" else 5
        alone = Backbone(classes).eval()(torch.from_numpy(row)[None])[0].detach().numpy()
        np.testing.assert_allclose(given[:classes], alone, rtol=1e-5, atol=1e-5)
        assert not given[classes:].any()


def test_a_row_without_a_head_or_for_one_that_is_not_there_is_refused_and_the_others_run() -> None:
    device, spec = hosted(head("two", Two), head("five", Five))
    device.load(spec)
    row = NamedTensor("x", np.zeros(WIDTH, np.float32))
    parts = [JobPart(1, [row]), JobPart(2, [row, row], [ModelId("gone"), ModelId("two")])]
    ran = device.run(Job(SLICE, BatchId(1), ModelId("all"), parts))
    assert [(one.row, one.reason) for one in ran.rejected] == [
        (0, "it does not say which head it is for"),
        (1, "the model has no head 'gone'"),
    ]
    assert ran.outputs[0].array.shape == (1, 5)


def test_each_heads_bounds_hold_for_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zoo's model knows how large its tokens may be, a user's class does not say; another one knows others."""
    bounds = {"Two": {"x": (0, 9)}, "Five": {}, "Unrelated": {"x": (-1, 1)}}

    def load(spec: LoaderSpec, device: torch.device) -> LoadedModel:
        name = str(spec.python).partition(":")[2]
        return dataclasses.replace(load_model(spec, device), bounds=bounds[name])

    monkeypatch.setattr(heads_module, "load_model", load)
    device, spec = hosted(head("two", Two), head("five", Five), head("other", Unrelated))
    device.load(spec)
    names = ["two", "five", "other"]
    rows = [NamedTensor("x", np.full(WIDTH, value, np.float32)) for value in (5, -1, 20) for _ in names]
    part = JobPart(9, rows, [ModelId(name) for name in names] * 3)
    ran = device.run(Job(SLICE, BatchId(1), ModelId("all"), [part]))
    assert [(one.row, one.reason) for one in ran.rejected] == [
        (2, "input 'x' holds 5.0 to 5.0, not -1 to 1"),
        (3, "input 'x' holds -1.0 to -1.0, not 0 to 9"),
        (6, "input 'x' holds 20.0 to 20.0, not 0 to 9"),
        (8, "input 'x' holds 20.0 to 20.0, not -1 to 1"),
    ]


class InHalf(Five):
    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {"logits": self.net(batch["x"]).bfloat16()}


@pytest.mark.parametrize("class_", [Two, InHalf])
def test_what_a_head_is_said_to_give_is_what_comes(class_: type[Two]) -> None:
    device, spec = hosted(head("half", InHalf), head("other", class_))
    (replica,) = device.load(spec)
    assert {one.outputs[0].dtype for one in replica.heads} == {replica.outputs[0].dtype} == {"float32"}
    row = NamedTensor("x", np.ones(WIDTH, np.float32))
    part = JobPart(2, [row, row], [ModelId("other"), ModelId("half")])
    (logits,) = device.run(Job(SLICE, BatchId(1), ModelId("all"), [part])).outputs
    alone = Backbone(class_.classes).eval()(torch.ones(1, WIDTH))[0].detach().numpy()
    tolerance = 1e-5 if class_ is Two else 1e-2
    np.testing.assert_allclose(logits.array[0][: class_.classes], alone, rtol=tolerance, atol=tolerance)


def test_a_model_without_heads_ignores_what_is_said_of_them() -> None:
    device, spec = hosted()
    model = replace(spec.models[0], loader=LoaderSpec(python=f"{HERE}:Two"))
    device.load(replace(spec, models=(model,)))
    part = JobPart(1, [NamedTensor("x", np.zeros(WIDTH, np.float32))], [ModelId("two")])
    assert device.run(Job(SLICE, BatchId(1), ModelId("all"), [part])).outputs[0].array.shape == (1, 2)


def test_weights_that_are_equal_are_there_once() -> None:
    loaded = load_heads((head("two", Two), head("five", Five), head("again", Five)), CPU)
    assert weights(getattr(loaded.model, "nets")) == 4 + 3 * 2  # noqa: B009  a UserModel has no nets
    assert loaded.merged == ("body",)
    loaded = load_heads((head("two", Two), head("five", Five), head("again", Five)), CPU, "operators")
    assert weights(getattr(loaded.model, "nets")) == 4 + 2 + 2 + 1  # noqa: B009  of the last one its bias alone
    assert loaded.merged == ("body.0", "body.2", "head")


@pytest.mark.parametrize(
    ("class_", "why"),
    [(Unrelated, "first layers differ"), (Scaled, "differently"), (WithoutNet, "exactly one torch module")],
)
def test_heads_that_cannot_be_merged_run_one_after_the_other_and_say_why(class_: type[Two], why: str) -> None:
    device, spec = hosted(head("two", Two), head("other", class_))
    (replica,) = device.load(spec)
    assert why in replica.not_merged
    rows = np.random.default_rng(0).standard_normal((2, WIDTH)).astype(np.float32)
    names = [ModelId("other"), ModelId("two")]
    part = JobPart(2, [NamedTensor("x", row) for row in rows], names)
    (logits,) = device.run(Job(SLICE, BatchId(1), ModelId("all"), [part])).outputs
    scale = 2 if class_ is Scaled else 1
    if class_ is not Unrelated:
        first = Backbone(2).eval()(torch.from_numpy(scale * rows[:1])).detach().numpy()[0]
        np.testing.assert_allclose(logits.array[0], first, rtol=1e-5, atol=1e-5)
    second = Backbone(2).eval()(torch.from_numpy(rows[1:])).detach().numpy()[0]
    np.testing.assert_allclose(logits.array[1], second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("merge", "other", "why"),
    [
        ("stacked", Five, "of one architecture"),
        ("operators", WithoutNet, "exactly one torch module"),
    ],
)
def test_what_cannot_run_together_as_asked_says_why(merge: str, other: type[Two], why: str) -> None:
    device, spec = hosted(head("two", Two), head("other", other), merge=merge)
    (replica,) = device.load(spec)
    assert why in replica.not_merged


@pytest.mark.parametrize(
    ("class_", "why"), [(OtherInputs, "takes other inputs"), (OtherOutputs, "gives other outputs")]
)
def test_heads_with_other_inputs_or_outputs_are_refused_by_name(class_: type[Two], why: str) -> None:
    with pytest.raises(NotAModel, match=f"head other {why} than head two"):
        load_heads((head("two", Two), head("other", class_)), CPU)


def test_a_head_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(LoaderError, match=r"head other: .*no class 'Nobody'"):
        load_heads(
            (head("two", Two), HeadSpec(ModelId("other"), None, LoaderSpec(python=f"{HERE}:Nobody"))), CPU
        )


def test_batches_are_measured_with_their_requests_spread_over_the_heads() -> None:
    seen: set[int] = set()

    class Noting(Five):
        def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
            seen.add(len(batch["x"]))
            return super().infer(batch)

    globals()["Noting"] = Noting
    device, spec = hosted(head("two", Unrelated), head("noting", Noting))
    (replica,) = device.load(spec)
    assert len(replica.exec_ms) == 8
    assert seen == {1, 2, 4} | {1}, "half of each batch of 2, 4 and 8"


class Remembering(nn.Module):
    """Keeps the largest value that it has seen, in a buffer."""

    most: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.full((), 10.0))
        self.body = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.most.copy_(torch.maximum(self.most, x.abs().max()))
        out: Tensor = self.body(x / self.most)
        return out


class InBuffer(Two):
    def load(self, device: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(Remembering(), nn.Linear(2, 2)).eval()  # type: ignore[assignment]


class InBufferToo(InBuffer):
    def load(self, device: str) -> None:
        super().load(device)
        nn.init.normal_(next(self.net[1].parameters()))  # type: ignore[index]


@pytest.mark.parametrize("merge", ["prefix", "stacked", "operators"])
def test_what_a_model_keeps_in_a_buffer_is_its_own(merge: str) -> None:
    loaded = load_heads((head("a", InBuffer), head("b", InBufferToo)), CPU, merge)
    assert loaded.not_merged == "a changes its own buffers when it runs"

    def of_b() -> Tensor:
        return loaded.model.infer({"x": torch.ones(1, WIDTH), HEAD_INPUT: torch.tensor([1])})["logits"]

    before = of_b()
    loaded.model.infer({"x": 1_000 * torch.ones(1, WIDTH), HEAD_INPUT: torch.tensor([0])})
    assert torch.equal(of_b(), before)


class Careful(Two):
    """Takes only values that its users may send."""

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        if batch["x"].min() < 0:
            raise ValueError("a picture has no values below 0")
        return super().infer(batch)


@pytest.mark.parametrize("merge", ["prefix", "stacked", "operators"])
def test_whose_code_does_not_take_the_rows_of_a_trial_runs_apart(merge: str) -> None:
    loaded = load_heads((head("a", Careful), head("b", Careful)), CPU, merge)
    assert loaded.not_merged == "they do not run together (ValueError: a picture has no values below 0)"
    rows = {"x": torch.ones(2, WIDTH), HEAD_INPUT: torch.tensor([1, 0])}
    assert loaded.model.infer(rows)["logits"].shape == (2, 2)


@pytest.mark.parametrize("merge", ["prefix", "stacked", "operators"])
def test_heads_that_must_not_run_a_request_twice_do_not(merge: str) -> None:
    """A joint run calls `infer` more than once, and where it goes wrong all over again."""
    begun: list[tuple[str, list[float]]] = []

    class Booking(Two):
        def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
            begun.append((type(self).__name__, batch["x"][:, 0].tolist()))
            answer = super().infer(batch)
            if batch["x"].max() > 100:
                raise ValueError("too much")
            return answer

    class BookingToo(Booking):
        pass

    globals().update(Booking=Booking, BookingToo=BookingToo)
    device, spec = hosted(head("a", Booking), head("b", BookingToo), merge=merge)
    (replica,) = device.load(replace(spec, models=(replace(spec.models[0], is_idempotent=False),)))
    assert replica.not_merged == "a joint run may run a request twice, which idempotent: false forbids"
    begun.clear()
    rows = [NamedTensor("x", np.full(WIDTH, value, np.float32)) for value in (1, 1_000)]
    part = JobPart(2, rows, [ModelId("a"), ModelId("b")])
    with pytest.raises(ValueError, match="too much"):
        device.run(Job(SLICE, BatchId(1), ModelId("all"), [part]))
    assert begun == [("Booking", [1.0]), ("BookingToo", [1_000.0])]


@pytest.mark.parametrize("merge", ["stacked", "operators"])
def test_nothing_is_traced_beside_models_that_serve(merge: str) -> None:
    heads = (head("a", Two), head("b", Two))
    assert "tracing would disturb" in load_heads(heads, CPU, merge, is_beside=True).not_merged
    assert not load_heads(heads, CPU, PREFIX, is_beside=True).not_merged


class OneForAll(Two):
    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: rows.mean(0, keepdim=True) for name, rows in super().infer(batch).items()}


def test_a_head_that_answers_one_row_for_many_is_named() -> None:
    loaded = load_heads((head("a", Two), head("b", OneForAll)), CPU)
    rows = {"x": torch.ones(3, WIDTH), HEAD_INPUT: torch.tensor([0, 1, 1])}
    with pytest.raises(NotAModel, match=r"head b: its output 'logits' has shape \[1, 2\] for a batch of 2"):
        loaded.model.infer(rows)


class LeavesOut(Two):
    """Drops rows that hold a NaN."""

    def pre(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": batch["x"][~batch["x"].isnan().any(1)]}


class TwoViews(Two):
    """Looks at each input twice, and takes the mean."""

    def pre(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": batch["x"].repeat_interleave(2, dim=0)}

    def post(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.view(-1, 2, *value.shape[1:]).mean(1) for key, value in outputs.items()}


def joint(
    monkeypatch: pytest.MonkeyPatch, merge: str, class_: type[Two]
) -> Callable[[Sequence[float], Sequence[int]], Tensor]:
    """Two heads of that class, with rows of these values."""
    monkeypatch.setattr(StackedGroup, "_measured_gain", lambda _: 10.0)  # however fast it is here
    model = load_heads((head("a", class_), head("b", class_)), CPU, merge).model

    def infer(values: Sequence[float], heads: Sequence[int]) -> Tensor:
        rows = torch.tensor(values)[:, None].expand(-1, WIDTH)
        with torch.inference_mode():
            return model.infer({"x": rows, HEAD_INPUT: torch.tensor(heads)})["logits"]

    return infer


@pytest.mark.parametrize("merge", ["prefix", "stacked", "operators"])
def test_rows_that_a_head_leaves_out_are_nobodys(monkeypatch: pytest.MonkeyPatch, merge: str) -> None:
    infer = joint(monkeypatch, merge, LeavesOut)
    nan = float("nan")
    for values, heads in [
        ((1.0, nan, 2.0, 3.0), (0, 0, 1, 1)),
        ((nan, 1.0, 2.0), (0, 0, 1)),
        ((1.0, 2.0, nan), (0, 0, 1)),
        ((nan, 1.0, 2.0), (0, 1, 1)),
        ((nan, nan), (0, 1)),
    ]:
        with pytest.raises(NotAModel, match="for a batch of"):
            infer(values, heads)
    apart = infer((3.0,), (1,))
    assert torch.allclose(infer((1.0, 2.0, 3.0), (0, 0, 1))[2:], apart)


@pytest.mark.parametrize("merge", ["prefix", "stacked", "operators"])
def test_a_head_may_make_several_rows_of_a_request(monkeypatch: pytest.MonkeyPatch, merge: str) -> None:
    infer, plain = joint(monkeypatch, merge, TwoViews), joint(monkeypatch, merge, Two)
    for values, heads in [((1.0, 2.0, 3.0), (0, 1, 1)), ((1.0, 2.0), (0, 1)), ((1.0, 2.0), (1, 1))]:
        assert torch.allclose(infer(values, heads), plain(values, heads), atol=1e-5)


class CountsFromOne(Two):
    """Changes its numbers where they lie: a second time they would be beyond its table."""

    def load(self, device: str) -> None:
        torch.manual_seed(self.classes)
        self.net = nn.Embedding(10, self.classes).eval().to(device)  # type: ignore[assignment]  # as any user's

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        batch["x"] += 1
        return {"logits": self.net(batch["x"])}

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.full((3,), 8)}


class ShiftsInPlace(Two):
    """The same with layers that others have too."""

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        batch["x"] -= 0.5
        return {"logits": self.net(batch["x"])}


@pytest.mark.parametrize("merge", GROUPS)
@pytest.mark.parametrize("class_", [CountsFromOne, ShiftsInPlace])
def test_heads_that_write_to_their_inputs_answer_what_they_do_alone(class_: type[Two], merge: str) -> None:
    loaded = load_heads([head("a", class_), head("b", class_)], CPU, merge)
    if class_ is ShiftsInPlace:
        assert loaded.not_merged == "a changes its inputs when it runs"
    alone = class_()
    alone.load("cpu")
    rows = torch.stack(list(alone.example().values()) * 4)
    with torch.inference_mode():
        expected = alone.infer({"x": rows.clone()})["logits"]
        found = loaded.model.infer({"x": rows.clone(), HEAD_INPUT: torch.tensor([0, 1, 1, 0])})["logits"]
    assert torch.allclose(found, expected)
    assert loaded.example["x"].tolist() == class_().example()["x"].tolist()
