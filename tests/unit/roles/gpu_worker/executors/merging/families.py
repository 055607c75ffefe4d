"""Small nets for the tests of merging: layers in a row, tuned copies of them, and what they answer apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from roles.gpu_worker.executors.merging import Group, Member

WIDTH = 8
EXAMPLE = {"x": torch.zeros(3, WIDTH)}


class Layers(nn.Module):
    """Linear layers with functions between them, one of these in place, and a head."""

    def __init__(self, layers: int = 4, labels: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.drop = nn.Dropout()
        self.head = nn.Linear(WIDTH, labels)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu_().reshape(-1, 3, WIDTH) + 1
        out: Tensor = self.head(self.drop(x).mean(1))
        return out


class Pictures(nn.Module):
    """Convolutions with batch norms, and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, groups=6),
            nn.Conv2d(6, 10, 3, stride=2),
        )
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean((2, 3)))
        return out


def made(kind: type[nn.Module], seed: int, *args: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind(*args).eval()


def tuned(net: nn.Module, *own: str, seed: int = 7) -> nn.Module:
    """A copy, of which these modules have weights of their own."""
    other = copy.deepcopy(net)
    torch.manual_seed(seed)
    for name in own:
        for parameter in other.get_submodule(name).parameters():
            nn.init.normal_(parameter)
    return other


def member(net: nn.Module, example: Mapping[str, Tensor] = EXAMPLE) -> Member:
    return Member(net, lambda rows: {"y": net(rows["x"])}, example)


def members(*nets: nn.Module, example: Mapping[str, Tensor] = EXAMPLE) -> dict[str, Member]:
    return {str(number): member(net, example) for number, net in enumerate(nets)}


def batch(count: int, seed: int, example: Mapping[str, Tensor] = EXAMPLE) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {key: torch.randn(count, *value.shape, generator=draw) for key, value in example.items()}


def assert_as_apart(
    group: Group, apart: list[nn.Module], *counts: int, example: Mapping[str, Tensor] = EXAMPLE
) -> None:
    """The group answers what these nets, copies from before it was made, answer one after the other."""
    batches = {str(number): batch(count, number, example) for number, count in enumerate(counts)}
    with torch.inference_mode():
        found = group.run(batches)
        for number, (net, count) in enumerate(zip(apart, counts, strict=True)):
            assert (str(number) in found) == bool(count)
            if count:
                wanted = net(batches[str(number)]["x"])
                torch.testing.assert_close(found[str(number)]["y"], wanted, rtol=1e-5, atol=1e-5)


def held(*nets: nn.Module) -> int:
    """How many different tensors their parameters are."""
    return len({one.data_ptr() for net in nets for one in net.parameters()})
