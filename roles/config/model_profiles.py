"""`models[].profile` of the file, checked: what a model costs on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fabric.errors import ConfigError, ProfileError
from fabric.policy_options import shown
from profiles.model import (
    BATCH_SIZE_LIMIT,
    BATCH_SIZE_MAX_DEFAULT,
    STAGES_MAX,
    LinearProfile,
    ModelProfile,
    table_of,
)
from profiles.store import read_profile, shipped_profile
from roles.config.checks import DURATION_MS_MAX, finite, whole
from roles.config.sections import ProfileSection

RUN_MS_MIN = 1e-6  # what results are rounded to


def read_profiles(
    section: ProfileSection | None, where: str, base_dir: Path
) -> tuple[ModelProfile | None, dict[str, ModelProfile]]:
    """The profile for every type of GPU, and those for the named ones (lower case). Raises ConfigError."""
    if section is None:
        return None, {}
    if section.by_type is None:
        return _profile(section, where, base_dir), {}
    _one_kind(section, where)
    if section.stages is not None:
        raise ConfigError(f"{where}.stages: belongs inside by_type, to a type's profile")
    if not section.by_type:
        raise ConfigError(f"{where}.by_type: is empty; it must name at least one GPU type")
    by_type: dict[str, ModelProfile] = {}
    for gpu_type, inner in section.by_type.items():
        if inner.by_type is not None:
            raise ConfigError(f"{where}.by_type.{gpu_type}: by_type cannot be inside by_type")
        by_type[gpu_type.lower()] = _profile(inner, f"{where}.by_type.{gpu_type}", base_dir)
    return None, by_type


def on_types(
    profile: ModelProfile | None, by_type: Mapping[str, ModelProfile], gpu_types: Sequence[str]
) -> list[ModelProfile]:
    """The model's profiles on these types of GPU, where it has one."""
    found = [by_type.get(gpu_type, profile) for gpu_type in dict.fromkeys(gpu_types)]
    return [one for one in found if one is not None]


def _profile(section: ProfileSection, where: str, base_dir: Path) -> ModelProfile:
    profile = _written_profile(section, where, base_dir)
    ends_ms = profile.exec_ms(1), profile.exec_ms(profile.batch_size_max)
    if not RUN_MS_MIN <= ends_ms[0] <= ends_ms[1] <= DURATION_MS_MAX:
        raise ConfigError(
            f"{where}: batches take from {shown(ends_ms[0])} to {shown(ends_ms[1])} ms; "
            f"they must take from {RUN_MS_MIN:f} ms to {shown(DURATION_MS_MAX)} ms"
        )
    return profile if section.stages is None else _cut(profile, section.stages, f"{where}.stages")


def _cut(profile: ModelProfile, stages: Mapping[str | int, Sequence[float]], where: str) -> ModelProfile:
    """The profile with what the file says of the stages of the model when it is cut."""
    cuts: dict[int, Sequence[float]] = {}
    for key, stages_ms in stages.items():
        text = str(key)
        if not (text.isascii() and text.isdigit() and 2 <= int(text) <= STAGES_MAX):
            raise ConfigError(
                f"{where}: {shown(key)} is not a number of stages (a whole number from 2 to {STAGES_MAX})"
            )
        if int(text) in cuts:
            raise ConfigError(f"{where}: {text} stages are there twice")
        for place, ms in enumerate(stages_ms):
            finite(ms, f"{where}.{text}[{place}]", at_least=RUN_MS_MIN, at_most=DURATION_MS_MAX)
        cuts[int(text)] = stages_ms
    try:
        return profile.with_cuts(cuts)
    except ProfileError as error:
        raise ConfigError(f"{where}: {error}") from error


def _written_profile(section: ProfileSection, where: str, base_dir: Path) -> ModelProfile:
    _one_kind(section, where)
    try:
        if section.table is not None:
            return table_of(section.table, source=f"table at {where}")
        if section.ref is not None:
            is_file = section.ref.endswith(".json")  # what `tenuto profile` wrote
            return read_profile(base_dir / section.ref) if is_file else shipped_profile(section.ref)
        if section.alpha_ms is None or section.beta_ms is None:
            missing = "alpha_ms" if section.alpha_ms is None else "beta_ms"
            raise ConfigError(f"{where}.{missing}: is missing; a line needs alpha_ms and beta_ms")
        finite(section.alpha_ms, f"{where}.alpha_ms", at_most=DURATION_MS_MAX)
        finite(section.beta_ms, f"{where}.beta_ms", at_most=DURATION_MS_MAX)
        max_batch = BATCH_SIZE_MAX_DEFAULT
        if section.max_batch is not None:
            max_batch = whole(section.max_batch, f"{where}.max_batch", 1, BATCH_SIZE_LIMIT)
        return LinearProfile(section.alpha_ms, section.beta_ms, max_batch, source=f"line at {where}")
    except ProfileError as error:
        raise ConfigError(f"{where}: {error}") from error


def _one_kind(section: ProfileSection, where: str) -> None:
    line = (section.alpha_ms, section.beta_ms, section.max_batch)
    kinds = {
        "alpha_ms, beta_ms and max_batch": any(value is not None for value in line),
        "ref": section.ref is not None,
        "table": section.table is not None,
        "by_type": section.by_type is not None,
    }
    written = [kind for kind, is_written in kinds.items() if is_written]
    if len(written) != 1:
        got = f"has {' and '.join(written)}" if written else "is empty"
        raise ConfigError(
            f"{where}: {got}; it must be exactly one of {{alpha_ms, beta_ms, max_batch}}, {{ref}}, {{table}}, "
            "{by_type}"
        )
