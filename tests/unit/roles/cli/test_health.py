from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fabric.errors import FabricError, PeerLost
from fabric.ids import Incarnation, SliceId
from fabric.messages import SchedulerStanding, SliceReport, SliceState, StatusListed
from roles.cli.health import health, why_unready
from roles.runtime.process import RunFile, write_run_file
from roles.runtime.run_directory import claim


def slice_in(state: SliceState) -> SliceReport:
    return SliceReport(SliceId("a/gpu0/0"), state, "", (), 0, 0)


def status(*slices: SliceReport, standing: str | None = None, **counters: float) -> StatusListed:
    told = None if standing is None else SchedulerStanding(standing, 1, 1, 3, 0)
    return StatusListed("role", 1, slices, (), counters, standing=told)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (status(is_ready=1.0), ""),
        (status(is_ready=0.0), "is not connected to the active scheduler"),
        (status(standing="active"), ""),
        (status(standing="standby"), ""),
        (status(standing="candidate"), "asks to be active, and has 1 of 3 agents"),
        (status(slice_in(SliceState.READY), is_ready=1.0), ""),
        (status(slice_in(SliceState.STARTING), is_ready=1.0), "a/gpu0/0 is starting"),
        (status(slice_in(SliceState.FAILED), is_ready=1.0), "a/gpu0/0 is failed"),
        (status(slice_in(SliceState.LOST), is_ready=1.0), "a/gpu0/0 is lost"),
        (status(slice_in(SliceState.DRAINING), is_ready=1.0), ""),
        (status(slice_in(SliceState.FAILED), standing="active"), ""),
    ],
)
def test_what_keeps_a_role_from_its_part(told: StatusListed, reason: str) -> None:
    """A slice that does not serve is its agent's trouble: the scheduler does its own part."""
    assert why_unready(told) == reason


def test_a_gateway_waits_for_a_frontend() -> None:
    told = StatusListed("gateway-0", 1, (), (), {"is_ready": 0.0})
    assert why_unready(told) == "has no frontend that wants requests, or ends"


def test_nothing_runs(tmp_path: Path) -> None:
    done = CliRunner().invoke(health, ["--run-dir", str(tmp_path)])
    assert isinstance(done.exception, PeerLost)


@pytest.mark.parametrize("flags", [[], ["--live"]])
def test_a_role_that_is_gone_is_not_well_and_without_any_there_is_no_cluster(
    tmp_path: Path, flags: list[str]
) -> None:
    gone = 2**22 + 1  # no process: the kernel gives smaller numbers
    run_file = RunFile("frontend-0", gone, Incarnation("1234abcd"), {"client": ["ipc:///nowhere"]})
    write_run_file(tmp_path, run_file)
    words = ["--run-dir", str(tmp_path), "--json", *flags]
    done = CliRunner().invoke(health, words)
    assert isinstance(done.exception, PeerLost)
    assert str(done.exception) == f"no role runs in {tmp_path} any more: frontend-0 is gone"
    with claim(tmp_path):  # by `tenuto up`, which starts it again
        write_run_file(tmp_path, run_file)
        done = CliRunner().invoke(health, words)
    assert isinstance(done.exception, FabricError)
    assert not isinstance(done.exception, PeerLost)
    assert json.loads(done.stdout) == {"frontend-0": {"ready": False, "reason": "is gone"}}
