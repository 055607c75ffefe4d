"""Every number that a user can write has a range, in a file and on the command line, and is refused briefly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
from click.testing import CliRunner

from fabric.errors import ConfigError, FabricError
from fabric.policy_options import Number
from policies.batching.registry import DISCIPLINES
from policies.placement.registry import PLACEMENTS
from roles.cli.group import COMMANDS, LazyGroup
from roles.cli.json_output import echo_json
from roles.cli.options import FloatRange, IntRange, OutputPath
from roles.config.read_config import parse_config
from roles.config.sections import SECTIONS

BAD = (math.nan, math.inf, -math.inf, 1e300, -1e300, 10**400, -(10**400))
MODEL = {"name": "m", "slo_ms": 30, "profile": {"alpha_ms": 1, "beta_ms": 5}}
FILE = {"models": [MODEL], "cluster": {"gpus": 1}}


def model(**changes: Any) -> dict[str, Any]:
    return {**FILE, "models": [{**MODEL, **changes}]}


def cluster(**changes: Any) -> dict[str, Any]:
    return {**FILE, "cluster": changes}


def three_shards(**last: Any) -> dict[str, Any]:
    """A model and a node for each; `last`: keys of the third shard's model, node and scheduler."""
    shards = {"model": 2, "node": 2, "scheduler": 2} | last
    models = [{**MODEL, "name": f"m{k}", "shard": k} for k in (0, 1, shards["model"])]
    return {
        "models": [{**one, "name": f"m{at}"} for at, one in enumerate(models)],
        "cluster": {
            "shards": 3,
            "nodes": [{"host": f"h{at}", "shard": k} for at, k in enumerate((0, 1, shards["node"]))],
            "schedulers": [
                {"host": "h0", "port": 5550 - at, "shard": k}
                for at, k in enumerate((0, 1, shards["scheduler"]))
            ],
        },
    }


def application(fan_out: Any = 1, **changes: Any) -> dict[str, Any]:
    """Of two stages, the second of which is asked `fan_out` times."""
    stages = {"first": {"model": "m"}, "second": {"model": "m", "after": "first", "fan_out": fan_out}}
    own = {"name": "a", "slo_ms": 100, "rate_rps": 1, "stages": stages}
    return {**FILE, "applications": [{**own, **changes}]}


def glued(**changes: Any) -> dict[str, Any]:
    """An application whose second stage has a glue."""
    written = application()
    written["applications"][0]["stages"]["second"]["glue"] = {"python": "a:B", **changes}
    return written


