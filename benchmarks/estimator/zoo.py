"""The models of the thesis' Table A.1 and of Orion's kernel lists, as operator graphs."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fabric.messages import LoaderSpec
from profiles.estimator.graph import OperatorGraph
from profiles.profilers.operator_graph import fake_tensors, operator_graph
from roles.gpu_worker.executors.loaders.registry import load_model

TOKENS = 512
BLOOM_560 = {"vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24, "n_head": 16}
XLNET_BASE = {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
LOADERS = {
    **{
        name: LoaderSpec(zoo="torchvision", arch=name)
        for name in (
            "alexnet",
            "densenet121",
            "efficientnet_b7",
            "inception_v3",
            "mobilenet_v2",
            "resnet50",
            "resnext50_32x4d",
            "vgg19",
        )
    },
    "bert": LoaderSpec(zoo="transformers", arch="bert", sequence_length=TOKENS),
    "gpt2": LoaderSpec(zoo="transformers", arch="gpt2", sequence_length=TOKENS),
    "bloom_560": LoaderSpec(
        zoo="transformers",
        arch="bloom",
        sequence_length=TOKENS,
        config=tuple((key, json.dumps(value)) for key, value in BLOOM_560.items()),
    ),
    "xlnet": LoaderSpec(
        zoo="transformers",
        arch="xlnet",
        sequence_length=TOKENS,
        config=tuple((key, json.dumps(value)) for key, value in XLNET_BASE.items()),
    ),
    "t5": LoaderSpec(python="benchmarks.estimator.zoo:T5"),
}


class T5:
    """t5-small's encoder and decoder: transformers' classifier around them looks at values, so it cannot be traced."""

    def load(self, device: str) -> None:
        """Random weights of the default configuration, which is t5-small's."""
        from transformers import T5Config, T5Model  # noqa: PLC0415  it takes seconds

        self._net = T5Model(T5Config(decoder_start_token_id=0)).eval().to(device)

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The decoder sees the same tokens, as in the classifier."""
        ids = batch["input_ids"]
        out: Any = self._net(input_ids=ids, attention_mask=batch["attention_mask"], decoder_input_ids=ids)
        return {"states": out.last_hidden_state[:, -1]}

    def example(self) -> dict[str, Tensor]:
        """Tokens."""
        ids = torch.full((TOKENS,), 5, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def graphs(model: str, batch_sizes: Sequence[int]) -> Iterator[OperatorGraph]:
    """One a batch size. The model is loaded on the CPU, and never run there with these batches."""
    yield from graphs_of(LOADERS[model], batch_sizes)


def graphs_of(loader: LoaderSpec, batch_sizes: Sequence[int]) -> Iterator[OperatorGraph]:
    """The same of any loader."""
    loaded = load_model(loader, torch.device("cpu"))
    for batch_size in batch_sizes:
        with fake_tensors():
            graph = operator_graph(loaded.model.infer, loaded.example, batch_size)
        yield graph
    del loaded
    gc.collect()
