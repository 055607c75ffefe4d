from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fabric.errors import ConfigError
from fabric.ids import ModelId
from roles.config.read_config import parse_config
from roles.workload.arrivals import NO_PRIORITY, ArrivalSource, Trace, Workload, read_trace, workload_of

A, B = ModelId("a"), ModelId("b")


def source(process: str = "poisson", rate_rps: float = 1000.0, **more: object) -> ArrivalSource:
    return ArrivalSource(A, process, ((0.0, rate_rps),), **more)  # type: ignore[arg-type]


def gaps(
    one: ArrivalSource, until_ms: float = 200_000.0
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.diff(one.arrivals(7, until_ms))


@pytest.mark.parametrize(
    ("process", "shape", "cv2"),
    [("poisson", 1.0, 1.0), ("gamma", 0.2, 5.0), ("gamma", 0.05, 20.0), ("gamma", 4.0, 0.25)],
)
def test_gaps_have_the_rate_and_the_burstiness_asked_for(process: str, shape: float, cv2: float) -> None:
    found = gaps(source(process, shape=shape))
    assert found.mean() == pytest.approx(1.0, rel=0.05)
    assert found.var() / found.mean() ** 2 == pytest.approx(cv2, rel=0.08)


def test_uniform_gaps_are_constant_and_end_where_they_should() -> None:
    arrived = source("uniform", rate_rps=10_000, phase=0.0).arrivals(1, 100.0)
    assert_allclose(arrived, np.arange(1000) * 0.1, atol=1e-9)


def test_phase_0_starts_at_0_and_a_drawn_phase_within_the_first_gap() -> None:
    assert source("uniform", 4.0, phase=0.0).arrivals(1, 1000.0)[0] == 0.0
    starts = [source("uniform", 4.0).arrivals(seed, 1000.0)[0] for seed in range(50)]
    assert all(0 <= start < 250 for start in starts)
    assert np.mean(starts) == pytest.approx(125, rel=0.3)


@pytest.mark.parametrize(
    ("process", "shape"),
    [("poisson", 1.0), ("gamma", 0.05), ("gamma", 0.5), ("gamma", 4.0), ("uniform", 1.0)],
)
def test_a_run_offers_the_rate_asked_for_from_its_first_moment_on(process: str, shape: float) -> None:
    one = source(process, shape=shape)  # its mean gap is 1 ms
    runs = [one.arrivals(seed, 4.0) for seed in range(1500)]
    for until_ms in (0.5, 1.0, 4.0):
        counts = np.array([np.searchsorted(run, until_ms) for run in runs])
        standard_error = counts.std() / np.sqrt(counts.size)
        assert abs(counts.mean() - until_ms) < 4 * standard_error + 1e-9


@pytest.mark.parametrize(
    ("process", "shape"), [("poisson", 1.0), ("gamma", 0.05), ("gamma", 0.5), ("gamma", 4.0)]
)
def test_the_first_arrival_is_what_is_left_of_a_gap_under_way(process: str, shape: float) -> None:
    """Its mean is E[gap squared] / 2 E[gap] (Cox, Renewal Theory, 5.2): longer gaps are met more often."""
    one = source(process, shape=shape)
    firsts = np.array([one.arrivals(seed, 1000.0)[0] for seed in range(1500)])
    expected = (1 + 1 / shape) / 2
    assert abs(firsts.mean() - expected) < 4 * firsts.std() / np.sqrt(firsts.size)


def test_many_rare_models_offer_the_sum_of_their_rates() -> None:
    rare = tuple(ArrivalSource(ModelId(f"rare-{n}"), "poisson", ((0.0, 0.1),)) for n in range(2000))
    offered = np.concatenate(Workload(1, rare).arrivals(10_000.0))
    assert offered.size == pytest.approx(2000, rel=0.1)
    assert np.count_nonzero(offered < 1000) == pytest.approx(200, rel=0.3)


def test_a_seed_gives_the_same_arrivals_and_another_seed_others() -> None:
    one = source("gamma", shape=0.5)
    assert_array_equal(one.arrivals(1, 5000.0), one.arrivals(1, 5000.0))
    assert one.arrivals(1, 5000.0)[0] != one.arrivals(2, 5000.0)[0]


def test_the_stream_is_frozen_so_that_old_results_can_be_played_again() -> None:
    arrived = source().arrivals(1, 5.0)
    assert_allclose(arrived, [0.658316, 2.032038, 2.117628, 2.759868, 2.90358], atol=1e-6)


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    one = source()
    short = one.arrivals(1, 1000.0)
    assert_array_equal(one.arrivals(1, 50_000.0)[: short.size], short)


def test_another_model_changes_nobody_elses_arrivals() -> None:
    alone = Workload(1, (source(),)).arrivals(1000.0)
    both = Workload(1, (ArrivalSource(B, "poisson", ((0.0, 50.0),)), source())).arrivals(1000.0)
    assert_array_equal(alone[0], both[1])


def test_scaling_keeps_the_pattern() -> None:
    one = source("gamma", shape=0.3)
    assert_allclose(one.scaled(2.0).arrivals(1, 500.0), one.arrivals(1, 1000.0) / 2)


def test_a_rate_step_takes_effect_at_its_moment() -> None:
    stepped = ArrivalSource(A, "uniform", ((0.0, 100.0), (1000.0, 0.0), (3000.0, 1000.0)), phase=0.0)
    arrived = stepped.arrivals(1, 4000.0)
    assert np.count_nonzero(arrived < 1000) == 100
    assert np.count_nonzero((arrived >= 1000) & (arrived < 3000)) == 0
    assert np.count_nonzero(arrived >= 3000) == 1000
    assert arrived[100] == 3000.0
    assert stepped.expected(500.0, 3500.0) == pytest.approx(550)


def test_steps_that_start_late_are_silent_before() -> None:
    arrived = ArrivalSource(A, "poisson", ((2000.0, 1000.0),)).arrivals(1, 3000.0)
    assert arrived[0] >= 2000
    assert arrived.size == pytest.approx(1000, rel=0.15)


def test_zero_rate_and_no_time_give_no_arrivals() -> None:
    assert source(rate_rps=0.0).arrivals(1, 1000.0).size == 0
    assert source().arrivals(1, 0.0).size == 0
    assert ArrivalSource(A, "poisson", ()).arrivals(1, 1000.0).size == 0


# ---------------------------------------------------------------- traces


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_is_played_as_recorded_and_repeats_after_one_mean_gap(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "at_ms\n10\n20\n40\n"), [A])
    assert trace.period_ms == 55
    played = ArrivalSource(A, "trace", trace=trace)
    assert_array_equal(played.arrivals(1, 100.0), [10, 20, 40, 65, 75, 95])
    assert_array_equal(played.scaled(2.0).arrivals(1, 50.0), [5, 10, 20, 32.5, 37.5, 47.5])
    assert played.expected(15.0, 70.0) == 3


