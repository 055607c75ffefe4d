"""The public traces of Azure Functions, in files written by hand and by the example."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from examples.azure_like_trace import rate_a_minute, write
from fabric.errors import ConfigError
from fabric.ids import ModelId
from roles.workload.arrivals import ArrivalSource, read_trace

A, B = ModelId("a"), ModelId("b")
HEAD = "HashOwner,HashApp,HashFunction,Trigger"


def trace_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_counts_by_minute_are_dealt_to_the_models_in_turn(tmp_path: Path) -> None:
    path = trace_file(tmp_path, f"{HEAD},1,2,3\no,p,f1,http,2,0,1\no,p,f2,timer,0,3,0\no,q,f3,queue,1,1,1\n")
    found = read_trace(path, [A, B])
    by_minute = {
        name: np.bincount((at_ms // 60_000).astype(int), minlength=3).tolist()
        for name, at_ms in found.at_ms.items()
    }
    assert by_minute == {A: [3, 1, 2], B: [0, 3, 0]}, "f1 and f3 to the first model, f2 to the second"
    assert found.period_ms == 180_000
    assert all(np.all(np.diff(at_ms) >= 0) for at_ms in found.at_ms.values())
    again = read_trace(path, [A, B])
    assert all(np.array_equal(again.at_ms[name], found.at_ms[name]) for name in (A, B)), "alike each time"
    assert ArrivalSource(A, "trace", trace=found).expected(0.0, 360_000.0) == 12, "it repeats, 6 a round"


def test_invocations_one_by_one_start_a_duration_before_their_end(tmp_path: Path) -> None:
    """Starts: 10 - 4 = 6, 8 - 1 = 7, 9 - 2.5 = 6.5 s; the first of them is the beginning."""
    path = trace_file(tmp_path, "app,func,end_timestamp,duration\nx,f,10,4\nx,g,8,1\nx,f,9,2.5\n")
    found = read_trace(path, [A, B])
    assert found.at_ms[A].tolist() == [0.0, 500.0]
    assert found.at_ms[B].tolist() == [1000.0]
    assert found.period_ms == 1500.0, "the last arrival and a mean gap"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEAD}\no,p,f,http\n", "line 1: behind Trigger"),
        (f"{HEAD},1,3\no,p,f,http,1,1\n", "line 1: behind Trigger"),
        (f"{HEAD},1,2\no,p,f,http,1\n", "line 2: 6 columns expected, not 5"),
        (f"{HEAD},1\no,p,f,http,-1\n", "line 2: '-1' is not a number of invocations"),
        (f"{HEAD},1\no,p,f,http,1.5\n", "line 2: '1.5' is not a number of invocations"),
        (f"{HEAD},1\no,p,f,http,20000001\n", "line 2: more than 20,000,000"),
        (f"{HEAD},1\no,p,f,http,999999999999999999999\n", "line 2: '999999999999999999999' is not a number"),
        (f"{HEAD},1\n", "the trace has no arrivals"),
        (f"{HEAD},1\no,p,f,http,1\n", "no arrivals of b"),
        ("app,func,end_timestamp,duration\n", "the trace has no arrivals"),
        ("app,func,end_timestamp,duration\nx,f,now,1\n", "line 2: 'now' is not a number of seconds"),
        ("app,func,end_timestamp,duration\nx,f,nan,1\n", "line 2: 'nan' s is not within"),
        ("app,func,end_timestamp,duration\nx,f,5\n", "line 2: 4 columns expected, not 3"),
        ("app,func\n", "the header must be"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_trace(trace_file(tmp_path, text), [A, B])


def test_the_example_has_the_published_statistics(tmp_path: Path) -> None:
    """45 % at most once an hour, 81 % once a minute; the others have 99.6 % of the invocations."""
    parts = [(number + 0.5) / 10_000 for number in range(10_000)]
    rates = np.array([rate_a_minute(part) for part in parts])
    assert np.mean(rates <= 1 / 60) == pytest.approx(0.45, abs=0.001)
    assert np.mean(rates <= 1) == pytest.approx(0.81, abs=0.001)
    assert rates[rates > 1].sum() / rates.sum() == pytest.approx(0.996, abs=0.002)
    assert np.log10(rates.max() / rates.min()) == pytest.approx(8, abs=0.01)


def test_the_examples_file_is_read_and_has_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    write(path, functions=100, minutes=20, rate_rps=20.0, seed=1)
    found = read_trace(path, [A, B])
    assert found.period_ms == 20 * 60_000
    total = sum(at_ms.size for at_ms in found.at_ms.values())
    assert total / (20 * 60) == pytest.approx(20.0, rel=0.15), (
        "the first minutes of its day are on a rising wave"
    )
