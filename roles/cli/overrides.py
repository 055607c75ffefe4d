"""Options of commands that read the file, for values that it has otherwise: `--set`, `--gpus`, `--slo`, `--rate`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeGuard

import click

from fabric.errors import ConfigError
from fabric.policy_options import brief
from roles.cli.options import IntRange
from roles.config.checks import DURATION_MS_MAX, RATE_RPS_MAX
from roles.config.cluster import ClusterConfig
from roles.config.overrides import Override, read_override

GPUS_MAX = 1_000_000
Making = Callable[[Mapping[str, Any]], Sequence[Override]]
"""Overrides, once the document is known."""

set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="PATH=VALUE",
    help="Instead of the file's, such as models.resnet50.slo_ms=30; again for more (or $TENUTO_SET, separated by ;).",
)


def override_options(command: Callable[..., None]) -> Callable[..., None]:
    """All of them, as the command's `overrides`."""

    @click.option("--gpus", type=IntRange(0, GPUS_MAX), help="GPUs, instead of the file's.")
    @click.option(
        "--slo",
        "slos",
        multiple=True,
        metavar="[MODEL=]MS",
        help="Instead of the file's; again for more models.",
    )
    @click.option(
        "--rate",
        "rates",
        multiple=True,
        metavar="[MODEL=]RPS",
        help="Instead of the file's; without MODEL the total.",
    )
    @set_option
    @wraps(command)
    def overriding(
        *,
        settings: tuple[str, ...],
        gpus: int | None,
        slos: tuple[str, ...],
        rates: tuple[str, ...],
        **rest: Any,
    ) -> None:
        def made(document: Mapping[str, Any]) -> list[Override]:
            return [
                *(read_override(text, "--set") for text in settings),
                *([] if gpus is None else [_gpus(document, gpus)]),
                *(one for text in slos for one in _slo(document, text)),
                *(one for text in rates for one in _rate(document, text)),
            ]

        command(overrides=made, **rest)

    return overriding


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """A trace that is played. `models`: the names in it; None: it has none, and every model gets all of it."""

    path: Path
    models: frozenset[str] | None

    @classmethod
    def read(cls, path: Path) -> RecordedArrivals:
        """Raises ConfigError for one that cannot be read; whether it can be played is asked later."""
        return cls(path, _models_in(path))

    def overrides(self, document: Mapping[str, Any]) -> list[Override]:
        """The requests of every model that it names come as in it."""
        trace = {"process": "trace", "path": str(self.path.absolute())}
        return [
            Override(f"models[{place}].arrival", trace, "--arrivals")
            for place, model in enumerate(_models(document))
            if self._names(str(model.get("name")))
        ]

    def silent(self, config: ClusterConfig) -> frozenset[str]:
        """Of whom nothing comes: models that it does not name, and all applications.

        What the stages of these asked is in the trace, as requests of models.
        """
        models = {one.name for one in config.models if not self._names(one.name)}
        return frozenset(models | {one.name for one in config.applications})

    def _names(self, model: str) -> bool:
        return self.models is None or model in self.models


def _models_in(path: Path) -> frozenset[str] | None:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            header = [name.strip() for name in next(lines, [])]
            if "model" not in header:
                return None
            column = header.index("model")
            return frozenset(line[column].strip() for line in lines if len(line) > column)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--arrivals: {path} cannot be read: {error}") from error


def _gpus(document: Mapping[str, Any], gpus: int) -> Override:
    cluster = document.get("cluster")
    nodes = cluster.get("nodes") if isinstance(cluster, dict) else None
    if not isinstance(nodes, list) or not nodes:
        return Override("cluster.gpus", gpus, "--gpus")
    if len(nodes) > 1:
        raise ConfigError(
            f"--gpus: the file lists {len(nodes)} nodes: say whose, with --set cluster.nodes.HOST.gpus={gpus}"
        )
    return Override("cluster.nodes[0].gpus", gpus, "--gpus")


def _slo(document: Mapping[str, Any], text: str) -> list[Override]:
    place, slo_ms = _read(document, text, "--slo", DURATION_MS_MAX)
    places = range(len(_models(document))) if place is None else [place]
    return [Override(f"models[{one}].slo_ms", slo_ms, "--slo") for one in places]


def _rate(document: Mapping[str, Any], text: str) -> list[Override]:
    place, rate_rps = _read(document, text, "--rate", RATE_RPS_MAX)
    if place is not None:
        return [Override(f"models[{place}].rate_rps", rate_rps, "--rate")]
    models = _models(document)
    rates = [model.get("rate_rps") for model in models]
    applications = document.get("applications")
    others = [one for one in applications if isinstance(one, dict)] if isinstance(applications, list) else []
    is_shared_out = "popularity" in document or any("weight" in one for one in (*models, *others))
    if document.get("rate_rps") is not None or (is_shared_out and all(rate is None for rate in rates)):
        return [Override("rate_rps", rate_rps, "--rate")]
    if len(models) == 1 and not document.get("applications"):
        return [Override("models[0].rate_rps", rate_rps, "--rate")]
    if any(isinstance(rate, list) for rate in rates):
        raise ConfigError("--rate: the file's rates change in steps; give each model's: --rate MODEL=RPS")
    numbers = [rate if _is_rate(rate) else 0.0 for rate in rates]
    total = sum(numbers)
    if total <= 0:
        raise ConfigError(
            "--rate: no model has a rate or a weight to share it out by; give each model's: --rate MODEL=RPS"
        )
    return [
        Override(f"models[{one}].rate_rps", rate_rps * number / total, "--rate")
        for one, number in enumerate(numbers)
        if rates[one] is not None
    ]


def _is_rate(value: object) -> TypeGuard[float]:
    """What else stands there is said when the file is checked."""
    return isinstance(value, int | float) and 0 <= value <= RATE_RPS_MAX


def _read(document: Mapping[str, Any], text: str, option: str, at_most: float) -> tuple[int | None, float]:
    """The model's place, None: it is of all, and the number."""
    name, equals, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value <= at_most:
        raise click.UsageError(
            f"{option} {text[:60]}: must be a number from 0 to {at_most:,.0f}, or MODEL=NUMBER"
        )
    if not equals:
        return None, value
    names = [model.get("name") for model in _models(document)]
    if name not in names:
        raise ConfigError(
            f"{option}: the file has no model {name[:60]!r}; there is {', '.join(map(brief, names))}"
        )
    return names.index(name), value


def _models(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """As far as they can be read: what is wrong with the file is said when it is checked."""
    models = document.get("models")
    return [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
