"""Stages that are loaded each by itself: together the whole model, and each of them no more than its part."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.base import Part
from roles.gpu_worker.executors.cut import CutError
from roles.gpu_worker.executors.loaders.base import LoadedModel
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.stage_model import load_first, load_later
from tests.models.chain import BLOCKS, WIDTH
from tests.worker_builders import SteppingClock

CPU = torch.device("cpu")
CHAIN = LoaderSpec(python="tests.models.chain:Chain")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
HALF = LoaderSpec(
    zoo="transformers",
    arch="bert",
    sequence_length=8,
    dtype="bfloat16",
    config=tuple((key, json.dumps(value)) for key, value in {**SMALL, "vocab_size": 50}.items()),
)


@pytest.fixture(autouse=True)
def quiet_export() -> None:
    for name in ("torch", "torch.__trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def loaded(spec: LoaderSpec, stages: int) -> list[LoadedModel]:
    first, part = load_first(spec, CPU, stages, SteppingClock())
    later = [load_later(spec, CPU, Part(k, part.first_layers, part.digest)) for k in range(1, stages)]
    return [first, *later]


def run(stages: Sequence[LoadedModel], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.inference_mode():
        for stage in stages:
            assert {key: (value.dtype, value.shape) for key, value in stage.example.items()} == {
                key: (value.dtype, value.shape[1:]) for key, value in batch.items()
            }
            batch = {
                key: value.float() if value.dtype == torch.bfloat16 else value
                for key, value in stage.model.infer(batch).items()
            }
    return batch


def alive() -> int:
    """Numbers in parameters that somebody holds."""
    while gc.collect():  # what ends may let go of more
        pass
    return sum({id(one): one.numel() for one in gc.get_objects() if type(one) is nn.Parameter}.values())


@pytest.mark.parametrize("stages", [2, BLOCKS])
def test_stages_answer_together_what_the_whole_does_and_each_holds_its_own_part(stages: int) -> None:
    before = alive()
    whole = load_model(CHAIN, CPU)
    size = alive() - before
    batch = {"x": torch.randn(3, WIDTH)}
    with torch.inference_mode():
        expected = whole.model.infer(dict(batch))["y"]
    del whole
    first, part = load_first(CHAIN, CPU, stages, SteppingClock())
    own = [alive() - before]
    models = [first]
    for stage in range(1, stages):
        models.append(load_later(CHAIN, CPU, Part(stage, part.first_layers, part.digest)))
        own.append(alive() - before - sum(own))
    assert sum(own) == size
    assert max(own) <= (BLOCKS - stages + 1) * size // BLOCKS, "at most what leaves each other one a block"
    assert torch.allclose(run(models, batch)["y"], expected, rtol=0, atol=1e-5)


def test_half_precision_travels_between_stages_and_answers_the_same() -> None:
    ids = torch.randint(0, 50, (3, 8))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        expected = load_model(HALF, CPU).model.infer(dict(batch))["logits"]
    stages = loaded(HALF, 2)
    assert all(value.dtype != torch.bfloat16 for value in stages[1].example.values())
    assert torch.allclose(run(stages, batch)["logits"], expected, rtol=0, atol=1e-5)


def test_a_model_that_is_another_one_each_time_is_not_served_in_parts() -> None:
    restless = LoaderSpec(python="tests.models.chain:Restless")
    _, part = load_first(restless, CPU, 2, SteppingClock())
    with pytest.raises(CutError, match="other weights, or another structure, each time it is loaded"):
        load_later(restless, CPU, Part(1, part.first_layers, part.digest))


def test_a_model_whose_parts_answer_otherwise_is_not_served_in_parts() -> None:
    with pytest.raises(CutError, match="do not give the same 'y' as the whole: does it draw at random"):
        load_first(LoaderSpec(python="tests.models.chain:Moody"), CPU, 2, SteppingClock())


def test_the_user_says_where_stages_begin_and_for_how_many_gpus() -> None:
    at = LoaderSpec(python="tests.models.chain:Chain", stages=3, begin_at=("1", "4"))
    stages = loaded(at, 3)
    sizes = [sum(one.numel() for one in vars(stage.model)["_module"].parameters()) for stage in stages]
    block = WIDTH * WIDTH + WIDTH
    assert sizes == [block, 3 * block, block]
    with pytest.raises(CutError, match="says where 3 stages begin; it has 2 GPUs"):
        load_first(at, CPU, 2, SteppingClock())
