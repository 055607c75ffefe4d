from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

import roles.lab.reproduce
from fabric.errors import ConfigError
from roles.cli.reproduce import reproduce
from roles.lab.reproduce.document import chapters_of
from roles.lab.reproduce.report import Grid, Range, Reproduction, Row, Value

GRID = Grid("Goodput:", ("usher", "milp"), (("1 GPU", (10.5, None)), ("2 GPUs", (20.0, 30.25))))
FOUND = Reproduction(
    "test-table",
    "A table | of a test",
    "Test paper, table 1.",
    (
        Row("GPUs", 6, 6),
        Row("goodput, r/s", 1092.04, 1092.0385, "rounded | there"),
        Row("plan", "A(10 %, 4)", "A(10 %, 4)"),
        Row("unstated", None, 3.0),
        Row("gain, %", Range(2.0, 2.4), 3.0, "of another | network"),
    ),
)


@pytest.fixture(autouse=True)
def _experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("experiments_of_a_test")
    words = Reproduction("words", "Only words", "Test paper.", (Row("plan", "a", "b"),), (GRID,))

    def sampled(*, is_full: bool) -> Reproduction:
        return Reproduction(
            "sampled", "Sampled", "Test paper.", (Row("runs", None, 5880.0 if is_full else 10.0),)
        )

    def fails() -> Reproduction:
        raise ConfigError("it needs pulp")

    vars(module).update(table=lambda: FOUND, words=lambda: words, sampled=sampled, fails=fails)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {"test-table": "experiments_of_a_test:table", "words": "experiments_of_a_test:words"}
    monkeypatch.setattr(roles.lab.reproduce, "EXPERIMENTS", names)
    monkeypatch.setattr("roles.cli.reproduce.EXPERIMENTS", names)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(reproduce, list(arguments))


def test_without_a_name_the_names_are_listed() -> None:
    assert run().stdout.split() == ["test-table", "words"]
    assert json.loads(run("--json").stdout) == ["test-table", "words"]


def test_an_experiment_is_a_table_of_the_papers_numbers_beside_ours() -> None:
    text = run("test-table").stdout
    for word in ("1092.04", "A(10 %, 4)", "Test paper, table 1."):
        assert word in text


def test_bars_without_a_stated_number_are_a_grid() -> None:
    assert "30.25" in run("words").stdout
    grid = {
        "title": "Goodput:",
        "rows": [
            {"name": "1 GPU", "values": {"usher": 10.5, "milp": None}},
            {"name": "2 GPUs", "values": {"usher": 20.0, "milp": 30.25}},
        ],
    }
    assert json.loads(run("words", "--json").stdout)["grids"] == [grid]


def test_the_json_has_every_row() -> None:
    printed = json.loads(run("test-table", "--json").stdout)
    assert printed["rows"][1] == {
        "what": "goodput, r/s",
        "paper": 1092.04,
        "ours": 1092.0385,
        "ratio": 1092.0385 / 1092.04,
        "note": "rounded | there",
    }
    assert [one["name"] for one in json.loads(run("--all", "--json").stdout)] == ["test-table", "words"]


def test_all_of_them_are_written_as_one_document_that_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "reproduction.md"
    assert run("--all", "--write", str(path)).exit_code == 0
    text = path.read_text(encoding="utf-8")
    assert "| goodput, r/s | 1092.04 | 1092.04 | 1.000 | rounded \\| there |" in text
    assert "| unstated |  | 3 |  |  |" in text
    assert "- [Only words](#words)" in text
    assert (
        "Goodput:\n\n| | usher | milp |\n|---|---:|---:|\n| 1 GPU | 10.5 |  |\n| 2 GPUs | 20 | 30.25 |\n"
        in text
    )
    chapters = chapters_of(text)
    assert chapters is not None
    assert list(chapters) == ["test-table", "words"]
    assert chapters["words"].startswith("## Only words\n\nTest paper. Of ")
    assert run("--all", "--write", str(path)).exit_code == 0
    assert path.read_text(encoding="utf-8") == text


