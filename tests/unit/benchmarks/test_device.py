from __future__ import annotations

import datetime as dt
import json
from importlib.metadata import version

import numpy as np
import pytest

from benchmarks.device import described, example_inputs, loader_named
from benchmarks.figures import Figures, read
from fabric.messages import LoaderSpec


def test_a_device_is_told_with_torch_and_the_date() -> None:
    today = dt.datetime.now(dt.UTC).date()
    device, torch, date = described("cpu").split(", ")
    assert (device, torch) == ("cpu", f"torch {version('torch')}")
    assert dt.timedelta() <= dt.datetime.now(dt.UTC).date() - dt.date.fromisoformat(date) <= dt.timedelta(1)
    assert today <= dt.date.fromisoformat(date)


def test_figures_keep_the_device_that_they_are_of() -> None:
    figures = Figures("x", device="cuda: NVIDIA H200, driver 1, torch 2, 2026-01-31", load_average=0.5)
    assert read(json.loads(json.dumps(figures.as_json()))) == figures
    assert figures.conditions == "load average 0.50; cuda: NVIDIA H200, driver 1, torch 2, 2026-01-31"


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("resnet50", LoaderSpec(zoo="torchvision", arch="resnet50", dtype="float16")),
        ("transformers/bert", LoaderSpec(zoo="transformers", arch="bert", dtype="float16")),
        ("package.module:Class", LoaderSpec(python="package.module:Class")),
    ],
)
def test_a_model_is_named_as_the_profiler_names_it(name: str, spec: LoaderSpec) -> None:
    assert loader_named(name, "float16") == spec


def test_a_request_is_the_models_own_example() -> None:
    inputs = example_inputs(LoaderSpec(python="deploy.local.demo.digits_model:Digits"))
    assert {key: (value.shape, value.dtype) for key, value in inputs.items()} == {
        "image": ((1, 8, 8), np.dtype(np.float32))
    }
