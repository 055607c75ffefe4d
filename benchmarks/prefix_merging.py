"""Ten classifiers of one architecture, run together in each way of `models[].merge`, at batch 1 each, against one after the other.

Time, weights, and that answers agree, for three kinds of families: `heads` differ in the last layer, `tuned` in the first and the last one, and
`unrelated` in all. Lines for `heads`: answers within 1e-5, at least 5 times less weight memory, at least 2 times the throughput.

    python -m benchmarks.prefix_merging [--heads 10] [--turns 5] [--tokens 128] [--only resnet50] [--merge operators] [--family heads]

Runs on the CPU with one thread. Every model has all weights of its own before they are merged, as fine-tuned copies have. One kernel
keeps a core busy already, so that what is gained is memory traffic and launches; to have twice the throughput of ResNet50 is impossible there.
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
from fabric.messages import MERGES
from roles.gpu_worker.executors.loaders.torch_compat import declare_missing_operators
from roles.gpu_worker.executors.merging import GROUPS, CannotMerge, Member
from roles.gpu_worker.executors.merging.base import TOLERANCE
from roles.gpu_worker.executors.merging.grouping import held_bytes

MEMORY_LINE = 5
THROUGHPUT_LINE = 2
FAMILIES = ("heads", "tuned", "unrelated")


def resnet50(
    _: int,
) -> tuple[nn.Module, tuple[str, str], dict[str, Tensor], Callable[[nn.Module], Callable[..., object]]]:
    """A backbone with a head of 10 classes; the names of its first layer and its head, one request, and how it is run."""
    from torchvision import models  # noqa: PLC0415  only after the declaration

    net = models.resnet50(weights=None, num_classes=10)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = (
                None  # the mean of what it has seen: once, so that its answers are of the usual size
            )
    with torch.no_grad():
        net.train()(torch.randn(4, 3, 224, 224))
    net.eval()
    return (
        net,
        ("conv1", "fc"),
        {"image": torch.zeros(3, 224, 224)},
        lambda one: lambda rows: {"y": one(rows["image"])},
    )


def bert(
    tokens: int,
) -> tuple[nn.Module, tuple[str, str], dict[str, Tensor], Callable[[nn.Module], Callable[..., object]]]:
    """The same for BERT with so many tokens."""
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415  see above

    net = BertForSequenceClassification(BertConfig()).eval()
    words = torch.arange(5, 5 + tokens)
    return (
        net,
        ("bert.embeddings.word_embeddings", "classifier"),
        {"ids": words, "mask": torch.ones_like(words)},
        lambda one: lambda rows: {"y": one(input_ids=rows["ids"], attention_mask=rows["mask"]).logits},
    )


BACKBONES = {"resnet50": resnet50, "bert": bert}


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


def family(net: nn.Module, kind: str, ends: tuple[str, str], heads: int) -> list[nn.Module]:
    """The net and copies of it, of which what the kind of family says has weights of its own."""
    first, last = ends
    own = {"heads": [last], "tuned": [first, last], "unrelated": [""]}[kind]
    nets = [net]
    for _ in range(heads - 1):
        other = copy.deepcopy(net)
        for name in own:
            for module in other.get_submodule(name).modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        nets.append(other)
    return nets


def measure(name: str, kind: str, merge: str, given: argparse.Namespace) -> None:
    """A line."""
    torch.manual_seed(0)
    net, ends, example, runner = BACKBONES[name](given.tokens)
    nets = family(net, kind, ends, given.heads)
    runs = [runner(one) for one in nets]
    batches = {str(index): {key: value[None] for key, value in example.items()} for index in range(len(nets))}
    told = f"{name}, {kind}, {merge}:"
    with torch.inference_mode():
        before = held_bytes(nets)
        expected = [run(batches[str(index)])["y"] for index, run in enumerate(runs)]
        try:
            group = GROUPS[merge]({str(i): Member(one, runs[i], example) for i, one in enumerate(nets)})
        except CannotMerge as error:
            print(f"{told} one after the other: {error}", flush=True)
            return
        found = group.run(batches)
        wrong = max(float((found[str(i)]["y"] - value).abs().max()) for i, value in enumerate(expected))
        separate_ms, joint_ms = took_ms(
            (lambda: [run(batches[str(i)]) for i, run in enumerate(runs)], lambda: group.run(batches)),
            given.turns,
        )
    gc.collect()
    after = held_bytes(nets)
    print(
        f"{told} {len(group.merged)} modules together, {group.merged[0]} to {group.merged[-1]}; weights {before / 2**20:.0f} -> "
        f"{after / 2**20:.0f} MiB ({before / after:.1f} x less), {separate_ms:.0f} -> {joint_ms:.0f} ms "
        f"({separate_ms / joint_ms:.2f} x), largest difference {wrong:.1e}",
        flush=True,
    )
    if kind != "heads":
        return
    lines = {
        f"answers within {TOLERANCE}": wrong <= TOLERANCE,
        f"{MEMORY_LINE} x less weight memory": before >= MEMORY_LINE * after,
        f"{THROUGHPUT_LINE} x the throughput": separate_ms >= THROUGHPUT_LINE * joint_ms,
    }
    for line, is_held in lines.items():
        print(f"  {line}: {'held' if is_held else 'NOT held'}", flush=True)


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", choices=list(BACKBONES))
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--merge", choices=MERGES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    declare_missing_operators()
    for name in [given.only] if given.only else BACKBONES:
        for kind in [given.family] if given.family else FAMILIES:
            for merge in [given.merge] if given.merge else MERGES:
                measure(name, kind, merge, given)


if __name__ == "__main__":
    main()
