"""The stand-in of CUDA: that it answers as a GPU would, and refuses what a GPU does. Each part is a process that has it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.gpu_stand_ins import a100, gpu_environment, write_gpus

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

GRAPHS = """
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
given = torch.ones(2, 3, device="cuda")
weights = torch.arange(12.0).reshape(4, 3).cuda()
counted = torch.zeros(1, device="cuda")
with torch.inference_mode():
    with torch.cuda.graph(graph, stream=stream):
        made = torch.nn.functional.linear(given, weights)
        made[:, 1:] += 1
        counted.add_(1)
        answer = made.relu()[:, ::2]
    assert answer.isnan().all(), "nothing has run yet"
    before = counted.item()
    for turn in range(3):
        given.fill_(turn - 1)
        graph.replay()
        plain = torch.nn.functional.linear(given, weights)
        plain[:, 1:] += 1
        assert torch.equal(answer, plain.relu()[:, ::2])
    assert counted.item() == before + 3
    for refused in (lambda: given.sum().item(), lambda: given.nonzero(), lambda: given[given > 0], given.cpu, torch.cuda.synchronize, lambda: torch.ones(9).cuda()):
        with pytest.raises(RuntimeError):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                    refused()
    assert given.sum().item() == 6
    recorded = torch.cuda.Event()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        recorded.record()
        given.add_(1)
        for refused in (recorded.query, recorded.synchronize):
            with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
                refused()
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        recorded.query()
    recorded.record()
    assert recorded.query()
"""

BESIDE = """
from concurrent.futures import ThreadPoolExecutor
from fabric.clock import MonotonicClock
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.buckets import cuda_capture
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.torch import TorchDevice
from roles.gpu_worker.executors.loaders.registry import load_model
from tests.worker_builders import slice_spec

gpu, device = torch.device("cuda", 0), TorchDevice(MonotonicClock())
device._device(slice_spec(device="cuda"))
given = torch.ones(3, device=gpu)

def loads_beside():
    loaded = load_model(LoaderSpec(python="deploy.local.demo.digits_model:Digits"), gpu)
    DeviceReplica("m", loaded, 4, gpu, MonotonicClock())
    assert not device.is_broken

def call(beside):
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(beside).result()
    return {"twice": given * 2}

with torch.inference_mode():
    graph, outputs = cuda_capture(gpu)(lambda: call(loads_beside))
    graph.replay()
    torch.cuda.synchronize()
    assert outputs["twice"].tolist() == [2, 2, 2]

    def waits_for_the_device():
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            torch.cuda.synchronize(gpu)

    with pytest.raises(RuntimeError, match="previous error during capture"):
        cuda_capture(gpu)(lambda: call(waits_for_the_device))
    torch.cuda.synchronize()
"""

COPIES = """
given = torch.arange(3.0, device="cuda")
host = torch.empty(3, pin_memory=True)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    host.copy_(given, non_blocking=True)
    assert host.isnan().all(), "nobody has waited"
    given.mul_(2)
stream.synchronize()
assert host.tolist() == [0, 1, 2]
there = torch.zeros(3, device="cuda")
copied = torch.cuda.Event()
with torch.cuda.stream(stream):
    there.copy_(host, non_blocking=True)
    copied.record()
assert there.sum().item() == 0
torch.cuda.current_stream().wait_event(copied)
assert there.sum().item() == 3
with pytest.raises(RuntimeError, match="same device"):
    given + host
with pytest.raises(TypeError, match="cuda:0"):
    given.numpy()
with pytest.raises(torch.OutOfMemoryError):
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
held = torch.cuda.memory_allocated()
more = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == held + (1 << 20)
del more
assert torch.cuda.memory_allocated() == held
with pytest.raises(RuntimeError, match="device-side assert"):
    given[torch.tensor([7], device="cuda")]
with pytest.raises(RuntimeError, match="device-side assert"):
    torch.cuda.synchronize()
"""

SERVED = """
import numpy as np
from fabric.clock import MonotonicClock
from fabric.ids import BatchId
from fabric.link import NamedTensor
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.base import Job, JobPart
from roles.gpu_worker.executors.torch import TorchDevice
from tests.worker_builders import MODEL, SLICE, model_spec, slice_spec

assert torch.cuda.get_device_properties(0).multi_processor_count == 54, "half of them: its share"
python = "deploy.local.demo.digits_model:Digits"
devices = {}
for kind in ("cpu", "cuda"):
    loader = LoaderSpec(python=python, cuda_graphs=kind == "cuda")
    devices[kind] = TorchDevice(MonotonicClock())
    devices[kind].load(slice_spec(models=[model_spec(loader=loader, batch_size_max=4, slo_ms=60_000.0)], device=kind))
hosted = devices["cuda"]._hosted[SLICE][MODEL]
assert hosted.buckets.sizes == (1, 2, 4), hosted.buckets.problem
for turn in range(3):
    images = np.random.default_rng(turn).random((3, 1, 8, 8), np.float32)
    job = Job(SLICE, BatchId(turn), MODEL, [JobPart(3, [NamedTensor("image", image) for image in images])])
    answers = {}
    for kind, device in devices.items():
        device.stage(job)
        answers[kind] = {output.name: output.array for output in device.run(job).outputs}
    assert answers["cpu"]["digit"].tolist() == answers["cuda"]["digit"].tolist()
    assert np.allclose(answers["cpu"]["scores"], answers["cuda"]["scores"], atol=1e-4)
assert hosted.slots.staged_ahead == 3
"""

MEASURED = """
from benchmarks.worker_throughput import Comparison, Limits
from fabric.messages import LoaderSpec

spec = LoaderSpec(python="deploy.local.demo.digits_model:Digits", cuda_graphs=True)
compared = Comparison(spec, torch.device("cuda", 0), 2)
assert compared.has_graphs, compared.how
assert compared.rates(2, Limits(20, 1e9), 1).keys() == {"bare", "eager", "bare graphs", "graphs"}
assert compared.staged_part > 0.5
"""


@pytest.mark.parametrize(
    "part", [GRAPHS + COPIES, BESIDE, SERVED, MEASURED], ids=["operators", "beside", "served", "measured"]
)
def test_it_answers_and_refuses_as_a_gpu_would(part: str, tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.json"
    write_gpus(gpus, a100())
    env = os.environ | gpu_environment(gpus, has_cuda=True) | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    program = "import pytest, torch\n" + textwrap.dedent(part)
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
