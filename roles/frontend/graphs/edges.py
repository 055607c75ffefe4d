"""The inputs of a stage where no glue makes them: outputs of the stages before it by name, else the request's own inputs.

Nothing is copied: a large tensor that lies in shared memory is passed on as it lies there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fabric.errors import Internal, InvalidInput, RequestError
from fabric.link import NamedTensor
from policies.graphs.graph import FAN_OUT_MAX

Answers = Sequence[tuple[str, Sequence[Sequence[NamedTensor]]]]
"""By stage, the outputs of each of its answers."""


def plain_inputs(
    answers: Answers,
    request: Sequence[NamedTensor],
    names: Sequence[str],
    count: int | None,
    source: str,
) -> list[Sequence[NamedTensor]]:
    """The inputs of each task. `names`: what the model takes; empty: anything, and it gets all there is before it.

    With `count` so many tasks are alike. Else the output `source` decides: a whole number says how many there are, of an array each row makes one, which
    gets that row as its input `source`. Raises Internal for what the graph should not ask for, InvalidInput for what the request lacks.
    """
    found = _joined(answers)
    if count is not None:
        return [_chosen(found, request, names)] * count
    deciding = found.get(source)
    if deciding is None:
        raise Internal(f"there is no output {source!r} before it; there is {_listed(found)}")
    if deciding.array.ndim == 0:
        if deciding.array.dtype.kind not in "iu":
            raise Internal(f"output {source!r} says how many requests follow, and is {deciding.array.dtype}")
        return [_chosen(found, request, names)] * checked_count(int(deciding.array), f"output {source!r}")
    rows = checked_count(len(deciding.array), f"output {source!r}")
    return [
        _chosen(
            found | {source: NamedTensor(source, deciding.array[row, ...])}, request, names, source=source
        )
        for row in range(rows)
    ]


def checked_count(count: int, whose: str) -> int:
    """It, if so many requests may follow an answer. Raises Internal."""
    if not 0 <= count <= FAN_OUT_MAX:
        raise Internal(
            f"{whose} asks for {count} requests after one answer; at most {FAN_OUT_MAX} may follow"
        )
    return count


def _joined(answers: Answers) -> dict[str, NamedTensor]:
    """All outputs by name. Of a stage that answered several times they lie one over the other."""
    found: dict[str, NamedTensor] = {}
    for stage, of_stage in answers:
        if len(of_stage) == 1:
            outputs = {tensor.name: tensor for tensor in of_stage[0]}
        else:
            outputs = _stacked(stage, of_stage)
        twice = next((name for name in outputs if name in found), None)
        if twice is not None:
            raise Internal(
                f"several stages before it have an output {twice!r}: it needs a glue that joins them"
            )
        found |= outputs
    return found


def _stacked(stage: str, answers: Sequence[Sequence[NamedTensor]]) -> dict[str, NamedTensor]:
    by_name: dict[str, list[np.ndarray]] = {}
    for tensors in answers:
        for tensor in tensors:
            by_name.setdefault(tensor.name, []).append(tensor.array)
    try:
        return {name: NamedTensor(name, np.stack(arrays)) for name, arrays in by_name.items()}
    except ValueError as error:
        raise Internal(
            f"the answers of stage {stage} are not alike: it needs a glue that joins them"
        ) from error


def _chosen(
    found: Mapping[str, NamedTensor],
    request: Sequence[NamedTensor],
    names: Sequence[str],
    source: str = "",
) -> Sequence[NamedTensor]:
    if not names:
        return [found[source]] if source else list(found.values()) or request
    own = {tensor.name: tensor for tensor in request}
    missing = [name for name in names if name not in found and name not in own]
    renamed: dict[str, NamedTensor] = {}
    lone = source or (next(iter(found)) if len(found) == 1 else "")
    # One that the model takes by its own name is no other input: that one is lacking, as after a stage that was lost.
    if len(missing) == 1 and lone and lone not in names:
        (name,) = missing
        renamed[name] = NamedTensor(name, found[lone].array, found[lone].place)
    elif missing:
        error: type[RequestError] = Internal if found else InvalidInput
        raise error(
            f"its model takes the inputs {', '.join(names)}; {missing[0]!r} is neither an output before it"
            f" ({_listed(found)}) nor an input of the request ({_listed(own)})"
        )
    return [renamed.get(name) or found.get(name) or own[name] for name in names]


def _listed(names: Mapping[str, NamedTensor]) -> str:
    return ", ".join(names) or "none"