def test_the_document_says_what_agrees_within_5_percent_and_what_does_not(tmp_path: Path) -> None:
    path = tmp_path / "reproduction.md"
    run("test-table", "--write", str(path))
    text = path.read_text(encoding="utf-8")
    assert "| [A table \\| of a test](#test-table) | 3 | 2 |\n| all | 3 | 2 |" in text.replace(
        "A table | of", "A table \\| of"
    )
    assert "| [test-table](#test-table) | gain, % | 2 to 2.4 | 3 | 1.250 | of another \\| network |" in text
    assert "Not run for this page yet (`--all --missing`): words." in text
    assert run("words", "--write", str(path)).exit_code == 0
    assert "Not run for this page" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("paper", "ours", "ratio"),
    [
        (2.0, 3.0, 1.5),
        (0.0, 0.0, 1.0),
        (0.0, 1.0, None),
        (Range(2.0, 2.4), 2.2, 1.0),
        (Range(2.0, 2.4), 1.0, 0.5),
        (Range(2.0, 2.4), 4.8, 2.0),
        ("less", 1.0, None),
        (1.0, "A", None),
        (None, 1.0, None),
    ],
)
def test_a_ratio_is_ours_over_the_papers(paper: Value, ours: Value, ratio: float | None) -> None:
    assert Row("what", paper, ours).ratio == ratio


def test_what_is_sampled_is_run_in_full_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        roles.lab.reproduce,
        "EXPERIMENTS",
        {"sampled": "experiments_of_a_test:sampled", "words": "experiments_of_a_test:words"},
    )
    monkeypatch.setattr("roles.cli.reproduce.EXPERIMENTS", roles.lab.reproduce.EXPERIMENTS)
    assert json.loads(run("sampled", "--json").stdout)["rows"][0]["ours"] == 10
    assert json.loads(run("sampled", "--full", "--json").stdout)["rows"][0]["ours"] == 5880
    assert run("words", "--full").exit_code == 0, "what is no sample is run as it is"


def test_one_experiment_replaces_its_own_chapter_only(tmp_path: Path) -> None:
    path = tmp_path / "reproduction.md"
    assert run("words", "--write", str(path)).exit_code == 0
    text = path.read_text(encoding="utf-8").replace("| plan | a | b |", "| plan | a | old |")
    path.write_text(text, encoding="utf-8")
    assert run("test-table", "--write", str(path)).exit_code == 0
    kept = path.read_text(encoding="utf-8")
    assert "old" in kept
    assert kept.index("#test-table") < kept.index("#words")
    assert run("test-table", "words", "--write", str(path)).exit_code == 0
    assert "old" not in path.read_text(encoding="utf-8")


def test_what_fails_is_named_and_loses_nobody_elses_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reproduction.md"
    names = roles.lab.reproduce.EXPERIMENTS
    broken = {
        "words": names["words"],
        "broken": "experiments_of_a_test:fails",
        "test-table": names["test-table"],
    }
    monkeypatch.setattr(roles.lab.reproduce, "EXPERIMENTS", broken)
    monkeypatch.setattr("roles.cli.reproduce.EXPERIMENTS", broken)
    result = run("--all", "--write", str(path))
    assert result.exit_code == 6
    assert "broken failed: ConfigError: it needs pulp" in result.stderr
    text = path.read_text(encoding="utf-8")
    assert "**Failed:** ConfigError: it needs pulp" in text
    assert "1092.04" in text
    assert [one["name"] for one in json.loads(run("--all", "--json").stdout)] == ["words", "test-table"]
    repaired = {**broken, "broken": names["words"]}
    monkeypatch.setattr(roles.lab.reproduce, "EXPERIMENTS", repaired)
    again = run("--all", "--missing", "--write", str(path), "--json")
    assert [one["name"] for one in json.loads(again.stdout)] == ["words"], "only the broken one is run again"
    assert "Failed" not in path.read_text(encoding="utf-8")


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Mine\n", encoding="utf-8")
    result = run("words", "--write", str(path))
    assert result.exit_code == 2
    assert "was not written by this command" in result.output
    assert path.read_text(encoding="utf-8") == "# Mine\n"


def test_a_picture_shows_rows_with_two_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "table.png"
    assert run("test-table", "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    nothing = run("words", "--plot", str(path))
    assert nothing.exit_code == 1
    assert "no numbers" in nothing.output


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    error = run("test-tabel").exception
    assert isinstance(error, ConfigError)
    assert "did you mean test-table" in str(error)


@pytest.mark.parametrize(
    "arguments", [("words", "--all"), ("--plot", "x.png"), ("--write", "x.md"), ("words", "--missing")]
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
