"""A load runs beside what is served: no loader changes what torch keeps for the whole process, not even for a moment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fabric.messages import LoaderSpec
from roles.gpu_worker.executors.loaders.registry import load_model
from roles.gpu_worker.executors.loaders.torch_compat import declare_missing_operators

CPU = torch.device("cpu")
MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"
BERT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def bert(**config: Any) -> LoaderSpec:
    pairs = tuple((key, json.dumps(value)) for key, value in {**BERT, **config}.items())
    return LoaderSpec(zoo="transformers", arch="bert", sequence_length=16, config=pairs, seed=3)


def zoo(arch: str, **options: Any) -> LoaderSpec:
    return LoaderSpec(zoo="torchvision", arch=arch, seed=3, **options)


def process_state(*, with_draws: bool) -> dict[str, object]:
    """All that torch keeps once for all threads and that an answer may depend on."""
    state: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }
    if with_draws:
        state["generator"] = torch.default_generator.get_state().numpy().tobytes()
    return state


def changes_in_a_load(spec: LoaderSpec, *, with_draws: bool = True) -> set[str]:
    """Looked for at every call that the loading thread makes: all threads see what it sees."""
    before = process_state(with_draws=with_draws)
    changed: set[str] = set()

    def look(*_: object) -> None:
        now = process_state(with_draws=with_draws)
        changed.update(key for key, value in before.items() if now[key] != value)

    sys.setprofile(look)
    try:
        load_model(spec, CPU)
    finally:
        sys.setprofile(None)
    look()
    return changed


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in each dtype, without the classifier's head, which is drawn."""
    path = tmp_path_factory.mktemp("bert")
    net: Any = load_model(bert(), CPU).model
    net._net.bert.to(getattr(torch, request.param)).save_pretrained(path)
    return path


def test_a_checkpoint_of_any_dtype_changes_nothing_while_it_is_loaded(directory: Path) -> None:
    spec = LoaderSpec(zoo="transformers", weights=str(directory), sequence_length=16, seed=3)
    assert changes_in_a_load(spec) == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_by_a_types_configuration_change_nothing(dtype: str) -> None:
    assert changes_in_a_load(bert(dtype=dtype)) == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_torchvision_model_changes_nothing(dtype: str) -> None:
    assert changes_in_a_load(zoo("shufflenet_v2_x0_5", dtype=dtype)) == set()


def test_of_a_users_class_torchs_generator_is_seeded_and_nothing_else_changes() -> None:
    assert changes_in_a_load(LoaderSpec(python=f"{MODELS}:Weighty", seed=3), with_draws=False) == set()


@pytest.mark.parametrize("arch", ["shufflenet_v2_x0_5", "vit_b_32"])
def test_random_weights_are_those_that_manual_seed_gives(arch: str) -> None:
    declare_missing_operators()
    from torchvision import models

    loaded: Any = load_model(zoo(arch), CPU).model
    torch.manual_seed(3)
    drawn = models.get_model(arch, weights=None)
    for (name, one), (_, other) in zip(loaded._net.named_parameters(), drawn.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_the_same_seed_gives_the_same_weights_beside_a_model_that_draws() -> None:
    def weights(*, is_drawn_beside: bool) -> torch.Tensor:
        def draw(*_: object) -> None:
            if is_drawn_beside:
                torch.rand(1, generator=torch.default_generator)

        sys.setprofile(draw)
        try:
            loaded: Any = load_model(bert(), CPU).model
        finally:
            sys.setprofile(None)
        return torch.cat([one.flatten() for one in loaded._net.parameters()])

    assert torch.equal(weights(is_drawn_beside=False), weights(is_drawn_beside=True))


def test_all_that_draws_on_the_cpu_follows_the_seed_and_leaves_the_process_alone() -> None:
    from roles.gpu_worker.executors.loaders.seeded import Seeded

    def drawn() -> list[torch.Tensor]:
        empty = torch.empty(3, 4)
        return [
            torch.rand(3),
            torch.randn(3),
            torch.randint(9, (3,)),
            torch.randint(2, 9, (3,)),
            torch.randperm(5),
            torch.rand_like(empty),
            torch.randn_like(empty),
            torch.randint_like(empty, 9),
            torch.normal(empty.zero_(), 1.0),
            torch.bernoulli(empty.fill_(0.5)),
            torch.multinomial(torch.ones(4), 2),
            torch.nn.init.trunc_normal_(empty.clone()),
            torch.nn.init.orthogonal_(empty.clone()),
            torch.nn.init.kaiming_uniform_(empty.clone()),
            torch.nn.functional.dropout(torch.ones(20), 0.5),
        ]

    torch.manual_seed(3)
    expected = drawn()
    before = torch.get_rng_state()
    with Seeded(3):
        found = drawn()
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), number
    assert torch.equal(torch.get_rng_state(), before)
