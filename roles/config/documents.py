"""Reading a YAML or JSON file into plain values, strictly: a key written twice is an error, not a surprise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from fabric.errors import ConfigError


def read_document(path: Path) -> dict[str, Any]:
    """The mapping in a `.json` file, or in a YAML file of any other name; ConfigError naming file and line."""
    document = read_file(path)
    if document is None:
        raise ConfigError(f"{path}: is empty; it needs at least models and cluster")
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: holds {type(document).__name__}; it must be a mapping with models, cluster"
        )
    return document


def read_file(path: Path) -> Any:
    """Whatever is in such a file; ConfigError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file: {error}") from error
    return _parsed(text, str(path), _read_json if path.suffix == ".json" else _read_yaml)


def read_value(text: str, where: str) -> Any:
    """A value written on the command line, as YAML or JSON; ConfigError names `where`."""
    return _parsed(text, where, _read_yaml)


def as_yaml(value: Any) -> str:
    """Plain values as YAML that a person likes to read: in the order of their keys, text of several lines as such."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Without anchors: what is the same twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Of anything."""
        del data
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML, plus two repairs: duplicate keys are refused, and 1e4 is a number (YAML 1.1 reads text)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  PyYAML's signature
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping",
                    node.start_mark,
                    f"key {key!r} is there twice",
                    key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  PyYAML's signature
        """With the place of what is no date or number though it looks like one."""
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


_PROBLEMS: Final = (
    ("expected <block end>", "this does not go on what begins at {began}: look at the indentation"),
    (
        "mapping values are not allowed",
        "a colon that cannot be here: look at the indentation, and put a value with ': ' in it in quotes",
    ),
    ("found another document", "a second document: there may be one"),
    ("found unexpected end of stream", "the end, with a quote still open that begins at {began}"),
    ("found character '\\t'", "a tab, which YAML does not take: indent with spaces"),
)
"""PyYAML's words that only who knows its parser understands, and ours."""

_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parsed(text: str, where: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: cannot be parsed: {_problem(error, text)}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: is nested too deeply") from error


def _problem(error: Exception, text: str) -> str:
    """Line, column and what is wrong there, in one line."""
    if isinstance(error, json.JSONDecodeError):
        return f"{_place(error.lineno, error.colno)}: {error.msg}"
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position].split("\n")
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return f"{_place(len(before), len(before[-1]) + 1)}: a character that cannot be here, U+{code:04X}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    begin = error.context_mark
    began = "" if begin is None else _place(begin.line + 1, begin.column + 1)
    problem = error.problem or error.context or ""
    for theirs, ours in _PROBLEMS:
        if theirs in problem:
            problem, began = ours.format(began=began), ""
            break
    place = _place(error.problem_mark.line + 1, error.problem_mark.column + 1)
    inside = f" (of what begins at {began})" if began and began != place else ""
    problem = problem.replace("'<stream end>'", "the end")
    return f"{place}: {problem}{inside}"


def _place(line: int, column: int) -> str:
    return f"line {line}, column {column}"


def _read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_StrictLoader)  # noqa: S506  a SafeLoader: plain values only


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return mapping
