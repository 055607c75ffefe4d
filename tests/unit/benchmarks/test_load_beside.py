from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.load_beside import OTHER, SERVED, Served
from fabric.ids import ModelId
from fabric.messages import LoaderSpec, ModelSpec

DIGITS = LoaderSpec(python="deploy.local.demo.digits_model:Digits")


def digits(model_id: ModelId) -> ModelSpec:
    return ModelSpec(model_id, 1_000.0, 2, DIGITS)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served("cpu", digits(SERVED))
    yield served
    served.close()


def test_a_neighbour_is_asked_from_the_load_of_a_model_to_its_end(served: Served) -> None:
    took_ms, load_ms, replica = served.while_loading(digits(OTHER))
    assert took_ms
    assert max(took_ms) <= load_ms
    assert (replica.model_id, replica.batch_size_max) == (OTHER, 2)
    assert served.while_unloading(OTHER, 0.01)
