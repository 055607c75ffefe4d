"""The public traces of Azure Functions, as arrivals of models: invocations by minute (2019) and one by one (2021).

The files are those of github.com/Azure/AzurePublicDataset. A model is sent what several functions were: streams are dealt to the models in
turn, in the order in which they first appear, as Usher (section 2) and Shepherd's evaluations do. Minutes of 2019 say how many, not when: their
invocations are drawn evenly within them, which is what a Poisson process of that count looks like, and alike each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.policy_options import shown

BY_MINUTE = ["HashOwner", "HashApp", "HashFunction", "Trigger"]
"""Then the minutes of the day, 1 to 1440."""
ONE_BY_ONE = ["app", "func", "end_timestamp", "duration"]
MINUTE_MS = 60_000.0
ARRIVALS_MAX = 20_000_000
"""160 MB."""

Moments = NDArray[np.float64]
Lines = Iterator[tuple[int, Sequence[str]]]
"""Line number and cells, without the header."""


def is_azure(header: Sequence[str]) -> bool:
    """One of the two public formats."""
    return list(header[:4]) == BY_MINUTE or list(header) == ONE_BY_ONE


def azure_arrivals(
    path: Path, header: Sequence[str], lines: Lines, model_ids: Sequence[ModelId]
) -> tuple[Mapping[ModelId, Moments], float]:
    """Ascending moments of each model in ms, and after how many ms they repeat. Raises ConfigError with the line number."""
    if list(header) == ONE_BY_ONE:
        return _one_by_one(path, lines, model_ids)
    minutes = len(header) - len(BY_MINUTE)
    if minutes == 0 or list(header[4:]) != [str(minute) for minute in range(1, minutes + 1)]:
        raise ConfigError(f"{path}: line 1: behind Trigger the header must have the minutes 1, 2, … in order")
    counts = np.zeros((len(model_ids), minutes), dtype=np.int64)
    for stream, (line_no, line) in enumerate(lines):
        if len(line) != len(header):
            raise ConfigError(f"{path}: line {line_no}: {len(header)} columns expected, not {len(line)}")
        counts[stream % len(model_ids)] += [_count(path, line_no, cell) for cell in line[4:]]
        if counts.sum() > ARRIVALS_MAX:
            raise ConfigError(
                f"{path}: line {line_no}: more than {ARRIVALS_MAX:,} invocations so far: keep fewer functions or minutes of it"
            )
    found = {}
    for model_id, row in zip(model_ids, counts, strict=True):
        own = random.Random(f"{path.name}/{model_id}")
        draws = np.random.RandomState([own.getrandbits(32) for _ in range(8)])
        minute = np.repeat(np.arange(minutes), row)
        found[model_id] = np.sort((minute + draws.random_sample(minute.size)) * MINUTE_MS)
    return found, minutes * MINUTE_MS


def _one_by_one(
    path: Path, lines: Lines, model_ids: Sequence[ModelId]
) -> tuple[Mapping[ModelId, Moments], float]:
    stream_of: dict[tuple[str, str], int] = {}
    starts_s: list[list[float]] = [[] for _ in model_ids]
    count = 0
    for line_no, line in lines:
        if len(line) != len(ONE_BY_ONE):
            raise ConfigError(f"{path}: line {line_no}: {len(ONE_BY_ONE)} columns expected, not {len(line)}")
        stream = stream_of.setdefault((line[0], line[1]), len(stream_of))
        end_s, duration_s = _seconds(path, line_no, line[2]), _seconds(path, line_no, line[3])
        starts_s[stream % len(model_ids)].append(end_s - duration_s)
        count += 1
        if count > ARRIVALS_MAX:
            raise ConfigError(
                f"{path}: line {line_no}: more than {ARRIVALS_MAX:,} invocations: keep a part of it"
            )
    if not count:
        return {model_id: np.empty(0) for model_id in model_ids}, 0.0
    first_s = min(min(one) for one in starts_s if one)
    moments = {
        model_id: np.sort(1000 * (np.array(one, dtype=np.float64) - first_s))
        for model_id, one in zip(model_ids, starts_s, strict=True)
    }
    last_ms = max(float(one[-1]) for one in moments.values() if one.size)
    return moments, last_ms + last_ms / max(1, count - 1)


def _count(path: Path, line_no: int, cell: str) -> int:
    if not cell.isdecimal() or len(cell) > len(str(ARRIVALS_MAX)):
        raise ConfigError(f"{path}: line {line_no}: {shown(cell)} is not a number of invocations")
    return int(cell)


def _seconds(path: Path, line_no: int, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError as error:
        raise ConfigError(f"{path}: line {line_no}: {shown(cell)} is not a number of seconds") from error
    if not 0 <= value <= 1e9:
        raise ConfigError(f"{path}: line {line_no}: {shown(cell)} s is not within 0 and 1e9")
    return value
