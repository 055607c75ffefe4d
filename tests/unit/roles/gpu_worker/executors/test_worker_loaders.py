"""Loading models: what works, and what people are told when it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fabric.clock import MonotonicClock
from fabric.ids import ModelId
from fabric.messages import HeadSpec, LoaderSpec
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.loaders.base import LoaderError, NotAModel, UnknownModel, WeightsError
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.loaders.torch_compat import declare_missing_operators
from roles.gpu_worker.executors.loaders.torchvision import IMAGENET
from roles.gpu_worker.executors.merging.heads import load_heads

MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"
CPU = torch.device("cpu")


def zoo(arch: str = "squeezenet1_1", weights: Path | None = None, top_k: int | None = None) -> LoaderSpec:
    return LoaderSpec(zoo="torchvision", arch=arch, weights=str(weights) if weights else None, top_k=top_k)


def state() -> dict[str, torch.Tensor]:
    declare_missing_operators()
    from torchvision import models

    net: torch.nn.Module = models.squeezenet1_1(weights=None)
    return net.state_dict()


def models_module() -> ModuleType:
    declare_missing_operators()
    from torchvision import models

    module: ModuleType = models
    return module


def drawn_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # the loader's default seed
    net: torch.nn.Module = models_module().squeezenet1_1(weights=None)
    return net.state_dict()


def picture_batch() -> dict[str, torch.Tensor]:
    return {"image": torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))}


def test_torchvision_imports_although_its_compiled_part_may_not_load() -> None:
    assert declare_missing_operators() is declare_missing_operators()
    import torchvision

    assert torchvision.__version__
    assert torch.ops.torchvision.nms is not None
    assert torch.ops.torchvision.qnms is not None


def test_a_zoo_model_has_the_same_random_weights_for_the_same_seed() -> None:
    first, second = (load_model(zoo(), CPU) for _ in range(2))
    with torch.inference_mode():
        logits = first.model.infer(picture_batch())["logits"]
        assert torch.equal(logits, second.model.infer(picture_batch())["logits"])
    assert logits.shape == (2, 1000)
    assert first.image == IMAGENET
    assert first.example["image"].shape == (3, 224, 224)


def test_top_k_is_reduced_to_indices_and_scores() -> None:
    with torch.inference_mode():
        outputs = load_model(zoo(top_k=5), CPU).model.infer(picture_batch())
        logits = load_model(zoo(), CPU).model.infer(picture_batch())["logits"]
    assert (outputs["indices"].dtype, outputs["indices"].shape) == (torch.int64, (2, 5))
    assert (outputs["scores"].dtype, outputs["scores"].shape) == (torch.float32, (2, 5))
    assert torch.equal(outputs["indices"][:, 0], logits.argmax(dim=1))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_worker_answers_what_the_plain_call_would_bit_for_bit(channels_last: bool) -> None:
    spec = LoaderSpec(zoo="torchvision", arch="squeezenet1_1", channels_last=channels_last)
    net = models_module().squeezenet1_1(weights=None)
    net.load_state_dict(drawn_state())
    net = net.eval().to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    hosted = DeviceReplica("m", load_model(spec, CPU), 2, CPU, MonotonicClock())
    pictures = picture_batch()["image"]
    (logits,) = hosted.run([{"image": picture.numpy()} for picture in pictures])
    with torch.inference_mode():
        layout = torch.channels_last if channels_last else torch.contiguous_format
        plain = net(pictures.contiguous(memory_format=layout))
    assert np.array_equal(logits.array, plain.numpy())


def test_random_weights_answer_in_a_sane_range_and_tell_pictures_apart() -> None:
    """Untouched batch norms do not normalise: signals vanish here, and a ResNet-101's are over what float16 holds."""
    spec = LoaderSpec(zoo="torchvision", arch="shufflenet_v2_x0_5")
    pictures = picture_batch()["image"] * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    with torch.inference_mode():
        first, again = (load_model(spec, CPU).model.infer({"image": pictures})["logits"] for _ in range(2))
    assert torch.equal(first, again)
    assert 0.1 < float((first[0] - first[1]).abs().max()) <= 2 * float(first.abs().max()) < 1e3


def test_half_precision_is_cast_on_the_device_and_answers_in_float32() -> None:
    with torch.inference_mode():
        half = load_model(LoaderSpec(zoo="torchvision", arch="squeezenet1_1", dtype="bfloat16"), CPU)
        logits = half.model.infer(picture_batch())["logits"]
        exact = load_model(zoo(), CPU).model.infer(picture_batch())["logits"]
    assert logits.dtype is torch.float32
    assert half.example["image"].dtype is torch.float32
    assert 0 < float((logits - exact).abs().max()) < 0.1


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_zoo_model_takes_weights_from_a_local_file(tmp_path: Path, suffix: str) -> None:
    weights = {name: value + 0.001 for name, value in state().items()}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    with torch.inference_mode():
        given = load_model(zoo(weights=path), CPU).model.infer(picture_batch())["logits"]
        drawn = load_model(zoo(), CPU).model.infer(picture_batch())["logits"]
    assert not torch.equal(given, drawn)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_truncated_weights_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(state(), path)
    else:
        save_file(state(), path)
    path.write_bytes(path.read_bytes()[:10_000])
    with pytest.raises(WeightsError, match="truncated or not a weights file"):
        load_model(zoo(weights=path), CPU)


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", b"cos\nsystem\n(S'true'\ntR."])
def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="not a weights file"):
        load_model(zoo(weights=path), CPU)