def documents(x: Any) -> Mapping[str, dict[str, Any]]:
    """One file for each number that may be written, by the name of its section and its own."""
    loader = {"zoo": "transformers", "arch": "bert"}
    heartbeats = {"interval_ms": 1, "patience_ms": 1500}
    network = ("control_ms", "data_ms_per_item", "result_ms", "jitter_ms")
    return {
        "seed": {**FILE, "seed": x},
        "rate_rps": {**model(weight=1), "rate_rps": x},
        "popularity.zipf": {**FILE, "rate_rps": 5, "popularity": {"zipf": x}},
        "models.slo_ms": model(slo_ms=x),
        "heads.slo_ms": model(slo_ms=1, heads=[{"name": "h", "slo_ms": x}, {"name": "i"}]),
        "models.rate_rps": model(rate_rps=x),
        "models.rate_rps step's moment": model(rate_rps=[[0, 1], [x, 1]]),
        "models.rate_rps step's rate": model(rate_rps=[[0, x]]),
        "models.weight": {**model(weight=x), "rate_rps": 5},
        "models.memory_mb": model(memory_mb=x),
        "models.priority": model(priority=x),
        "models.run_limit_ms": model(run_limit_ms=x),
        "arrival.shape": model(arrival={"process": "gamma", "shape": x}),
        "arrival.phase": model(arrival={"process": "uniform", "phase": x}),
        "profile.alpha_ms": model(profile={"alpha_ms": x, "beta_ms": 5}),
        "profile.beta_ms": model(profile={"alpha_ms": 1, "beta_ms": x}),
        "profile.max_batch": model(profile={"alpha_ms": 1, "beta_ms": 5, "max_batch": x}),
        "profile.table": model(profile={"table": {1: x}}),
        "profile.table's batch": model(profile={"table": {1: 5, x: 6}}),
        "loader.top_k": model(loader={"zoo": "torchvision", "arch": "resnet50", "top_k": x}),
        "loader.seed": model(loader={**loader, "seed": x}),
        "loader.stages": model(loader={**loader, "stages": x}),
        "loader.ranks": model(loader={"python": "a:B", "ranks": x}),
        "loader.sequence_length": model(loader={**loader, "sequence_length": x}),
        "cluster.gpus": cluster(gpus=x),
        "cluster.frontends": cluster(gpus=1, frontends=x),
        "nodes.gpus": cluster(nodes=[{"host": "a", "gpus": x}]),
        "nodes.memory_gb": cluster(nodes=[{"host": "a", "memory_gb": x}]),
        "nodes.price_per_hour": cluster(nodes=[{"host": "a", "price_per_hour": x}]),
        "nodes.pin_cores": cluster(nodes=[{"host": "a", "pin_cores": x}]),
        **{f"heartbeats.{name}": cluster(gpus=1, heartbeats={**heartbeats, name: x}) for name in heartbeats},
        "cluster.schedulers": cluster(gpus=1, schedulers=x),
        "cluster.shards": {
            "models": [{**MODEL, "name": name} for name in "abc"],
            "cluster": {"shards": x, "nodes": [{"host": name} for name in "abcd"]},
        },
        "models.shard": three_shards(model=x),
        "models.term": model(term=x),
        "nodes.shard": three_shards(node=x),
        "schedulers.shard": three_shards(scheduler=x),
        "gateway.request_mb": cluster(gpus=1, gateway={"request_mb": x}),
        "gateway.connections": cluster(gpus=1, gateway={"connections": x}),
        "schedulers.port": cluster(gpus=1, schedulers=[{"host": "a", "port": x}]),
        "deploy.port": {**FILE, "deploy": {"port": x}},
        **{f"network.{name}": cluster(gpus=1, network={name: x}) for name in network},
        "applications.slo_ms": application(slo_ms=50 * x),
        "applications.rate_rps": application(rate_rps=x),
        "applications.rate_rps step's moment": application(rate_rps=[[0, 1], [x, 1]]),
        "applications.weight": {**application(rate_rps=None, weight=x), "rate_rps": 5},
        "stages.fan_out": application(fan_out=x),
        "fan_out.poisson": application(fan_out={"poisson": x}),
        "glue.limit_ms": glued(limit_ms=x),
        "profile.stages": model(profile={"table": {1: 5}, "stages": {2: [x, x]}}),
        "profile.stages' number": model(profile={"table": {1: 5}, "stages": {x: [1, 2]}}),
        "fan_out.share": application(fan_out={"share": 1 if x == 2 else x}),  # two is no part
    }


def test_no_number_of_the_file_is_left_out_here() -> None:
    here = set(documents(1))
    for section, struct in SECTIONS.items():
        for field, kind in get_type_hints(struct).items():
            if ("int" in str(kind) or "float" in str(kind)) and "Section" not in str(kind):
                path = f"{section}.{field}".lstrip(".").replace("by_type.", "profile.")
                assert path in here or path == "loader.config", path


@pytest.mark.parametrize("path", list(documents(1)))
def test_a_number_in_the_file_that_cannot_be_meant_is_refused_in_a_few_words(path: str) -> None:
    parse_config(documents(2)[path], Path("/nowhere"))
    for value in BAD:
        with pytest.raises(ConfigError) as caught:
            parse_config(documents(value)[path], Path("/nowhere"))
        assert len(str(caught.value)) < 250
        assert any(name in str(caught.value) for name in path.split("'", maxsplit=1)[0].split("."))


LONG = "x" * 400


