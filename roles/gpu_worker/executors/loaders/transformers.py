"""transformers' sequence classifiers: from a type's configuration, a local directory or, when asked, the hub.

The facts about single architectures below were found by running them: GPT-2 and its kin classify the last token
that is no padding, so they need to know what padding is; T5 starts its decoder with a token it must be told;
RoBERTa counts positions from after the padding token; Bloom's vocabulary of 250 880 would be most of a small model.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fabric.messages import LoaderSpec
from profiles.profilers.memory import is_out_of_memory
from roles.gpu_worker.executors.loaders.base import (
    LoadedModel,
    UnknownModel,
    WeightsError,
    dtype_named,
    reduced,
)
from roles.gpu_worker.executors.loaders.seeded import Seeded
from roles.gpu_worker.executors.loaders.torch_compat import declare_missing_operators

_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "bloom": {"vocab_size": 32_768},
    "t5": {"decoder_start_token_id": 0},
    "mt5": {"decoder_start_token_id": 0},
}
_POSITIONS_AFTER_PADDING: Final = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "camembert",
        "xlm-roberta-xl",
        "roberta-prelayernorm",
        "data2vec-text",
        "longformer",
    }
)
# What a checkpoint without a classification head lacks. Anything else that is missing is another model's.
_HEADS: Final = (
    "classifier",
    "score",
    "pre_classifier",
    "classification_head",
    "logits_proj",
    "sequence_summary",
    "pooler",
    "bert.pooler",
)
# `load` casts. With another one transformers would make it the default dtype of the whole process for as long as it
# builds the model: what is served meanwhile would make its tensors in it.
_BUILT_IN: Final = torch.float32
_TOKEN: Final = 5  # of the example: above the special tokens of every vocabulary we know


class SequenceClassifier:
    """`input_ids` and `attention_mask`, int64 [tokens] -> `logits` [labels], or `indices` and `scores`."""

    def __init__(
        self, net: nn.Module, config: Any, tokens: int, top_k: int | None, dtype: torch.dtype
    ) -> None:
        self._net = net
        self._config = config
        self._tokens = tokens
        self._top_k = top_k
        self._dtype = dtype

    def load(self, device: str) -> None:
        """Move the weights."""
        self._net.eval().to(device=device, dtype=self._dtype)

    def infer(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Logits [n, labels], or the k best."""
        out = self._net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        logits: Tensor = out.logits
        return reduced(logits, self._top_k)

    def example(self) -> dict[str, Tensor]:
        """Words up to the last token, which ends the sequence where the model has such a token."""
        vocabulary = int(self._config.vocab_size)
        ids = torch.full((self._tokens,), min(_TOKEN, vocabulary - 1), dtype=torch.int64)
        end = self._config.eos_token_id
        if isinstance(end, int) and 0 <= end < vocabulary:
            ids[-1] = end
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def load_transformers(spec: LoaderSpec, device: torch.device) -> LoadedModel:
    """A sequence classifier. Raises UnknownModel and WeightsError; the hub is asked only if `from_hub` says so."""
    declare_missing_operators()
    # HF_HUB_OFFLINE is not set: it is read once in a process, which may load a model from the hub later. It is told call by call.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    with Seeded(spec.seed):
        net, config = _pretrained(spec) if spec.weights is not None or spec.from_hub else _from_type(spec)
    model = SequenceClassifier(net, config, spec.sequence_length, spec.top_k, dtype_named(spec.dtype))
    model.load(str(device))
    bounds = {"input_ids": (0, int(config.vocab_size) - 1), "attention_mask": (0, 1)}
    return LoadedModel(model, model.example(), None, bounds, may_capture=spec.cuda_graphs is not False)


def _from_type(spec: LoaderSpec) -> tuple[nn.Module, Any]:
    """Random weights of a type's default configuration, changed by the file's `config`."""
    from transformers import (  # noqa: PLC0415  it takes seconds, and only after the declaration
        CONFIG_MAPPING,
        AutoConfig,
        AutoModelForSequenceClassification,
    )

    kind = spec.arch or ""
    known = sorted(CONFIG_MAPPING.keys())
    if kind not in known:
        close = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownModel(f"transformers has no type {kind!r}{hint}")
    given = {key: json.loads(value) for key, value in spec.config}
    try:
        config = AutoConfig.for_model(kind, **(_DEFAULTS.get(kind, {}) | given))
        _make_whole(config, spec.sequence_length, has_positions="max_position_embeddings" in given)
        net: nn.Module = AutoModelForSequenceClassification.from_config(config, dtype=_BUILT_IN)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnknownModel(f"transformers cannot build a classifier of type {kind!r}: {error}") from error
    return net, config


def _pretrained(spec: LoaderSpec) -> tuple[nn.Module, Any]:
    """From a directory with config.json and safetensors, or from the hub. Other files are not even opened."""
    from transformers import AutoConfig, AutoModelForSequenceClassification  # noqa: PLC0415  see above

    place = spec.weights or spec.arch or ""
    if spec.weights is not None:
        if not Path(place).is_dir():
            raise WeightsError(f"there is no directory {place}")
        if not (Path(place) / "config.json").is_file():
            raise WeightsError(f"{place} has no config.json: it is no model's directory")
    is_local = not spec.from_hub
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=is_local)
        _make_whole(config, spec.sequence_length, has_positions=True)
        net, loading = AutoModelForSequenceClassification.from_pretrained(
            place,
            config=config,
            dtype=_BUILT_IN,
            local_files_only=is_local,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # a broken directory may raise anything in its readers
        if isinstance(error, UnknownModel) or is_out_of_memory(error):
            raise
        raise WeightsError(
            f"{place} cannot be loaded: its files are missing, truncated or of another model: {error}"
        ) from error
    strange = [key for key in sorted(loading["missing_keys"]) if not key.startswith(_HEADS)]
    if strange:
        raise WeightsError(
            f"{place} holds the weights of another model: {len(strange)} are missing, such as {strange[0]}"
        )
    module: nn.Module = net
    return module, config


def _make_whole(config: Any, tokens: int, *, has_positions: bool) -> None:
    """Fill in what classification needs and types leave open; UnknownModel where a sequence is too long."""
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise UnknownModel(f"a {config.model_type} does not take tokens: only text classifiers are loaded")
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = end if isinstance(end, int) and 0 <= end < vocabulary else 0
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return  # positions are relative: any length goes
    reserved = config.pad_token_id + 1 if config.model_type in _POSITIONS_AFTER_PADDING else 0
    if positions >= tokens + reserved:
        return
    if has_positions:
        raise UnknownModel(
            f"sequence_length is {tokens}, but this {config.model_type} has {positions - reserved} positions"
        )
    config.max_position_embeddings = tokens + reserved
