"""What is written down of a scheduler is read as it was: every field of it, in little room, and also what earlier versions wrote."""

from __future__ import annotations

import collections.abc
import json
import types
import typing
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId, SliceId
from fabric.limits import DOCUMENT_CHARS_MAX
from fabric.messages import (
    DesiredSlices,
    GpuRef,
    InterferenceOption,
    InterferenceSpec,
    KeptSlice,
    ModelSpec,
    ReplicaHint,
    SliceSpec,
    UnplacedInfo,
)
from policies.batching.base import Delay
from roles.config.cluster import PolicyChoice
from roles.runtime.journal import packed, unpacked
from roles.scheduler.planning.desired_state import ControllerSettings, Desired
from roles.scheduler.replay_start import about_scheduler, settings_of
from roles.scheduler.settings import SchedulerSettings

FORMER = Path(__file__).with_name("former_plan.json")
DEFERRED = PolicyChoice("deferred")


def filled(of: Any) -> Any:
    """A value of that type; of a struct one in which no field has its default."""
    if typing.get_origin(of) is Annotated:
        of = typing.get_args(of)[0]
    of = getattr(of, "__supertype__", of)
    origin, inner = typing.get_origin(of), typing.get_args(of)
    if origin is types.UnionType:
        return filled(inner[0])
    if origin is tuple:
        return tuple(map(filled, (one for one in inner if one is not ...)))
    if origin is frozenset:
        return frozenset({filled(inner[0])})
    if origin is collections.abc.Mapping:
        return {filled(inner[0]): filled(inner[1])}
    if isinstance(of, type) and issubclass(of, Struct):
        return filled_struct(of)
    return {str: "x", int: 7, float: 7.5, bool: True, Any: "any"}[of]


def filled_struct(of: type[Struct]) -> Any:
    hints = typing.get_type_hints(of, include_extras=True)
    values = {}
    for field in fields(of):
        values[field.name] = not field.default if hints[field.name] is bool else filled(hints[field.name])
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        assert values[field.name] != default, f"a loss of {of.__name__}.{field.name} would not be seen"
    return of(**values)


def test_every_field_that_a_scheduler_starts_with_is_read_as_it_was_written() -> None:
    """Pipelines and gangs did not survive a restart: fields were written down one by one."""
    written = filled(SchedulerSettings), filled(PolicyChoice), filled(ControllerSettings)
    assert settings_of(about_scheduler(*written)) == written
    assert settings_of(about_scheduler(*written[:2])) == (*written[:2], None)


def test_slices_have_in_common_only_what_is_the_same() -> None:
    models = tuple(replace(filled(ModelSpec), model_id=ModelId(name)) for name in "abc")
    hints = tuple(ReplicaHint(one.model_id, 4, 1.0, 10.0) for one in models)
    hosted = (models, models[:2], models, (), (replace(models[0], is_idempotent=True), *models[1:]))
    specs = tuple(
        replace(filled(SliceSpec), slice_id=SliceId(f"n/gpu0/{number}"), gpu=number, models=of)
        for number, of in enumerate(hosted)
    )
    settings = SchedulerSettings(
        models[1:],
        tuple((NodeId("n"), spec) for spec in specs),
        hints={(spec.slice_id, one.model_id): (spec.gpu % 2, 2.0) for spec in specs for one in spec.models},
    )
    kept = tuple(KeptSlice(spec.slice_id, hints[: len(spec.models)]) for spec in specs)
    planning = replace(filled(ControllerSettings), hints=kept)
    assert settings_of(about_scheduler(settings, DEFERRED, planning)) == (settings, DEFERRED, planning)


