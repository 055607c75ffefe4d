"""Reading a YAML or JSON file into plain values, strictly: a key written twice is an error, not a surprise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from fabric.errors import ConfigError
from fabric.policy_options import shown


def read_document(path: Path, text: str | None = None) -> dict[str, Any]:
    """The mapping in a `.json` file, or in a YAML file of any other name; ConfigError naming file and line.

    `text`: what the file said when that was read.
    """
    document = read_file(path, text)
    if document is None:
        raise ConfigError(f"{path}: is empty; it needs at least models and cluster")
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: holds {type(document).__name__}; it must be a mapping with models, cluster"
        )
    return document


def read_file(path: Path, text: str | None = None) -> Any:
    """Whatever is in such a file; ConfigError naming file and line. `text`: as for `read_document`."""
    written = read_text(path) if text is None else text
    return _parsed(written, str(path), _read_json if path.suffix == ".json" else _read_yaml)


def read_text(path: Path) -> str:
    """What such a file says. ConfigError where it cannot be read or is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file: {error}") from error


def read_value(text: str, where: str) -> Any:
    """A value written on the command line, as YAML or JSON; ConfigError names `where`."""
    return _parsed(text, where, _read_yaml)


def as_yaml(value: Any) -> str:
    """Plain values as YAML that a person likes to read, and every reader alike: in the order of their keys, text of several lines as such."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110)


def through_json(value: Any) -> Any:
    """Plain values as their JSON gives them back: every key is a text, and so is what JSON has no kind for."""
    return json.loads(json.dumps(value, default=str))


class _Dumper(yaml.SafeDumper):
    """Without anchors: what is the same twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Of anything."""
        del data
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML quotes what YAML 1.1 takes for something else. Kubernetes' reader takes 1e4 and y for that, too; nothing longer that begins with a letter.
    style = "|" if "\n" in text else None if text[:1].isalpha() and len(text) > 1 else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML with three repairs: duplicate keys are refused, 1e4 is a number (YAML 1.1 reads text), and there are plain values only.

    Plain is what JSON has, too. Sets, dates and bytes have no place in a file of ours: further on nothing would know them.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  PyYAML's signature
        seen: set[Any] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # a list may say !!map
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == f"{_TAGS}merge":
                continue
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                continue  # it is refused below, with its place
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping",
                    node.start_mark,
                    f"key {key!r} is there twice",
                    key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_TAGS: Final = "tag:yaml.org,2002:"
_NEEDS_QUOTES: Final = {"timestamp": "a date", "merge": "a merge of mappings", "value": "a sign of its own"}
_Constructor = Callable[[yaml.SafeLoader, Any], Any]


def _scalar(read: _Constructor, right: str) -> _Constructor:
    """The same with an error that has the place: of a text that it cannot read PyYAML raises what its functions happen to raise."""

    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        try:
            return read(loader, node)
        except (ValueError, LookupError, OverflowError) as error:
            problem = f"{shown(node.value)} cannot be here; it must be {right}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    return construct


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    number = loader.construct_yaml_int(node)
    float(number)  # one that no float holds is wrong for every key, and too long for any message
    return number


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    """With the two halves of a character, as JSON escapes them, put together. Raises UnicodeError where one is alone: no file and no message takes it."""
    text = loader.construct_yaml_str(node)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")


def _refuse(_: yaml.SafeLoader, node: yaml.Node) -> Any:
    what = _NEEDS_QUOTES.get(node.tag.removeprefix(_TAGS))
    if isinstance(node, yaml.ScalarNode) and what is not None:
        problem = f"{shown(node.value)} needs quotes: without them YAML reads {what}"
    else:
        tag = node.tag.replace(_TAGS, "!!")
        problem = f"there is nothing of the kind {shown(tag)} here: values are text, numbers, true and false, lists and mappings"
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_StrictLoader.yaml_constructors = {
    f"{_TAGS}null": yaml.SafeLoader.construct_yaml_null,
    f"{_TAGS}bool": _scalar(yaml.SafeLoader.construct_yaml_bool, "true or false"),
    f"{_TAGS}int": _scalar(_whole_number, "a whole number of ordinary size"),
    f"{_TAGS}float": _scalar(yaml.SafeLoader.construct_yaml_float, "a number of ordinary size"),
    f"{_TAGS}str": _scalar(_text, "text of whole characters"),
    f"{_TAGS}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAGS}map": yaml.SafeLoader.construct_yaml_map,
    None: _refuse,
}

_PROBLEMS: Final = (
    ("expected <block end>", "this does not go on what begins at {began}: look at the indentation"),
    (
        "mapping values are not allowed",
        "a colon that cannot be here: look at the indentation, and put a value with ': ' in it in quotes",
    ),
    ("found another document", "a second document: there may be one"),
    ("found unexpected end of stream", "the end, with a quote still open that begins at {began}"),
    ("found unhashable key", "a list or a mapping as a key: a key is text"),
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
    document = json.loads(text, object_pairs_hook=_unique, parse_int=_json_number)
    alone = next((found for found in _ESCAPES.finditer(text) if found["alone"]), None)
    if alone is not None:
        raise json.JSONDecodeError(f"{shown(alone[0])} is half of a character", text, alone.start())
    return document


_ESCAPES: Final = re.compile(r"\\(?:ud[89ab]..\\ud[c-f]..|u(?P<alone>d[89a-f]..)|.)", re.IGNORECASE)
"""In JSON there are backslashes in texts alone, so that those of the file can be looked at one after the other."""


def _json_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads so many digits and no more
        raise ValueError(f"{shown(digits)} cannot be here; it must be a number of ordinary size") from None


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return mapping
