from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.catalog import QUICK, Long, Quick
from benchmarks.figures import Figures, Line, aligned, read, shown
from benchmarks.report import Machine, Result, command_of, document, result_of, run

MACHINE = Machine("EPYC", 2, 24.6, "6.1", "3.11.7", "4.3.5", "2026-11-21")


def figures() -> Figures:
    found = Figures("latency", load_average=0.5, is_awake=False)
    table = found.table("one at a time, ms", "who", "p50", "count")
    table.rows += [("ours", 0.5321, 1_200), ("chain", None, 3)]
    found.lines += [
        Line("p50 of the chain's", 3.5, at_most=3.0),
        Line("requests/s", 12_000.0, at_least=10_000),
    ]
    found.remarks.append("a sender was late")
    return found


def test_the_page_says_what_was_measured_where_and_what_misses_its_line() -> None:
    page = document(
        MACHINE,
        [Result("latency", "python -m benchmarks.latency", figures())],
        [Long("python -m benchmarks.x", "Elsewhere.")],
    )
    assert page == (
        "# Benchmarks\n\n"
        "Written by `make bench` (`benchmarks/report.py`); each section is one command. A ratio compares what ran in"
        " turn in one run. Latency counts from the intended moment wherever load is open loop.\n\n"
        "2026-11-21: 2 cores of EPYC, 25 GB; Linux 6.1, Python 3.11.7, libzmq 4.3.5. Clients, servers and"
        " devices share these cores; each section says the load average before it.\n\n"
        "## Lines\n\n"
        "1 of 2 are held.\n\n"
        "| benchmark | what | measured | line | held |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| latency | p50 of the chain's | 3.5 | ≤ 3 | **no** |\n"
        "| latency | requests/s | 12,000 | ≥ 10000 | yes |\n\n"
        "## Latency\n\n"
        "`python -m benchmarks.latency`; load average 0.50.\n\n"
        "one at a time, ms:\n\n"
        "| who | p50 | count |\n"
        "| --- | ---: | ---: |\n"
        "| ours | 0.532 | 1,200 |\n"
        "| chain | - | 3 |\n\n"
        "- a sender was late\n\n"
        "## Longer ones\n\n"
        "Not part of `make bench`.\n\n"
        "| command | last figures |\n"
        "| --- | --- |\n"
        "| `python -m benchmarks.x` | Elsewhere. |\n"
    )


def test_the_page_says_where_cores_were_kept_awake() -> None:
    found = figures()
    found.is_awake = True
    page = document(MACHINE, [Result("latency", "python -m benchmarks.latency", found)], [])
    assert "`python -m benchmarks.latency`; load average 0.50, cores kept from going idle." in page


def test_what_has_no_figures_is_shown_as_it_printed_and_what_failed_says_why() -> None:
    page = document(
        MACHINE,
        [
            Result("links", "python -m benchmarks.links", text="a table\n"),
            Result("x", "python x", failure="no torch"),
        ],
        [],
    )
    assert "## Links\n\n`python -m benchmarks.links`\n\n```\na table\n```\n" in page
    assert "## X\n\n`python x`\n\nDid not run: no torch\n" in page
    assert "## Lines" not in page


def test_figures_come_back_from_json_as_they_were() -> None:
    assert read(json.loads(json.dumps(figures().as_json()))) == figures()


@pytest.mark.parametrize(
    ("measured", "at_least", "at_most", "is_held"),
    [
        (3.0, None, 3.0, True),
        (3.1, None, 3.0, False),
        (9.9, 10.0, None, False),
        (float("nan"), None, 1.0, False),
    ],
)
def test_a_line_is_held_up_to_its_bound_and_never_by_what_was_not_measured(
    measured: float, at_least: float | None, at_most: float | None, is_held: bool
) -> None:
    assert Line("x", measured, at_least, at_most).is_held is is_held


def test_cells_show_what_counts() -> None:
    assert [shown(cell) for cell in (None, 0.012345, 12.345, 123.4, 12_345.6, 12_345, "word")] == [
        "-",
        "0.0123",
        "12.3",
        "123",
        "12,346",
        "12,345",
        "word",
    ]
    assert aligned([("who", "p50"), ("ours", "1")]) == ["who   p50", "ours    1"]


def test_a_run_leaves_its_figures_or_its_failure_and_nothing_of_the_run_before(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    quick = Quick("one", (str(script),))
    assert result_of(quick, tmp_path) is None
    script.write_text(
        f"import sys; open(sys.argv[2], 'w').write({json.dumps(json.dumps(figures().as_json()))}); print('told')"
    )
    run(quick, tmp_path)
    assert result_of(quick, tmp_path) == Result("one", command_of(quick), figures=figures())
    script.write_text("print('only words')")
    run(quick, tmp_path)
    assert result_of(quick, tmp_path) == Result("one", command_of(quick), text="only words\n")
    script.write_text("raise SystemExit('it needs a GPU')")
    run(quick, tmp_path)
    assert result_of(quick, tmp_path) == Result("one", command_of(quick), failure="it needs a GPU")


def test_every_quick_benchmark_is_there_under_its_own_name() -> None:
    assert all(find_spec(quick.words[1]) is not None for quick in QUICK)
    assert len({quick.name for quick in QUICK}) == len(QUICK)
