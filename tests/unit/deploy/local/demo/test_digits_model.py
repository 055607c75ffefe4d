"""The demo's model: its committed weights on its held-out images."""

from __future__ import annotations

import numpy as np
import torch

from deploy.local.demo.digits_model import HELD_OUT, WEIGHTS
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.loaders.registry import load_model


def test_the_committed_weights_recognise_the_held_out_digits() -> None:
    loaded = load_model(LoaderSpec(python="deploy.local.demo.digits_model:Digits"), torch.device("cpu"))
    with np.load(HELD_OUT) as held_out:
        images, labels = held_out["images"], held_out["labels"]
    assert images.shape == (359, 1, 8, 8)
    assert images.dtype == np.float32
    assert 0 <= images.min() < images.max() <= 1
    with torch.inference_mode():
        outputs = loaded.model.infer({"image": torch.from_numpy(images)})
    digits, scores = outputs["digit"], outputs["scores"]
    assert (digits.dtype, digits.shape) == (torch.int64, (359,))
    assert (scores.dtype, scores.shape) == (torch.float32, (359, 10))
    assert (digits.numpy() == labels).mean() >= 0.98


def test_the_weights_are_small_enough_to_be_committed() -> None:
    assert WEIGHTS.stat().st_size < 300_000