def test_hundreds_of_slices_with_hundreds_of_models_fit_into_a_copy_for_standbys() -> None:
    models = tuple(
        ModelSpec(ModelId(f"model-{number:04}"), 25.0, 16, None, tuple(1.0 + b * 0.37 for b in range(16)))
        for number in range(300)
    )
    hints = tuple(ReplicaHint(one.model_id, 8, 31.25, 31.25) for one in models)
    specs = [SliceSpec(SliceId(f"n/gpu{gpu}/0"), gpu, "emulated", None, models) for gpu in range(300)]
    settings = SchedulerSettings(
        models,
        tuple((NodeId("n"), spec) for spec in specs),
        hints={(spec.slice_id, one.model_id): (8, 31.25) for spec in specs for one in models},
    )
    desired = Desired((), {}, "", ())
    planning = ControllerSettings(desired, tuple(KeptSlice(one.slice_id, hints) for one in specs), True)
    about = about_scheduler(settings, DEFERRED, planning)
    assert len(about) < DOCUMENT_CHARS_MAX / 50
    assert settings_of(about) == (settings, DEFERRED, planning)


def test_what_no_message_could_hold_is_written_down_too() -> None:
    """A scheduler ended because its plan was too large for the message in which it was packed."""
    models = tuple(ModelSpec(ModelId(f"m{number}"), 25.0, 1) for number in range(70_000))
    settings = SchedulerSettings(models, ())
    assert settings_of(about_scheduler(settings, DEFERRED)) == (settings, DEFERRED, None)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("models", 0, 1), float("nan")),
        (("models", 0, 2), -1),
        (("slices", 0, 2, 3), 1e9),
        (("hints", 0, 0, 3), -1.0),
        (("hosted", 0, 0), 99),
        (("hosted",), []),
        (("planning", "unplaced", 0, 1), -1.0),
        (("settings",), None),
    ],
)
def test_one_that_is_damaged_is_refused(at: tuple[str | int, ...], value: object) -> None:
    about = json.loads(about_scheduler(filled(SchedulerSettings), DEFERRED, filled(ControllerSettings)))
    part = about
    for key in at[:-1]:
        part = part[key]
    part[at[-1]] = value
    with pytest.raises(ConfigError, match="does not say"):
        settings_of(json.dumps(about).encode())


def test_one_of_an_earlier_version_is_read() -> None:
    settings, batching, planning = settings_of(FORMER.read_bytes())
    assert batching == PolicyChoice("fixed", {"batch": 2})
    models = (
        ModelSpec(ModelId("a"), 50.0, 2, None, (6.0, 7.0)),
        ModelSpec(ModelId("b"), 60.0, 2, None, (10.0, 11.0)),
    )
    felt = InterferenceSpec("linear", (InterferenceOption("k", 0.5),))
    specs = [SliceSpec(SliceId(f"n/gpu{gpu}/0"), gpu, "emulated", None, models, felt) for gpu in (0, 1)]
    assert settings == SchedulerSettings(
        tuple(replace(one, batch_size_max=32, exec_ms=()) for one in models),
        tuple((NodeId("n"), spec) for spec in specs),
        Delay(),
        {ModelId("a"): 3, ModelId("b"): 0},
        {(SliceId("n/gpu0/0"), ModelId("a")): (2, 4.0)},
    )
    assert planning is not None
    assert planning.desired.base_dir == "/base"
    assert planning.desired.drained == frozenset({GpuRef(NodeId("n"), 1)})
    assert [section["name"] for section in planning.desired.sections] == ["a", "b"]
    assert planning.unplaced == (UnplacedInfo(ModelId("c"), 1.5, "too large"),)
    assert planning.hints[1] == KeptSlice(
        SliceId("n/gpu1/0"), (ReplicaHint(ModelId("a")), ReplicaHint(ModelId("b")))
    )
    assert settings_of(about_scheduler(settings, batching, planning)) == (settings, batching, planning)


def test_what_an_earlier_version_wrote_down_of_pipelines_is_not_taken_for_whole_slices() -> None:
    read = json.loads(FORMER.read_bytes())
    want = unpacked(b64decode(read["models"][1]))
    assert isinstance(want, DesiredSlices)
    (spec, *_) = want.slices
    models = tuple(replace(one, stages_ms=(one.exec_ms, one.exec_ms)) for one in spec.models)
    header = packed(DesiredSlices(1, (replace(spec, models=models),)))
    read["models"][1] = b64encode(header).decode()
    with pytest.raises(ConfigError, match="GPUs of pipelines"):
        settings_of(json.dumps(read).encode())
