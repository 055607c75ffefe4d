"""What tests of `benchmarks/peers` stand on."""

from __future__ import annotations

from benchmarks.peers.cases import Inputs, RealCase, ServedModel


def a_real_case(*inputs: Inputs, slo_ms: float = 25.0) -> RealCase:
    """Models of which a batch of b takes 1 + b ms, up to 16, and 2 + b at peers; nothing is loaded."""
    exec_ms = {size: 1.0 + size for size in range(1, 17)}
    peer_ms = {size: 2.0 + size for size in range(1, 17)}
    loader = {"zoo": "torchvision", "arch": "resnet18"}
    served = [
        ServedModel(f"model{place}", loader, one, exec_ms, peer_ms, 800.0) for place, one in enumerate(inputs)
    ]
    return RealCase(1, len(served), slo_ms, device="cpu", served=tuple(served))