def test_a_trace_that_repeats_without_end_is_counted_before_it_is_played(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "at_ms\n0.000001\n"), [A])
    assert ArrivalSource(A, "trace", trace=trace).expected(0.0, 60_000.0) == pytest.approx(6e10)
    for times in ("0\n1e-320\n", "5e-324\n"):
        with pytest.raises(ConfigError, match="at least 1e-06 ms, or be at 0"):
            read_trace(written(tmp_path, f"at_ms\n{times}"), [A])


def test_a_trace_of_several_models_gives_each_its_own(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "at_ms,model\n1,a\n2,b\n2,a\n3,other\n"), [A, B])
    assert_array_equal(trace.at_ms[A], [1, 2])
    assert_array_equal(trace.at_ms[B], [2])


def test_a_trace_may_have_priorities(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "at_ms,model,priority\n1,a,3\n2,b,\n4,a,\n"), [A, B])
    of_a = ArrivalSource(A, "trace", trace=trace)
    assert_array_equal(of_a.arrivals(1, 10.0), [1, 4, 6.5, 9.5])
    assert_array_equal(of_a.priorities(10.0), [3, NO_PRIORITY, 3, NO_PRIORITY])
    assert_array_equal(ArrivalSource(B, "trace", trace=trace).priorities(5.0), [NO_PRIORITY])
    assert_array_equal(read_trace(written(tmp_path, "at_ms,priority\n1,9\n"), [A]).priorities[A], [9])
    plain = ArrivalSource(A, "trace", trace=read_trace(written(tmp_path, "at_ms\n1\n"), [A]))
    assert plain.priorities(10.0) is None
    assert Workload(1, (of_a, source())).priorities(2.0)[1] is None


