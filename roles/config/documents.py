"""Reading a YAML or JSON file into plain values, strictly: a key written twice is an error, not a surprise."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

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
    try:
        return _read_json(text) if path.suffix == ".json" else _read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # PyYAML shows the place over several lines
        raise ConfigError(f"{path}: cannot be parsed: {reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply") from error


def read_value(text: str, where: str) -> Any:
    """A value written on the command line, as YAML or JSON; ConfigError names `where`."""
    try:
        return _read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: cannot be parsed: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: is nested too deeply") from error


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


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


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
