"""Sequence classifiers of every family, made small: loaded, run, and refused with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabric.clock import MonotonicClock
from fabric.link import NamedTensor
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.base import JobPart
from roles.gpu_worker.executors.hosted import DeviceReplica
from roles.gpu_worker.executors.loaders.base import UnknownModel, WeightsError
from roles.gpu_worker.executors.loaders.registry import load_model

CPU = torch.device("cpu")
TOKENS = 16
SMALL: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "roberta": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
}
VOCABULARY = 60_000  # over every family's special tokens


def small(kind: str, tokens: int = TOKENS, top_k: int | None = None, **config: Any) -> LoaderSpec:
    whole = {"vocab_size": VOCABULARY, **SMALL.get(kind, {}), **config}
    pairs = tuple((key, json.dumps(value)) for key, value in whole.items())
    return LoaderSpec(zoo="transformers", arch=kind, sequence_length=tokens, top_k=top_k, config=pairs)


def hosted(spec: LoaderSpec) -> DeviceReplica:
    model = DeviceReplica("m", load_model(spec, CPU), 2, CPU, MonotonicClock())
    model.warm(60_000.0)
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT as people save it."""
    path = tmp_path_factory.mktemp("bert")
    load_model(small("bert", vocab_size=100), CPU).model._net.save_pretrained(path)  # type: ignore[attr-defined]  # the wrapper's own
    return path


@pytest.mark.parametrize("kind", SMALL)
def test_every_family_classifies_and_hears_who_said_it(kind: str) -> None:
    model = hosted(small(kind, num_labels=3))
    assert [(info.name, info.dtype, info.shape) for info in model.inputs] == [
        ("input_ids", "int64", (TOKENS,)),
        ("attention_mask", "int64", (TOKENS,)),
    ]
    assert [(info.name, info.shape) for info in model.outputs] == [("logits", (3,))]


ASKED = """
import json, socket, sys, time
from pathlib import Path

asked = []

def refuse(*address, **named):
    asked.append(address[0])
    raise OSError("there is no network here")

socket.getaddrinfo = refuse
socket.socket.connect = lambda _, address: refuse(address)
time.sleep = lambda _: None  # the hub tries again five times

import torch
from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.loaders.base import WeightsError
from roles.gpu_worker.executors.loaders.registry import load_model

cpu = torch.device("cpu")
config = tuple((key, json.dumps(value)) for key, value in json.loads(sys.argv[2]).items())
by_type = LoaderSpec(zoo="transformers", arch="bert", sequence_length=16, config=config)
for local in (by_type, LoaderSpec(zoo="transformers", weights=sys.argv[1], sequence_length=16)):
    load_model(local, cpu)
assert not asked, asked
for local in (LoaderSpec(zoo="transformers", weights=sys.argv[1] + "-gone"), by_type):
    try:
        load_model(local, cpu)
    except WeightsError:
        pass
assert not asked, asked
try:
    load_model(LoaderSpec(zoo="transformers", arch="nobody/nothing", from_hub=True), cpu)
except WeightsError:
    pass
assert asked
"""


def test_the_hub_is_asked_by_a_model_that_wants_it_and_no_other_whichever_comes_first(
    directory: Path, tmp_path: Path
) -> None:
    """In a process of its own: what the hub's package reads as it is imported stays."""
    config = json.dumps({"vocab_size": 100, **SMALL["bert"]})
    known = {key: value for key, value in os.environ.items() if "OFFLINE" not in key}
    env = {**known, "HF_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[5])}
    command = [sys.executable, "-c", ASKED, str(directory), config]
    ended = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3_000:]


