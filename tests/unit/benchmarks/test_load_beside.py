"""The benchmark of a model that is loaded beside another, with small models on the CPU."""

from __future__ import annotations

import pytest

from fabric.messages import LoaderSpec, ModelSpec

pytest.importorskip("torch")

DIGITS = LoaderSpec(python="deploy.local.demo.digits_model:Digits")


def test_requests_are_answered_while_the_other_model_loads_and_goes() -> None:
    from benchmarks.load_beside import OTHER, SERVED, Served

    served = Served("cpu", ModelSpec(SERVED, 60_000.0, 2, DIGITS))
    try:
        took_ms, load_ms, replica = served.while_loading(ModelSpec(OTHER, 60_000.0, 2, DIGITS))
        assert sum(took_ms) <= load_ms
        assert len(replica.exec_ms) == 2
        assert served.while_unloading(OTHER, 0.01)
    finally:
        served.close()
