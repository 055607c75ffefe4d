"""An emulated GPU disturbs its slices as the simulator's does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import InterferenceOption, InterferenceSpec, ModelSpec, SliceSpec
from profiles.interference import Running
from roles.config.read_config import parse_config
from roles.gpu_worker.executors.base import Job, JobPart, JobRan, Loaded, LoadFailed
from roles.gpu_worker.executors.emulated import EmulatedExecutor
from roles.scheduler.settings import settings_from

DOCUMENT = {
    "models": [
        {"name": "resnet50", "slo_ms": 100, "profile": {"ref": "thesis-v100/resnet50"}},
        {"name": "bert", "slo_ms": 300, "profile": {"ref": "thesis-v100/bert"}},
    ],
    "cluster": {"gpus": 2, "gpu_type": "v100", "interference": {"sm": {"strength": 0.5}}},
    "placement": {
        "given": {
            "slices": [
                {"gpu": 0, "share_percent": 20, "models": [{"model": "resnet50"}]},
                {"gpu": 0, "share_percent": 60, "models": [{"model": "bert"}]},
                {"gpu": 1, "models": [{"model": "bert"}]},
            ]
        }
    },
}


def job(slice_: SliceSpec, batch_size: int, batch_id: int) -> Job:
    part = JobPart(batch_size, [NamedTensor("x", np.zeros((batch_size, 1), np.float32))])
    return Job(slice_.slice_id, BatchId(batch_id), slice_.models[0].model_id, [part])


def took_ms(device: EmulatedExecutor, at_ms: float = 1e6) -> dict[BatchId, float]:
    return {event.batch_id: event.exec_ms for event in device.take(99, at_ms) if isinstance(event, JobRan)}


def test_neighbours_slow_a_batch_down_live_as_they_do_in_the_simulator() -> None:
    config = parse_config(DOCUMENT, Path())
    resnet, bert, far = (spec for _, spec in settings_from(config).slices)
    device = EmulatedExecutor()
    for spec in (resnet, bert, far):
        device.load(spec)
    assert all(isinstance(event, Loaded) for event in device.take(9, 0.0))
    device.run(job(far, 8, 1), 0.0)  # on another GPU: nobody's neighbour
    device.run(job(bert, 4, 2), 0.0)
    device.run(job(resnet, 4, 3), 1.0)
    device.run(job(resnet, 4, 4), 5000.0)  # everybody else has ended
    modelled = config.device_model("v100")
    own, beside = Running(ModelId("resnet50"), 4, 20), Running(ModelId("bert"), 4, 60)
    assert took_ms(device) == pytest.approx(
        {
            1: modelled.exec_ms(Running(ModelId("bert"), 8)),
            2: modelled.exec_ms(beside),
            3: modelled.exec_ms(own, [beside]),
            4: modelled.exec_ms(own),
        }
    )
    assert modelled.exec_ms(own, [beside]) > modelled.exec_ms(own)


def test_the_neighbours_of_what_was_handed_over_are_those_of_the_moment_at_which_it_begins() -> None:
    config = parse_config(DOCUMENT, Path())
    resnet, bert, _ = (spec for _, spec in settings_from(config).slices)
    modelled = config.device_model("v100")
    own, beside = Running(ModelId("resnet50"), 4, 20), Running(ModelId("bert"), 4, 60)
    alone_ms = modelled.exec_ms(own)
    device = EmulatedExecutor()
    for spec in (resnet, bert):
        device.load(spec)
    device.run(job(resnet, 4, 1), 0.0)
    device.run(job(resnet, 4, 2), 0.0)
    device.run(job(resnet, 4, 3), 0.0)
    device.run(job(bert, 4, 4), alone_ms - 0.1)
    took = took_ms(device)
    assert took[BatchId(1)] == pytest.approx(alone_ms)
    assert took[BatchId(2)] == pytest.approx(modelled.exec_ms(own, [beside]))
    ends_at_ms = alone_ms + took[BatchId(2)] < alone_ms - 0.1 + took[BatchId(4)]
    assert took[BatchId(3)] == pytest.approx(took[BatchId(2)] if ends_at_ms else alone_ms)


def test_a_slice_that_is_gone_disturbs_nobody() -> None:
    resnet, bert, _ = (spec for _, spec in settings_from(parse_config(DOCUMENT, Path())).slices)
    device = EmulatedExecutor()
    device.load(resnet)
    device.load(bert)
    device.run(job(bert, 4, 1), 0.0)
    device.abort(bert.slice_id, BatchId(1), 1.0)
    device.unload(bert.slice_id)
    device.run(job(resnet, 4, 2), 1.0)
    assert took_ms(device)[BatchId(2)] == resnet.models[0].exec_ms[3]


def test_a_model_without_the_profile_that_interference_needs_is_not_hosted() -> None:
    named = InterferenceSpec("sm")
    unknown = ModelSpec(ModelId("mine"), 50.0, 1, None, (5.0,))
    device = EmulatedExecutor()
    device.load(SliceSpec(SliceId("n/gpu0/0"), 0, "emulated", None, (unknown,), named))
    (failed,) = device.take(9, 0.0)
    assert isinstance(failed, LoadFailed)
    assert "mine names no shipped profile" in failed.reason


def test_only_emulated_slices_with_interference_are_told_of_it() -> None:
    plain = {**DOCUMENT, "cluster": {"gpus": 2, "gpu_type": "v100"}}
    slices = settings_from(parse_config(plain, Path())).slices
    assert [spec.interference for _, spec in slices] == [None, None, None]
    slices = settings_from(parse_config(DOCUMENT, Path())).slices
    assert {spec.interference for _, spec in slices} == {
        InterferenceSpec("sm", (InterferenceOption("strength", 0.5),))
    }
