"""Files that no editor writes: whatever is in them, reading one gives a configuration or an error of one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fabric.errors import ConfigError
from roles.cli.group import tenuto
from roles.cli.overrides import RecordedArrivals
from roles.config.overrides import Override
from roles.config.read_config import load_config, parse_config

GOOD = "[{name: a, slo_ms: 50, rate_rps: 5, profile: {alpha_ms: 1, beta_ms: 1}}]"
TAGS = (
    *(
        f"!!{name}"
        for name in ("null", "bool", "int", "float", "str", "binary", "timestamp", "value", "merge")
    ),
    *(f"!!{name}" for name in ("map", "seq", "set", "omap", "pairs", "python/name:os.system", "nothing")),
    "!",
    "!own",
    "!<a%0Ab>",
    "!<%ED%A0%BD>",
    "",
)
VALUES = (
    *("", "''", "x", "maybe", "soon", "~", "=", "<<", "1", "-1", "+", ".", "_", "0x", "0b2", "08", ".inf", "-.nan"),
    *("1_000", "1:30", "1e400", "1" + ":59" * 200, "1" + ":59" * 200 + ".5", "9" * 5_000, "0x" + "f" * 5_000),
    *("2001-02-28", "2001-02-30", "2001-13-13", "2001-02-28 25:61:61", "99999-01-01", "aGVsbG8=", "é", "true"),
    *("[]", "{}", "[a, 1]", "{a: 1}", "{a, b}", "[a: 1, b: 2]", "[[a, 1]]", "{=: 1}", "{<<: 1}", "{<<: [1]}"),
    *('"\\ud83d"', '"\\udc00\\ud83d"', '"\\0"', '"\\n"', '"a\\u2028b"', '"\\x7f"', "*nobody", "&a [*a]", "&a {b: *a}"),
)  # fmt: skip
KEYS = (
    *("on", "1", "1.5", "~", "null", "2001-02-28", "[a, b]", "{a: 1}", "=", "<<", "''", "é", "x" * 500),
    *('"a\\nb"', '"a\\r\\nb"', '"a\\u2028b"', '"\\e[31m"', '"\\ud83d"', '"\\0"', '"`"', '"[...]"', '"a.b"', '"$"'),
    *('"- at `"', '"x` - at `$.models[...]"', '"x` - at `$.cluster"', '"x` - at `key` in `$[...]"', "'0'"),
)  # fmt: skip
PLACES = (
    "{here}",
    "models: {here}\ncluster: {{gpus: 1}}",
    "models: [{{name: a, slo_ms: {here}, profile: {{alpha_ms: 1, beta_ms: 1}}}}]\ncluster: {{gpus: 1}}",
    "models: [{{name: a, rate_rps: 1, slo_ms: 9, profile: {{table: {here}}}}}]\ncluster: {{gpus: 1}}",
    "models: [{{name: {here}, slo_ms: 9, rate_rps: 1}}]\ncluster: {{gpus: 1}}",
    "models: {good}\ncluster: {here}",
    "models: {good}\ncluster: {{gpus: {here}}}",
    "models: {good}\ncluster: {{nodes: {here}}}",
    "models: {good}\ncluster: {{gpus: 1, addresses: {here}}}",
    "models: {good}\ncluster: {{gpus: 1}}\nbatching: {here}",
    "models: {good}\ncluster: {{gpus: 1}}\nplacement: {{tenuto: {here}}}",
    "models: {good}\ncluster: {{gpus: 1}}\nseed: {here}",
    "models: {good}\ncluster: {{gpus: 1}}\ndeploy: {{env: {here}}}",
)


def hostile_yaml() -> Iterator[str]:
    """Every tag before every value and key, and every value and key without one at every place."""
    keys = [f"{{{key}: 1}}" for key in KEYS]
    for place in PLACES:
        yield from (place.format(here=here, good=GOOD) for here in (*VALUES, *keys))
    for tag in TAGS:
        yield from (f"models: {tag} {here}\ncluster: {{gpus: 1}}" for here in (*VALUES, *keys))
        yield from (f"models: {GOOD}\ncluster: {{gpus: 1, {tag} {key}: 1}}" for key in KEYS)


def hostile_json() -> Iterator[str]:
    """The same places with what only JSON has: escapes by halves, numbers without a limit, keys that look like a path."""
    texts = [
        r'"\ud83d"',
        r'"\udc00\ud83d"',
        r'"\\\ud83d"',
        r'"\u0000"',
        r'"\n"',
        '""',
        '"x` - at `$.models[...]"',
    ]
    values = [
        *texts,
        "NaN",
        "-Infinity",
        "1e400",
        "9" * 5_000,
        "[]",
        "{}",
        "null",
        "[[[]]]",
        '{"a": 1, "a": 2}',
    ]
    written = [*values, *(f"{{{text}: {value}}}" for text in texts for value in values)]
    good = json.dumps([{"name": "a", "slo_ms": 50, "rate_rps": 5, "profile": {"alpha_ms": 1, "beta_ms": 1}}])
    places = (
        "{here}",
        '{{"models": {here}, "cluster": {{"gpus": 1}}}}',
        '{{"models": [{here}], "cluster": {{"gpus": 1}}}}',
        '{{"models": [{{"name": {here}, "slo_ms": 9}}], "cluster": {{"gpus": 1}}}}',
        '{{"models": {good}, "cluster": {here}}}',
        '{{"models": {good}, "cluster": {{"gpus": {here}}}}}',
        '{{"models": {good}, "cluster": {{"gpus": 1}}, "batching": {here}}}',
        '{{"models": {good}, "cluster": {{"gpus": 1}}, "deploy": {{"env": {here}}}}}',
    )
    yield from (place.format(here=here, good=good) for place in places for here in written)


def check_refusals(path: Path, documents: Iterator[str], read: Callable[[Path], object]) -> None:
    """Each document is read, or refused by one line that a person understands; some are read."""
    count = refused = 0
    for text in documents:
        path.write_text(text, encoding="utf-8")
        count += 1
        try:
            read(path)
        except ConfigError as error:
            refused += 1
            told = str(error)
            assert told.isprintable(), (text, told)
            assert not told.startswith((f"{path}: :", "None")), (text, told)
            assert "Expected `" not in told, (text, told)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} ({error}) for {text[:300]!r}") from error
    assert 0.5 * count < refused < count


@pytest.mark.parametrize(("name", "documents"), [("c.yaml", hostile_yaml), ("c.json", hostile_json)])
def test_a_file_is_a_configuration_or_an_error_of_one_line(
    tmp_path: Path, name: str, documents: Callable[[], Iterator[str]]
) -> None:
    check_refusals(tmp_path / name, documents(), load_config)


@pytest.mark.parametrize(
    "within_itself",
    [
        GOOD.replace("{alpha_ms: 1, beta_ms: 1}", "&p {by_type: {x: *p}}"),
        GOOD.replace("{alpha_ms: 1, beta_ms: 1}", "&p {ref: *p}"),
        GOOD.replace("profile:", "loader: &l {zoo: transformers, config: *l}, profile:"),
        "&m [*m]",
        f"{GOOD}\nplacement: &p {{given: *p}}",
        f"{GOOD}\nbatching: &b {{fixed: *b}}",
        f"{GOOD}\ndeploy: &d {{env: *d}}",
    ],
)
def test_what_holds_itself_is_an_error_of_one_line(tmp_path: Path, within_itself: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"models: {within_itself}\ncluster: {{gpus: 1}}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as told:
        load_config(file)
    assert len(str(told.value).splitlines()) == 1


def test_so_it_is_where_the_command_line_says_something_else(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_ms,model\n1,a\n", encoding="utf-8")

    def overrides(document: Mapping[str, Any]) -> Sequence[Override]:
        return [
            *RecordedArrivals.read(trace).overrides(document),
            Override("models.a.slo_ms", 60, "--set"),
            Override("cluster.network.control_ms", 1, "--set"),
        ]

    check_refusals(tmp_path / "c.json", hostile_json(), lambda path: load_config(path, overrides))


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"cluster": {True: 1}}, "cluster: has the key True; a key must be text: write it in quotes"),
        ({1: 2}, "the file: has the key 1; a key must be text: write it in quotes"),
        ({"batching": {"eager": {None: 1}}}, "batching.eager: has the key None; a key must be text: write it in quotes"),
        ({"cluster": {"a\nb": 1}}, r"cluster.a\nb: unknown key; there is gpus, "),
        ({"cluster": {"": 1}}, "cluster.'': unknown key; there is gpus, "),
        ({"x` - at `$.models[...]": 1}, "x` - at `$.models[...]: unknown key; there is models, "),
        ({"cluster": {"x` - at `$.models[...]": 1}}, "cluster.x` - at `$.models[...]: unknown key; there is gpus, "),
        ({"cluster": {"\ud83d": 1}}, r"'\ud83d' holds half of a character"),
        ({"rate_rps": [[1, 2, 3]]}, "rate_rps[0]: is a list of 3; it must be one of 2"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named_with_its_path_and_what_would_be_right(
    written: dict[Any, Any], told: str
) -> None:
    document = {"models": [{"name": "a"}], "cluster": {"gpus": 1}, **written}
    with pytest.raises(ConfigError) as caught:
        parse_config(document, Path(), source="f")
    assert str(caught.value).startswith(f"f: {told}")


@pytest.mark.parametrize("name", ["[a]", "{a: 1}", "~", '"a\\nb"'])
def test_a_model_to_add_whose_name_is_none_is_not_the_one_that_is_asked_for(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"name: {name}\nslo_ms: 5\n", encoding="utf-8")
    result = CliRunner().invoke(tenuto, ["models", "add", str(path), "a", "--run-dir", str(tmp_path)])
    assert str(result.exception) == f"{path}: has no model 'a'"
