"""Train the demo's digit recogniser; writes the weights and the held-out images beside `deploy/local/demo`'s model.

Run it with `python examples/train_digits.py`; it takes about half a minute on one core. The same machine
and versions give the same files: one seed, one thread, deterministic kernels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from deploy.local.demo.digits_model import HELD_OUT, WEIGHTS, DigitsNet

SEED = 7
HELD_OUT_SHARE = 0.2
EPOCHS = 40
BATCH_SIZE = 32
SHIFT_CHANCE = 0.5  # of the training images move by one pixel: scans are not centred alike


def split(seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Training images and labels, held-out images and labels; images [n, 1, 8, 8] in 0..1."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    held_out = order[: round(HELD_OUT_SHARE * len(labels))]
    training = order[len(held_out) :]
    return images[training], labels[training], images[held_out], labels[held_out]


def shift(images: Tensor, draw: torch.Generator) -> Tensor:
    """Move the whole batch by at most one pixel each way, every other time."""
    if torch.rand((), generator=draw) >= SHIFT_CHANCE:
        return images
    down, right = (int(offset) for offset in torch.randint(0, 3, (2,), generator=draw))
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    return padded[:, :, down : down + 8, right : right + 8]


def train(images: Tensor, labels: Tensor) -> DigitsNet:
    """Adam with a cosine schedule."""
    draw = torch.Generator().manual_seed(SEED)
    net = DigitsNet()
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(labels), generator=draw).split(BATCH_SIZE):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(shift(images[chosen], draw)), labels[chosen])
            loss.backward()
            optimiser.step()
        schedule.step()
    return net.eval()


def main() -> None:
    """Train, report the held-out accuracy, write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT)
    options = parser.parse_args()

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    training_images, training_labels, images, labels = split(SEED)
    net = train(torch.from_numpy(training_images), torch.from_numpy(training_labels))
    with torch.inference_mode():
        right = net(torch.from_numpy(images)).argmax(dim=1) == torch.from_numpy(labels)
    print(f"held-out accuracy {100 * right.float().mean().item():.1f} % of {len(labels)} images")

    save_file(net.state_dict(), options.weights)
    np.savez_compressed(options.held_out, images=images, labels=labels)


if __name__ == "__main__":
    main()
