"""Order of kernels and need of SMs against the kernel lists that Orion's authors traced on a V100."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.estimator.zoo import graphs_of
from fabric.messages import LoaderSpec
from profiles.estimator.estimate import shipped_estimator
from profiles.occupancy import Kernel, sm_percent, sms_needed
from profiles.store import shipped_data

SM_COUNT = 80
BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "attn_implementation": "eager",
}
MODELS = {
    "resnet50_4_fwd": (LoaderSpec(zoo="torchvision", arch="resnet50"), 4),
    "mobilenetv2_4_fwd": (LoaderSpec(zoo="torchvision", arch="mobilenet_v2"), 4),
    "resnet101_4_fwd": (LoaderSpec(zoo="torchvision", arch="resnet101"), 4),
    "bert_2_fwd": (
        LoaderSpec(
            zoo="transformers",
            arch="bert",
            sequence_length=384,
            config=tuple((key, json.dumps(value)) for key, value in BERT_LARGE.items()),
        ),
        2,
    ),
    "transformer_xl_4_fwd": (LoaderSpec(python="benchmarks.estimator.orion:TransformerXL"), 4),
}
KINDS = (  # the first word that a name has says its kind
    ("conv", ("conv",)),
    ("norm", ("batchnorm", "batch_norm", "layer_norm")),
    ("product", ("sgemm", "gemmsn", "linear", "addmm", "bmm", "mm")),
    ("softmax", ("softmax",)),
    ("pool", ("pool", "reduce")),
)
OTHER = "elementwise"


def on_orions_models() -> list[dict[str, Any]]:
    """A row a model; the time-weighted need of SMs leaves gaps out on both sides."""
    estimator = shipped_estimator("v100-sxm2")
    listed = shipped_data("orion_kernel_profiles_v100")["models"]
    rows = []
    for name, (loader, batch_size) in MODELS.items():
        (graph,) = graphs_of(loader, [batch_size])
        kernels = estimator.estimate(graph).kernels
        traced = listed[name]["kernels"]
        limits = estimator.gpu.limits
        of_trace = [(kind_of(row[0]), min(100.0, 100 * row[2] / SM_COUNT), row[3]) for row in traced]
        ours = [(kind_of(one.name), sm_percent(one, limits), one.duration_ms) for one in kernels]
        rows.append({"model": name, **_compared(of_trace, ours, kernels, traced)})
        print(rows[-1], flush=True)
    return rows


def _compared(
    of_trace: Sequence[tuple[str, float, float]],
    ours: Sequence[tuple[str, float, float]],
    kernels: Sequence[Kernel],
    traced: Sequence[Sequence[Any]],
) -> dict[str, Any]:
    limits = shipped_estimator("v100-sxm2").gpu.limits
    pairs = longest_common([one[0] for one in of_trace], [one[0] for one in ours])
    needed = [(traced[a][2], sms_needed(kernels[b], limits)) for a, b in pairs]
    return {
        "kernels": len(of_trace),
        "operators": len(ours),
        "in_order_percent": 100 * 2 * len(pairs) / (len(of_trace) + len(ours)),
        "rank_correlation": float(spearmanr(*zip(*needed, strict=True)).statistic),
        "sm_difference": float(np.median([abs(of_trace[a][1] - ours[b][1]) for a, b in pairs])),
        "measured_sm": float(np.average([one[1] for one in of_trace], weights=[one[2] for one in of_trace])),
        "sm": float(np.average([one[1] for one in ours], weights=[one[2] for one in ours])),
        "measured_ms": sum(one[2] for one in of_trace) / 1e6,
        "ms": sum(one[2] for one in ours),
    }


def longest_common(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of places of a longest sequence that both have in this order."""
    best = np.zeros((len(left) + 1, len(right) + 1), dtype=int)
    for a in reversed(range(len(left))):
        for b in reversed(range(len(right))):
            same = left[a] == right[b]
            best[a, b] = best[a + 1, b + 1] + 1 if same else max(best[a + 1, b], best[a, b + 1])
    pairs = []
    a = b = 0
    while a < len(left) and b < len(right):
        if left[a] == right[b]:
            pairs.append((a, b))
            a, b = a + 1, b + 1
        elif best[a + 1, b] >= best[a, b + 1]:
            a += 1
        else:
            b += 1
    return pairs


def kind_of(name: str) -> str:
    """Of a kernel's or an operator's name."""
    small = name.lower()
    return next((kind for kind, words in KINDS if any(word in small for word in words)), OTHER)


class TransformerXL:
    """NVIDIA's base configuration (16 layers, width 512, 8 heads, 192 tokens after a memory of 192), written down here."""

    def load(self, device: str) -> None:
        """Random weights."""
        self._net = _Net().eval().to(device)

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """States of the last layer, and which words they are most likely to be."""
        return {"states": self._net(batch["states"].transpose(0, 1).contiguous())}

    def example(self) -> dict[str, Tensor]:
        """Embedded tokens."""
        return {"states": torch.zeros(_Net.TOKENS, _Net.WIDTH)}


class _Net(nn.Module):
    LAYERS, WIDTH, HEADS, INNER, TOKENS, MEMORY = 16, 512, 8, 2048, 192, 192

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(self.LAYERS))

    def forward(self, states: Tensor) -> Tensor:
        """States [tokens, batch, width]."""
        memory = states.new_zeros(self.MEMORY, *states.shape[1:])
        positions = states.new_zeros(self.TOKENS + self.MEMORY, self.WIDTH)
        mask = (
            states.new_ones(self.TOKENS, self.TOKENS + self.MEMORY)
            .triu(1 + self.MEMORY)
            .bool()[..., None, None]
        )
        for layer in self.layers:
            states = layer(states, memory, positions, mask)
        return states


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, inner = _Net.WIDTH, _Net.INNER
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.position = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.content_bias = nn.Parameter(torch.zeros(_Net.HEADS, width // _Net.HEADS))
        self.position_bias = nn.Parameter(torch.zeros(_Net.HEADS, width // _Net.HEADS))

    def forward(self, states: Tensor, memory: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        tokens, batch, width = states.shape
        heads = (_Net.HEADS, width // _Net.HEADS)
        q, k, v = self.qkv(torch.cat([memory, states])).chunk(3, dim=-1)
        q = q[-tokens:].view(tokens, batch, *heads)
        k, v = (one.reshape(one.size(0), batch, *heads) for one in (k, v))
        r = self.position(positions).view(-1, *heads)
        content = torch.einsum("ibnd,jbnd->ijbn", q + self.content_bias, k)
        shifted = torch.einsum("ibnd,jnd->ijbn", q + self.position_bias, r)
        padded = torch.cat([shifted.new_zeros(tokens, 1, batch, heads[0]), shifted], dim=1)
        shifted = padded.view(padded.size(1), tokens, batch, heads[0])[1:].view_as(shifted)
        scores = (content + shifted).mul_(heads[1] ** -0.5).float().masked_fill(mask, -65504)
        weights = functional.softmax(scores, dim=1)
        mixed = torch.einsum("ijbn,jbnd->ibnd", weights, v).reshape(tokens, batch, width)
        states = self.norms[0](states + self.out(mixed))
        return self.norms[1](states + self.narrow(functional.relu(self.widen(states))))