def test_answers_are_those_of_the_plain_call_bit_for_bit() -> None:
    spec = small("bert", vocab_size=100)
    loaded = load_model(spec, CPU)
    ids = torch.randint(5, 99, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    rows = [
        {"input_ids": row.numpy(), "attention_mask": seen.numpy()}
        for row, seen in zip(ids, mask, strict=True)
    ]
    (logits,) = DeviceReplica("m", loaded, 2, CPU, MonotonicClock()).run(rows)
    with torch.inference_mode():
        plain = loaded.model._net(input_ids=ids, attention_mask=mask).logits  # type: ignore[attr-defined]  # the wrapper's own
    assert np.array_equal(logits.array, plain.numpy())


def test_a_token_that_the_model_does_not_have_is_refused_alone() -> None:
    model = hosted(small("bert", vocab_size=100))

    def row(token: int) -> list[NamedTensor]:
        ids = np.full(TOKENS, token, np.int64)
        return [NamedTensor("input_ids", ids), NamedTensor("attention_mask", np.ones_like(ids))]

    outputs, rejected = model.run_parts([JobPart(3, [*row(7), *row(100), *row(-1)])])
    assert outputs[0].array.shape == (1, 2)
    assert [each.reason for each in rejected] == [
        "input 'input_ids' holds 100 to 100, not 0 to 99",
        "input 'input_ids' holds -1 to -1, not 0 to 99",
    ]


def test_positions_are_made_to_fit_and_never_fewer_than_asked_for() -> None:
    """RoBERTa counts from after its padding token 1: 512 tokens need 514 positions."""
    long = load_model(small("roberta", tokens=512), CPU).model
    assert long._net.config.max_position_embeddings == 514  # type: ignore[attr-defined]  # the wrapper's own
    with pytest.raises(UnknownModel, match="sequence_length is 16, but this bert has 8 positions"):
        load_model(small("bert", max_position_embeddings=8), CPU)


def test_bloom_is_not_mostly_vocabulary() -> None:
    pairs = tuple((key, json.dumps(value)) for key, value in SMALL["bloom"].items())
    loaded = load_model(LoaderSpec(zoo="transformers", arch="bloom", sequence_length=8, config=pairs), CPU)
    assert loaded.bounds["input_ids"] == (0, 32_767)


def test_a_local_directory_is_loaded_with_its_weights(directory: Path) -> None:
    spec = LoaderSpec(zoo="transformers", weights=str(directory), sequence_length=TOKENS, seed=5)
    batch = {key: value.unsqueeze(0) for key, value in load_model(spec, CPU).example.items()}
    with torch.inference_mode():
        saved = load_model(spec, CPU).model.infer(batch)["logits"]
        drawn = load_model(small("bert", vocab_size=100), CPU).model.infer(batch)["logits"]
    assert torch.equal(saved, drawn)


def test_a_directory_that_is_missing_empty_truncated_or_of_another_model_is_named(
    directory: Path, tmp_path: Path
) -> None:
    def of(path: Path) -> LoaderSpec:
        return LoaderSpec(zoo="transformers", weights=str(path), sequence_length=TOKENS)

    with pytest.raises(WeightsError, match=r"there is no directory .*gone"):
        load_model(of(tmp_path / "gone"), CPU)
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        load_model(of(tmp_path), CPU)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(WeightsError, match="missing, truncated or of another model"):
        load_model(of(tmp_path), CPU)
    whole = (directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="missing, truncated or of another model"):
        load_model(of(tmp_path), CPU)
    load_model(small("distilbert", vocab_size=100), CPU).model._net.save_pretrained(tmp_path)  # type: ignore[attr-defined]  # the wrapper's own
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(WeightsError, match="of another model"):
        load_model(of(tmp_path), CPU)


def test_a_type_that_does_not_exist_or_does_not_classify_text_is_explained() -> None:
    with pytest.raises(UnknownModel, match="no type 'brt'; did you mean 'bert'"):
        load_model(LoaderSpec(zoo="transformers", arch="brt"), CPU)
    with pytest.raises(UnknownModel, match=r"only text classifiers|cannot build a classifier"):
        load_model(LoaderSpec(zoo="transformers", arch="vit"), CPU)
    with pytest.raises(UnknownModel, match="cannot build a classifier of type 'bert'"):
        load_model(small("bert", hidden_size=33), CPU)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "big"},
        {"hidden_act": "nope"},
        {"dtype": "float99"},
        {"model_type": 5},
        {"num_attention_heads": 0},
    ],
)
def test_a_directory_whose_configuration_is_wrong_is_named(
    change: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((directory / "config.json").read_text()) | change)
    )
    with pytest.raises(WeightsError, match=f"{tmp_path} cannot be loaded"):
        load_model(LoaderSpec(zoo="transformers", weights=str(tmp_path), sequence_length=TOKENS), CPU)
