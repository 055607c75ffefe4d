"""Docstrings and tables as Markdown."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import ModuleType


def paragraphs(docstring: str | None) -> str:
    """A docstring with each paragraph on one line; lists and indented code stay as they are."""
    found = []
    for block in inspect.cleandoc(docstring or "").split("\n\n"):
        is_kept = re.match(r"(    |[-*] |\d+\. )", block)
        found.append(block if is_kept else " ".join(block.split()))
    return "\n\n".join(found).replace("``", "`")


def cell(text: str) -> str:
    """A text that fits into a cell of a table."""
    return " ".join(paragraphs(text).replace("|", "\\|").split())


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; nothing where it has no rows."""
    lines = [f"| {' | '.join(cell(one) for one in row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines, ""])


@cache
def attribute_docstrings(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """The text below each annotated name, by class; those of the module itself are under the empty name."""
    tree = ast.parse(inspect.getsource(module))
    bodies = {"": tree.body, **{one.name: one.body for one in tree.body if isinstance(one, ast.ClassDef)}}
    return {name: _below_names(body) for name, body in bodies.items()}


def _below_names(body: Sequence[ast.stmt]) -> dict[str, str]:
    found = {}
    for statement, below in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[statement.target.id] = inspect.cleandoc(below.value.value)
    return found
