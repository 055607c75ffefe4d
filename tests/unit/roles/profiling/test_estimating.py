"""`tenuto profile --estimate`: what it writes, what plans make of it, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fabric.errors import ProfileError
from fabric.messages import LoaderSpec
from profiles.estimator.gpus import gpu_spec
from profiles.measured import MeasuredProfile
from profiles.store import read_measured, read_profile, write_measured
from roles.cli.plan import plan
from roles.cli.profile import profile
from roles.profiling.estimating import EstimateAsk, estimated
from tests.unit.profiles.estimator.trained import quickly_trained

DIGITS = LoaderSpec(python="deploy.local.demo.digits_model:Digits")


def estimate(gpu_type: str = "v100", batches: tuple[int, ...] = (4, 16)) -> tuple[MeasuredProfile, list[str]]:
    said: list[str] = []
    ask = EstimateAsk("digits", DIGITS, gpu_type, batches)
    return estimated(ask, lambda _: None, said.append, quickly_trained), said


@pytest.fixture(scope="module")
def of_v100() -> MeasuredProfile:
    return estimate()[0]


def test_an_estimate_has_error_bars_and_says_what_it_is(of_v100: MeasuredProfile, tmp_path: Path) -> None:
    path = tmp_path / "digits.json"
    write_measured(path, of_v100)
    assert read_measured(path) == of_v100
    assert [point.batch_size for point in of_v100.points] == [1, 4, 16]
    for point in of_v100.points:
        assert point.low_ms is not None
        assert point.high_ms is not None
        assert 0 < point.low_ms <= point.p50_ms <= point.high_ms
        assert point.runs == 0
        assert point.memory_bytes > 0
    assert of_v100.source.startswith("ESTIMATE, not measured")
    found = read_profile(path)
    assert found.source == of_v100.source
    assert found.error is not None
    assert found.error > 0
    assert set(found.requirements) == {1, 4, 16}


def test_a_plan_says_that_it_rests_on_an_estimate(of_v100: MeasuredProfile, tmp_path: Path) -> None:
    write_measured(tmp_path / "digits.json", of_v100)
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "models:\n"
        " - {name: digits, slo_ms: 50, rate_rps: 100, profile: {ref: digits.json}}\n"
        " - {name: other, slo_ms: 50, rate_rps: 100, profile: {ref: thesis-v100/alexnet}}\n"
        "cluster: {gpus: 2, gpu_type: v100}\n"
        "placement: usher\n"
    )
    said = json.loads(CliRunner().invoke(plan, [str(file), "--why", "--json"]).stdout)
    told = [one for one in said["why"] if "ESTIMATE" in one["chosen"]]
    assert [one["subject"] for one in told] == ["profile of digits on v100"]
    assert told[0]["metrics"]["run time within %"] > 0
    placed = {model["model"] for gpu in said["gpus"] for one in gpu["slices"] for model in one["models"]}
    assert placed == {"digits", "other"}
    assert "ESTIMATE" in CliRunner().invoke(plan, [str(file), "--why"]).output


def test_a_gpu_without_records_is_said_to_be_one() -> None:
    _, said = estimate("t4", (1,))
    assert any("no kernel records of Tesla T4" in note for note in said)


def test_a_gpu_that_nothing_is_known_of_is_refused() -> None:
    with pytest.raises(ProfileError, match="knows no GPU 'abacus'"):
        estimate("abacus")


def test_batches_that_do_not_fit_are_left_out_with_a_note() -> None:
    found, said = estimate("p100", (1, 1 << 24))
    assert [point.batch_size for point in found.points] == [1]
    assert any("batches from 16777216 on" in note for note in said)
    assert gpu_spec("p100").memory_bytes == 16 << 30


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "MODEL is missing"),
        (["resnet50", "--estimate"], "--gpu TYPE"),
        (["resnet50", "--gpu", "v100"], "are for --estimate"),
        (["resnet50", "--estimate", "--gpu", "v100", "--shares", "50"], "--shares"),
        (
            ["resnet50", "--estimate", "--gpu", "v100", "--device", "cpu"],
            "--estimate does not go with '--device'",
        ),
        (["--estimate-check", __file__, "--gpu", "p100", "--limit", "300"], "not go with '--limit'"),
        (["resnet50", "--estimate-check", __file__, "--gpu", "p100"], "not go with '[MODEL]'"),
        (["--estimate-check", __file__], "--gpu TYPE"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(profile, arguments)
    assert result.exit_code == 2, result.output
    assert reason in result.output


def test_records_are_checked_operator_by_operator(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[4] / "profiles" / "data" / "kernels" / "p100.csv.gz"
    header, *lines = gzip.decompress(shipped.read_bytes()).decode().splitlines()
    asked = tmp_path / "some.csv.gz"
    few = [line for line in lines if line.startswith("ln,")][::14]
    asked.write_bytes(gzip.compress("\n".join([header, *few]).encode()))
    result = CliRunner().invoke(profile, ["--estimate-check", str(asked), "--gpu", "p100", "--json"])
    ((op, errors),) = json.loads(result.stdout).items()
    assert (op, errors["n"]) == ("ln", 100)
    assert 0 < errors["median_error"] <= errors["p90_error"]
    assert errors["median_error"] < errors["roofline_median_error"]
