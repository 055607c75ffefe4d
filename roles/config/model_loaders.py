"""`models[].loader` of a configuration, checked: what a real device is told to load."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fabric.errors import ConfigError
from fabric.messages import LoaderSpec
from fabric.policy_options import shown
from profiles.model import STAGES_MAX
from roles.config.checks import SEED_MAX, one_of, unique, whole
from roles.config.sections import LoaderSection

ZOOS: Final = ("torchvision", "transformers")
DTYPES: Final = ("float32", "bfloat16", "float16")
SEQUENCE_LENGTH_DEFAULT: Final = 512  # as the language models of the papers were measured
SEQUENCE_LENGTH_LIMIT: Final = 1 << 20
TOP_K_LIMIT: Final = 1 << 20

# Which options speak of which loaders; the others would be ignored in silence, so they are refused.
_ONLY_FOR: Final = {
    "arch": ("torchvision", "transformers"),
    "channels_last": ("torchvision",),
    "sequence_length": ("transformers",),
    "config": ("transformers",),
    "from_hub": ("transformers",),
}


def loader_spec(section: LoaderSection | None, where: str, base_dir: Path) -> LoaderSpec | None:
    """The loader as workers are told; ConfigError names what is wrong in it. Paths are relative to `base_dir`."""
    if section is None:
        return None
    if (section.zoo is None) == (section.python is None):
        raise ConfigError(f"{where}: must have exactly one of zoo and python")
    if section.zoo is not None:
        one_of(section.zoo, ZOOS, f"{where}.zoo")
        _check_origin(section, where)
    for key, zoos in _ONLY_FOR.items():
        if getattr(section, key) not in (None, False) and section.zoo not in zoos:
            raise ConfigError(
                f"{where}.{key}: belongs to zoo: {' or '.join(zoos)}, not to {section.zoo or 'python'}"
            )
    if section.python is not None:
        class_named(section.python, f"{where}.python")
    if section.top_k is not None:
        whole(section.top_k, f"{where}.top_k", 1, TOP_K_LIMIT)
    whole(section.seed, f"{where}.seed", 0, SEED_MAX)
    one_of(section.dtype, DTYPES, f"{where}.dtype")
    length = section.sequence_length
    if length is not None:
        whole(length, f"{where}.sequence_length", 1, SEQUENCE_LENGTH_LIMIT)
    stages, begin_at = _stages(section.stages, f"{where}.stages")
    ranks = _ranks(section, f"{where}.ranks")
    return LoaderSpec(
        zoo=section.zoo,
        arch=section.arch,
        python=section.python,
        weights=None if section.weights is None else str((base_dir / section.weights).absolute()),
        top_k=section.top_k,
        seed=section.seed,
        dtype=section.dtype,
        channels_last=section.channels_last,
        cuda_graphs=section.cuda_graphs,
        sequence_length=SEQUENCE_LENGTH_DEFAULT if length is None else length,
        config=tuple((key, json.dumps(value)) for key, value in (section.config or {}).items()),
        from_hub=section.from_hub,
        stages=stages,
        begin_at=begin_at,
        ranks=ranks,
    )


def _stages(said: int | Sequence[str] | None, where: str) -> tuple[int, tuple[str, ...]]:
    """How many, and the modules at which all but the first begin, where the file names them."""
    if said is None:
        return 0, ()
    if isinstance(said, int):
        return whole(said, where, 2, STAGES_MAX), ()
    whole(len(said) + 1, f"{where}: its modules and the first stage", 2, STAGES_MAX)
    unique(said, f"{where}[{{}}]")
    return len(said) + 1, tuple(said)


def _ranks(section: LoaderSection, where: str) -> int:
    """How many; 0: not said. Raises ConfigError where they can have no meaning."""
    if section.ranks is None:
        return 0
    whole(section.ranks, where, 2, STAGES_MAX)
    if section.python is None:
        raise ConfigError(
            f"{where}: belongs to python: a class of yours computes its part on each rank; stages cuts a zoo's models"
        )
    if section.stages is not None:
        raise ConfigError(
            f"{where}: goes without stages; a model is cut into stages or runs in ranks, not both"
        )
    if section.cuda_graphs:
        raise ConfigError(
            f"{where}: goes without cuda_graphs; ranks meet each other in every batch, outside of graphs"
        )
    return section.ranks


def _check_origin(section: LoaderSection, where: str) -> None:
    """What a zoo's loader takes the architecture from."""
    if section.zoo == "torchvision":
        if not section.arch:
            raise ConfigError(f"{where}.arch: is missing; a zoo loader needs one, such as resnet50")
        return
    if (not section.arch) == (section.weights is None):
        raise ConfigError(
            f"{where}: must have exactly one of arch (a type such as bert, with random weights) and weights "
            "(a local directory with config.json)"
        )
    if section.from_hub and not section.arch:
        raise ConfigError(f"{where}.from_hub: goes with arch, the model's name on the hub")
    if section.config and (section.weights is not None or section.from_hub):
        raise ConfigError(
            f"{where}.config: goes with arch, a type; weights and the hub bring their own configuration"
        )


def class_named(text: str, where: str) -> str:
    """It, if it can be the name of a class. Raises ConfigError."""
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise ConfigError(f'{where}: is {shown(text)}; it must be like "package.module:Class"')
    return text
