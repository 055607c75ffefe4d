"""Ctrl-C may be lost in an import, so every import of a command that is called lies where it ends the process at once."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from roles.cli.group import COMMANDS

ROOMS = {
    Path(str(importlib.import_module(target.partition(":")[0]).__file__)).parent
    for target in COMMANDS.values()
}
EXCEPTIONS = {
    "__init__.py": "before any command",
    "group.py": "before any command, or at its end",
    "whole_help.py": "there is no such command",
    "top.py": "on a thread of its own: signals go to the first one",
    "whereabouts.py": "the roles that call it have imported that",
}
FILES = [file for room in sorted(ROOMS) for file in sorted(room.glob("*.py")) if file.name not in EXCEPTIONS]


def is_importing(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(
        isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) == "importing"
        for item in node.items
    )


def bare_imports(node: ast.AST, *, is_late: bool = False) -> Iterator[int]:
    """The lines of imports in functions that are not within `importing`."""
    if is_importing(node):
        return
    if is_late and isinstance(node, ast.Import | ast.ImportFrom):
        yield node.lineno
    is_late = is_late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
        yield from bare_imports(child, is_late=is_late)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_what_a_command_imports_when_it_is_called_it_imports_where_ctrl_c_is_not_lost(file: Path) -> None:
    assert list(bare_imports(ast.parse(file.read_text(encoding="utf-8")))) == []


def test_the_look_at_imports_finds_those_in_functions() -> None:
    said = "import a\ndef f():\n    import b\n    with importing():\n        import c\n    if x:\n        from d import e\n"
    assert list(bare_imports(ast.parse(said))) == [3, 7]
