"""The process that runs a user's glue: ``python -P -m roles.frontend.graphs.glue_process BYTES_MAX STAGE=MODULE:CLASS …``.

Questions come on stdin, answers go where stdout was at the start; what a user's code prints goes to stderr. A class of glue is made
without arguments and has `split` where its stage comes after one stage or none, `join` where it comes after several:

    def split(self, outputs, request): ...   # outputs: {name: array} of the one answer, or the request's own inputs
    def join(self, outputs, request): ...    # outputs: {stage: [{name: array}, ...]}, one for each answer

Both get the request's own inputs as well, and give a list with the inputs of each request that follows, {name: array}. An empty
list ends this way through the graph. Arrays they get cannot be written to.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fabric.clock import MonotonicClock
from fabric.errors import (
    FabricError,
    Internal,
    LocalProtocolError,
    RequestError,
    code_of_unsendable,
    error_text,
)
from fabric.link import NamedTensor, Tensor
from fabric.messages import GlueAsked, GlueMade
from roles.frontend.graphs.edges import checked_count
from roles.runtime.message_pipe import Ended, MessagePipe
from roles.runtime.process import die_with_parent, leave_the_end_to_parent

Named = dict[str, Tensor]


def main() -> None:
    """Answer until nobody asks any more."""
    die_with_parent()
    leave_the_end_to_parent()
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    bytes_max = int(sys.argv[1])
    pipe = MessagePipe(os.dup(sys.stdin.fileno()), answer, MonotonicClock())
    os.dup2(
        os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno()
    )  # what a user reads is not what we are asked
    made = dict(_made(one) for one in sys.argv[2:])
    pipe.send(GlueMade(()), (), None, bytes_max)  # ready
    while True:
        try:
            asked, tensors = pipe.receive(None)
        except Ended:
            return
        assert isinstance(asked, GlueAsked), "our own parent"
        try:
            message, named = _answer(made[asked.stage], asked, tensors)
            pipe.send(message, named, None, bytes_max)
        except LocalProtocolError as error:  # what a user made cannot be sent
            pipe.send(GlueMade((), code_of_unsendable(error), str(error)), (), None, bytes_max)
        except RequestError as error:
            pipe.send(GlueMade((), error.code, error.reason), (), None, bytes_max)


def _made(named: str) -> tuple[str, Any]:
    """A stage, and its user's object; or, as a RequestError, why there is none."""
    stage, _, name = named.partition("=")
    module_name, _, class_name = name.partition(":")
    try:
        return stage, getattr(importlib.import_module(module_name), class_name)()
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything
        return stage, Internal(f"it cannot be made: {error_text(error)}")


def _answer(
    made: Any, asked: GlueAsked, tensors: Sequence[NamedTensor]
) -> tuple[GlueMade, Sequence[NamedTensor]]:
    if isinstance(made, RequestError):
        raise Internal(
            made.reason
        )  # not `made` itself: it would keep every request's tensors in its traceback
    call, argument, request = _call(made, asked, tensors)
    try:
        given = call(argument, request)
    except BaseException as error:  # as above
        raise Internal(f"it raised {error_text(error)}") from error
    if not isinstance(given, list | tuple):
        raise Internal(f"it gave {_kind(given)}, not a list with the inputs of each request")
    checked_count(len(given), "it")
    items = [_item(one, place) for place, one in enumerate(given)]
    return GlueMade(tuple(map(len, items))), [tensor for item in items for tensor in item]


def _call(
    made: Any, asked: GlueAsked, tensors: Sequence[NamedTensor]
) -> tuple[Callable[[Any, Named], object], Any, Named]:
    is_join = len(asked.after) > 1
    name = "join" if is_join else "split"
    call = getattr(made, name, None)
    if not callable(call):
        raise Internal(f"it has no method {name!r}, which its stage needs")
    at = 0
    by_stage: dict[str, list[Named]] = {stage: [] for stage in (*asked.after, "")}
    for part in asked.parts:
        own = {one.name: one.array for one in tensors[at : at + part.tensors]}
        by_stage.setdefault(part.stage, []).append(own)
        at += part.tensors
    (request,) = by_stage.pop("")
    if is_join:
        return call, by_stage, request
    return call, by_stage[asked.after[0]][0] if asked.after else request, request


def _item(given: object, place: int) -> list[NamedTensor]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise Internal(f"item {place} of what it gave is {_kind(given)}, not a dict of arrays by name")
    try:
        return [NamedTensor(name, np.asarray(value)) for name, value in given.items()]
    except BaseException as error:  # as above
        raise Internal(f"item {place} of what it gave has no arrays: {error_text(error)}") from error


def _kind(given: object) -> str:
    return f"a {type(given).__name__}"


if __name__ == "__main__":
    sys.path.append(str(Path.cwd()))  # users' modules, behind our own, as for a worker
    try:
        main()
    except FabricError as error:
        sys.exit(f"glue: {error}")
