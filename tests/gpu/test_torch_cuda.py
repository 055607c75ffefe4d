"""The torch device on CUDA: the same answers as on the CPU, and an end in order when the context breaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fabric.clock import MonotonicClock
from fabric.ids import BatchId
from fabric.link import NamedTensor, Tensor
from fabric.messages import LoaderSpec, SliceSpec
from roles.demo.digits_model import HELD_OUT
from roles.gpu_worker.executors.base import Job, JobPart
from roles.gpu_worker.executors.torch import TorchDevice
from tests.worker_builders import MODEL, SLICE, model_spec, slice_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DIGITS = LoaderSpec(python="roles.demo.digits_model:Digits")
BREAKER = """
import torch
from fabric.clock import MonotonicClock
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.torch import TorchDevice
from tests.worker_builders import model_spec, slice_spec
device = TorchDevice(MonotonicClock())
loader = LoaderSpec(python="roles.demo.digits_model:Digits")
device.load(slice_spec(models=[model_spec(loader=loader)], device="cuda"))
assert not device.is_broken
try:
    torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
except RuntimeError as error:
    print(device.explain(error))
print("broken", device.is_broken)
"""


def digits_on(kind: str, loader: LoaderSpec = DIGITS, batch_size_max: int = 16) -> TorchDevice:
    device = TorchDevice(MonotonicClock())
    device.load(spec_on(kind, loader, batch_size_max))
    return device


def spec_on(kind: str, loader: LoaderSpec = DIGITS, batch_size_max: int = 16) -> SliceSpec:
    return slice_spec(models=[model_spec(loader=loader, batch_size_max=batch_size_max)], device=kind)


def answers(device: TorchDevice, name: str, images: Tensor) -> dict[str, Tensor]:
    tensors = [NamedTensor(name, image) for image in images]
    ran = device.run(Job(SLICE, BatchId(1), MODEL, [JobPart(len(tensors), tensors)]))
    return {output.name: output.array for output in ran.outputs}


def test_cuda_and_cpu_give_the_same_answers() -> None:
    with np.load(HELD_OUT) as held_out:
        images = held_out["images"]
    cpu, cuda = digits_on("cpu"), digits_on("cuda")
    for first in range(0, 320, 16):
        expected = answers(cpu, "image", images[first : first + 16])
        got = answers(cuda, "image", images[first : first + 16])
        assert got["digit"].tolist() == expected["digit"].tolist()
        assert np.abs(got["scores"].astype(np.float64) - expected["scores"].astype(np.float64)).max() < 1e-3


def test_batches_one_after_another_do_not_mix() -> None:
    with np.load(HELD_OUT) as held_out:
        images = held_out["images"]
    cuda = digits_on("cuda")
    alone = [answers(cuda, "image", images[index : index + 1])["scores"][0] for index in range(64)]
    for _ in range(10):
        together = [answers(cuda, "image", images[first : first + 16])["scores"] for first in (0, 16, 32, 48)]
        assert (
            np.abs(np.concatenate(together).astype(np.float64) - np.stack(alone).astype(np.float64)).max()
            < 1e-3
        )


def test_a_replica_on_cuda_tells_its_memory_and_a_rising_table() -> None:
    loader = LoaderSpec(zoo="torchvision", arch="resnet18", top_k=5)
    (replica,) = TorchDevice(MonotonicClock()).load(spec_on("cuda", loader, 8))
    assert replica.memory_bytes > 40_000_000
    assert list(replica.exec_ms) == sorted(replica.exec_ms)
    assert replica.outputs[0].shape == (5,)


def test_memory_that_is_not_there_is_said_plainly() -> None:
    device = digits_on("cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert device.explain(caught.value).startswith("out of memory on the device")
    assert not device.is_broken


def test_a_failed_assertion_in_a_kernel_breaks_the_device() -> None:
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", BREAKER], check=True, capture_output=True, text=True, cwd=root
    )
    assert ended.stdout.splitlines()[-1] == "broken True"