def test_what_of_a_trace_is_not_played_as_recorded_is_said(tmp_path: Path) -> None:
    rows = "".join(f"{5 + n},{name}\n" for n, name in enumerate(["other", "other", "third"]))
    trace = read_trace(written(tmp_path, f"at_ms,model\n1,a\n{rows}11,b\n"), [A, B])
    workload = Workload(1, (ArrivalSource(A, "trace", trace=trace), ArrivalSource(B, "trace", trace=trace)))
    left_out = "trace.csv: 3 rows are not played: no model of the file with this trace is called other (2), third (1)"
    assert workload.remarks(13.0) == [left_out]
    assert trace.period_ms == 13.5
    assert workload.remarks(27.0) == [
        left_out,
        "trace.csv: lasts 0.0135 s, the run 0.027 s: it is played 2.0 times",
    ]
    assert Workload(1, (source(),)).remarks(1e6) == []


def test_a_trace_of_a_single_moment_is_played_once() -> None:
    played = ArrivalSource(A, "trace", trace=Trace({A: np.array([0.0])}, 0.0))
    assert_array_equal(played.arrivals(1, 100.0), [0])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("at_ms\n1\n3\n2\n", "line 4: 2 ms comes after 3 ms: times must ascend"),
        ("at_ms\n1\nx\n", "line 3: 'x' is not a number of ms"),
        ("at_ms\n-1\n", "line 2: '-1' must be 0 or more"),
        ("at_ms\nnan\n", "line 2: 'nan' must be 0 or more"),
        ("at_ms\n1e300\n", "line 2: '1e300' must be 0 or more, and at most 31,536,000,000"),
        ("at_ms,model\n1\n", "line 2: 2 columns expected, not 1"),
        ("time\n1\n", "line 1: the header must be"),
        ("at_ms,priority,model\n1,1,a\n", "line 1: the header must be"),
        ("at_ms,priority\n1,10\n", "line 2: '10' must be a priority from 0 to 9, or empty"),
        ("at_ms,priority\n1," + "9" * 5_000, "must be a priority from 0 to 9, or empty"),
        ("at_ms,priority\n1,-1\n", "line 2: '-1' must be a priority from 0 to 9, or empty"),
        ("", "line 1: the header must be"),
        ("at_ms\n", "the trace has no arrivals"),
        ("at_ms,model\n1,b\n", "the trace has no arrivals of a"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_trace(written(tmp_path, text), [A])


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"at_ms\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path, [A])


def test_a_configuration_becomes_a_workload(tmp_path: Path) -> None:
    written(tmp_path, "at_ms,model\n5,b\n")
    line = {"alpha_ms": 1, "beta_ms": 5}
    config = parse_config(
        {
            "seed": 9,
            "models": [
                {"name": "a", "slo_ms": 30, "profile": line, "rate_rps": 100},
                {
                    "name": "b",
                    "slo_ms": 30,
                    "profile": line,
                    "arrival": {"process": "trace", "path": "trace.csv"},
                },
            ],
            "cluster": {"gpus": 1},
        },
        tmp_path,
    )
    workload = workload_of(config)
    assert workload.seed == 9
    assert workload.sources[0].steps == ((0.0, 100.0),)
    assert_array_equal(workload.arrivals(6.0)[1], [5])
    assert workload_of(config, seed=3).seed == 3


def test_a_model_without_a_rate_is_refused(tmp_path: Path) -> None:
    config = parse_config(
        {
            "models": [{"name": "a", "slo_ms": 30, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
            "cluster": {"gpus": 1},
        },
        tmp_path,
    )
    with pytest.raises(ConfigError, match="a has no rate_rps"):
        workload_of(config)