@pytest.mark.parametrize(
    "written",
    [
        {**FILE, LONG: 1},
        model(**{LONG: 1}),
        model(name=LONG),
        model(slo_ms=LONG),
        model(arrival={"process": LONG}),
        model(loader={"python": LONG}),
        model(profile={"ref": LONG}),
        model(profile={"table": {LONG: 1}}),
        {**FILE, "batching": LONG},
        {**FILE, "batching": {"eager": {LONG: 1}}},
        {**FILE, "batching": {"eager": {"drop": LONG}}},
        {**FILE, "placement": LONG},
        {**FILE, "placement": {"tenuto": {"floor": LONG}}},
        {**FILE, "placement": {"given": {"slices": [{"gpu": 0, "models": [{"model": "m", "batch": LONG}]}]}}},
        cluster(gpus=1, interference=LONG),
        cluster(nodes=[{"host": LONG}]),
        cluster(nodes=[{"host": "a", "device": LONG}]),
        {**FILE, "listen": {"http": LONG}},
        {**FILE, "listen": {"http": f"127.0.0.1:{'9' * 5000}"}},
    ],
)
def test_a_text_that_cannot_be_meant_is_refused_in_a_few_words(written: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(written, Path("/nowhere"))
    assert len(str(caught.value)) < 300


def test_a_run_time_below_what_a_clock_can_tell_is_refused() -> None:
    for profile in ({"alpha_ms": 1e-300, "beta_ms": 0}, {"table": {1: 1e-300, 2: 5}}):
        with pytest.raises(ConfigError, match=r"models\[0\].profile: .*must take from 0.000001 ms"):
            parse_config(model(profile=profile), Path("/nowhere"))


def test_a_policy_s_numbers_have_a_range() -> None:
    schemas = [one.options for one in DISCIPLINES.values()]
    schemas += [one.options for one in PLACEMENTS.values()]
    numbers = [
        (name, option) for schema in schemas for name, option in schema.items() if isinstance(option, Number)
    ]
    assert len(numbers) > 10
    for name, number in numbers:
        for value in BAD:
            with pytest.raises(ConfigError, match=f"{name} is .*it must be a") as caught:
                number.check(value, name)
            assert len(str(caught.value)) < 250


# ---------------------------------------------------------------- the command line


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield " ".join((*path, name)), command


ALL = {name: command for name, command in commands(LazyGroup()) if name.split()[0] in COMMANDS}
NUMBERS = [
    (name, option.opts[-1])
    for name, command in ALL.items()
    for option in command.params
    if isinstance(option.type, click.types.FloatParamType | click.types.IntParamType)
]


def test_every_number_on_the_command_line_has_both_ends() -> None:
    assert len(NUMBERS) > 10
    for name, command in ALL.items():
        for option in command.params:
            if isinstance(option.type, click.types.FloatParamType | click.types.IntParamType):
                assert isinstance(option.type, FloatRange | IntRange), (name, option.name)
                assert None not in (option.type.min, option.type.max), (name, option.name)


@pytest.mark.parametrize(("name", "option"), NUMBERS)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e300", "9" * 400, "9" * 5000, "-1", "word"])
def test_a_number_that_cannot_be_meant_is_a_usage_error_in_a_few_words(
    name: str, option: str, text: str
) -> None:
    result = CliRunner().invoke(ALL[name], [f"{option}={text}"])
    assert result.exit_code == 2
    complaint = result.output.splitlines()[-1]
    assert option in complaint
    assert len(complaint) < 200


def test_a_file_to_be_written_is_asked_about_before_the_work() -> None:
    written = ("plot_path", "trace_path", "out", "write_path", "journal")
    for name, command in ALL.items():
        for option in command.params:
            if option.name in written:
                assert isinstance(option.type, OutputPath), (name, option.name)


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--duration", "1", "--trace"),
        ("simulate", "--duration", "1", "--plot"),
        ("plan", "--plot"),
        ("compare", "--duration", "1", "--placements", "symphony", "--workers", "1", "--plot"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
@pytest.mark.parametrize("path", ["/dev/full", "/proc/tenuto"])
def test_a_file_that_only_seems_writable_is_one_line_and_no_defect(
    tmp_path: Path, words: tuple[str, ...], path: str
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(model(rate_rps=10)), encoding="utf-8")
    result = CliRunner().invoke(ALL[words[0]], [str(file), *words[1:], path])
    assert isinstance(result.exception, FabricError), result.output
    assert str(result.exception).startswith(f"{path} cannot be written: ")


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(model(rate_rps=10)), encoding="utf-8")
    for wrong in (tmp_path / "absent" / "trace.json", file / "trace.json", tmp_path):
        result = CliRunner().invoke(ALL["simulate"], [str(file), "--trace", str(wrong)])
        assert result.exit_code == 2
        assert "--trace" in result.output


# ---------------------------------------------------------------- results


def test_what_is_not_a_number_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    echo_json({"a": math.nan, "b": [1.5, -math.inf, ("x", math.inf)], "c": {"d": 3, "e": None, "f": True}})
    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [1.5, None, ["x", None]],
        "c": {"d": 3, "e": None, "f": True},
    }


def test_zero_has_no_sign_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    echo_json({"gpus": -0.0, "rest": [-0.0, -1.5]})
    assert capsys.readouterr().out == '{"gpus": 0.0, "rest": [0.0, -1.5]}\n'


def test_results_are_printed_by_one_function() -> None:
    root = Path(__file__).parents[4]
    printing = [
        path.name
        for room in ("roles", "deploy")
        for path in (root / room).rglob("*.py")
        if re.search(r"echo\(\s*json\.dumps", path.read_text())
    ]
    assert printing == ["json_output.py"]