def pickled(value: object) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path)


def scripted(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)  # type: ignore[no-untyped-call]


def zipped(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", content)
            archive.writestr("a/version", "3\n")

    return write


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (pickled(torch.nn.Linear(2, 2)), r"whole pickled model.*save the model's state_dict\(\)"),
        (scripted, r"is a TorchScript program: save the model's state_dict\(\)"),
        (pickled({1: torch.ones(2)}), "holds no tensors by name"),
        (pickled([torch.ones(2)]), "holds no tensors by name"),
        (pickled(torch.ones(2)), "holds no tensors by name"),
        (pickled({"classifier.1.weight": 1}), "of another model"),
        (zipped(b""), "truncated or not a weights file"),
        (zipped(b"garbage"), "not a weights file|whole pickled model"),
        (zipped(b"cos\nsystem\n(S'true'\ntR."), "whole pickled model"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_file_that_holds_something_else_is_named_and_nobody_is_told_to_trust_it(
    write: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pt"
    write(path)
    with pytest.raises(WeightsError, match=reason) as refused:
        load_model(zoo(weights=path), CPU)
    with pytest.raises(LoaderError, match=f"^head small: .*(?:{reason})") as refused_head:
        load_heads([HeadSpec(ModelId("small"), None, zoo(weights=path))], CPU)
    for told in (str(refused.value), str(refused_head.value)):
        assert str(path) in told
        assert "weights_only" not in told
        assert "\x1b" not in told


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no weights file .*gone\.safetensors"):
        load_model(zoo(weights=tmp_path / "gone.safetensors"), CPU)


def test_the_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(WeightsError, match="another model"):
        load_model(zoo(weights=path), CPU)


def test_an_unknown_architecture_comes_with_a_suggestion() -> None:
    with pytest.raises(UnknownModel, match="did you mean 'resnet50'"):
        load_model(zoo(arch="resnet5O"), CPU)
    with pytest.raises(UnknownModel, match="no classifier None"):
        load_model(LoaderSpec(zoo="torchvision"), CPU)
    with pytest.raises(UnknownModel, match="no model zoo 'keras'"):
        load_model(LoaderSpec(zoo="keras"), CPU)


def test_a_users_class_is_loaded() -> None:
    loaded = load_model(LoaderSpec(python=f"{MODELS}:Doubler"), CPU)
    outputs = loaded.model.infer({"x": torch.ones(2, 3)})
    assert outputs["twice"].tolist() == [[2, 2, 2], [2, 2, 2]]
    assert loaded.image is None


@pytest.mark.parametrize(
    ("spec", "error", "reason"),
    [
        (LoaderSpec(), UnknownModel, "exactly one of zoo and python"),
        (LoaderSpec(zoo="torchvision", python="a:B"), UnknownModel, "exactly one of zoo and python"),
        (LoaderSpec(python="no_colon"), UnknownModel, "module:Class"),
        (LoaderSpec(python="no_such_module_here:Model"), UnknownModel, "cannot import"),
        (LoaderSpec(python=f"{MODELS}:Doublr"), UnknownModel, "has no class 'Doublr'"),
        (LoaderSpec(python=f"{MODELS}:not_a_class"), UnknownModel, "has no class"),
        (LoaderSpec(python=f"{MODELS}:NoExample"), NotAModel, "no method 'example'"),
        (LoaderSpec(python=f"{MODELS}:EmptyExample"), NotAModel, "must give a dict of tensors"),
        (LoaderSpec(python=f"{MODELS}:NumpyExample"), NotAModel, "must be a tensor, not list"),
        (LoaderSpec(python=f"{MODELS}:Doubler", weights="w.pt"), UnknownModel, "'weights' means nothing"),
        (LoaderSpec(python=f"{MODELS}:Doubler", top_k=5), UnknownModel, "'top_k' means nothing"),
        (LoaderSpec(python=f"{MODELS}:Doubler", dtype="float16"), UnknownModel, "'dtype' means nothing"),
        (LoaderSpec(python=f"{MODELS}:PreIsNoMethod"), NotAModel, "pre is no method"),
        (LoaderSpec(zoo="torchvision", arch="alexnet", dtype="int4"), UnknownModel, "no dtype 'int4'"),
    ],
)
def test_a_specification_that_is_wrong_is_explained(
    spec: LoaderSpec, error: type[LoaderError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        load_model(spec, CPU)
