"""What a figure of a real device was measured on, for every log and every file of figures.

python -m benchmarks.device cuda        one line: GPU, driver, torch, date
"""

from __future__ import annotations

import datetime as dt
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from fabric.messages import LoaderSpec
from roles.node_agent.discovery import Nvml, NvmlUnavailable


def described(device: str) -> str:
    """The GPU's own name, driver, torch, and the date, without a CUDA context: that would be one beside those that are measured."""
    kind, _, number = device.partition(":")
    words = [device]
    if kind == "cuda":
        try:
            gpu = Nvml.open().describe(int(number or 0), kind)
            words = [f"{device}: {gpu.name}", f"driver {gpu.driver}"]
        except NvmlUnavailable as error:
            words = [device, f"driver unknown ({error})"]
    try:
        words.append(f"torch {version('torch')}")
    except PackageNotFoundError:
        words.append("no torch")
    return ", ".join([*words, dt.datetime.now(dt.UTC).date().isoformat()])


def loader_named(model: str, dtype: str = "float32") -> LoaderSpec:
    """As `tenuto profile` understands a model's name: ARCH, ZOO/ARCH, or the module:Class of somebody's own."""
    zoo, _, arch = model.rpartition("/")
    if ":" in arch:
        return LoaderSpec(python=model)
    return LoaderSpec(zoo=zoo or "torchvision", arch=arch, dtype=dtype)


def example_inputs(spec: LoaderSpec) -> dict[str, np.ndarray]:
    """One request's inputs; the model is loaded for that, on the CPU."""
    import torch  # noqa: PLC0415  it takes seconds, and emulated devices do without

    from roles.gpu_worker.executors.loaders.registry import load_model  # noqa: PLC0415  likewise

    return {key: value.numpy() for key, value in load_model(spec, torch.device("cpu")).example.items()}


if __name__ == "__main__":
    print(described(sys.argv[1]))
