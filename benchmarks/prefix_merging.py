"""Ten classifiers on one backbone, joint against separate, at batch 1 each: time, weights, and that answers agree.

Lines: answers within 1e-5, at least 5 times less weight memory, at least 2 times the throughput.

    python -m benchmarks.prefix_merging [--heads 10] [--turns 5] [--tokens 128] [--only resnet50]

Runs on the CPU with one thread. Every model has all weights of its own before they are merged, as fine-tuned copies have.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fabric.clock import MonotonicClock
from roles.gpu_worker.executors.loaders.torch_compat import declare_missing_operators
from roles.gpu_worker.executors.merging import Member, PrefixGroup
from roles.gpu_worker.executors.merging.prefix import TOLERANCE

MEMORY_LINE = 5
THROUGHPUT_LINE = 2


def resnet50(
    _: int,
) -> tuple[nn.Module, str, dict[str, Tensor], Callable[[nn.Module], Callable[..., object]]]:
    """A backbone with a head of 10 classes; the head's name, one request, and how it is run."""
    from torchvision import models  # noqa: PLC0415  only after the declaration

    net = models.resnet50(weights=None, num_classes=10).eval()
    return net, "fc", {"image": torch.zeros(3, 224, 224)}, lambda one: lambda rows: {"y": one(rows["image"])}


def bert(
    tokens: int,
) -> tuple[nn.Module, str, dict[str, Tensor], Callable[[nn.Module], Callable[..., object]]]:
    """The same for BERT with so many tokens."""
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415  see above

    net = BertForSequenceClassification(BertConfig()).eval()
    words = torch.arange(5, 5 + tokens)
    return (
        net,
        "classifier",
        {"ids": words, "mask": torch.ones_like(words)},
        lambda one: lambda rows: {"y": one(input_ids=rows["ids"], attention_mask=rows["mask"]).logits},
    )


BACKBONES = {"resnet50": resnet50, "bert": bert}


def weight_bytes(nets: list[nn.Module]) -> int:
    """Of storages, each once."""
    seen = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for net in nets
        for value in [*net.parameters(), *net.buffers()]
    }
    return sum(seen.values())


def took_ms(calls: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Median of each, after one to warm up; they take turns, so that what else the host does slows all of them."""
    clock = MonotonicClock()
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(1 + turns):
        for call, own in zip(calls, times, strict=True):
            began_ms = clock.now_ms()
            call()
            if turn:
                own.append(clock.now_ms() - began_ms)
    return [statistics.median(own) for own in times]


def measure(name: str, heads: int, turns: int, tokens: int) -> None:
    """One line."""
    torch.manual_seed(0)
    net, head_name, example, runner = BACKBONES[name](tokens)
    nets = [net]
    for _ in range(heads - 1):
        other = copy.deepcopy(net)
        getattr(other, head_name).reset_parameters()
        nets.append(other)
    runs = [runner(one) for one in nets]
    batches = {str(index): {key: value[None] for key, value in example.items()} for index in range(heads)}
    with torch.inference_mode():
        before = weight_bytes(nets)
        expected = [run(batches[str(index)])["y"] for index, run in enumerate(runs)]
        group = PrefixGroup({str(i): Member(one, runs[i], example) for i, one in enumerate(nets)})
        found = group.run(batches)
        wrong = max(float((found[str(i)]["y"] - value).abs().max()) for i, value in enumerate(expected))
        separate_ms, joint_ms = took_ms(
            (lambda: [run(batches[str(i)]) for i, run in enumerate(runs)], lambda: group.run(batches)), turns
        )
    gc.collect()
    after = weight_bytes(nets)
    print(
        f"{name}: {heads} heads, shared {group.merged[0]} to {group.merged[-1]}; weights {before / 2**20:.0f} -> "
        f"{after / 2**20:.0f} MiB ({before / after:.1f} x less), {separate_ms:.0f} -> {joint_ms:.0f} ms "
        f"({separate_ms / joint_ms:.2f} x), largest difference {wrong:.1e}"
    )
    lines = {
        f"answers within {TOLERANCE}": wrong <= TOLERANCE,
        f"{MEMORY_LINE} x less weight memory": before >= MEMORY_LINE * after,
        f"{THROUGHPUT_LINE} x the throughput": separate_ms >= THROUGHPUT_LINE * joint_ms,
    }
    for line, is_held in lines.items():
        print(f"  {line}: {'held' if is_held else 'NOT held'}")


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", choices=list(BACKBONES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    declare_missing_operators()
    for name in [given.only] if given.only else BACKBONES:
        measure(name, given.heads, given.turns, given.tokens)


if __name__ == "__main__":
    main()
