"""Every history of small clusters' elections, to a depth that a suite can afford; `python -m tests.election_model` goes deeper."""

from __future__ import annotations

import pytest

from tests.election_model import Cluster, Rules, Wrong, explore, served


@pytest.mark.parametrize(
    ("rules", "depth", "states_min"),
    [
        (Rules(restarts=0, closes=0), 7, 1_000),
        (Rules(restarts=1, closes=0), 6, 1_000),
        (Rules(restarts=0, closes=1), 6, 1_000),
        (Rules(schedulers=1), 6, 500),
        (Rules(agents=1), 6, 500),
    ],
    ids=str,
)
def test_from_the_start_of_a_cluster(rules: Rules, depth: int, states_min: int) -> None:
    assert explore(Cluster(rules), depth) > states_min


@pytest.mark.parametrize(
    ("rules", "depth", "states_min"),
    [
        (Rules(restarts=0, closes=0), 7, 1_000),
        (Rules(restarts=1, closes=0), 6, 1_000),
        (Rules(restarts=0, closes=1), 6, 1_000),
        (Rules(agents=1, restarts=1, closes=1), 6, 500),
    ],
    ids=str,
)
def test_from_a_cluster_that_serves(rules: Rules, depth: int, states_min: int) -> None:
    assert explore(served(rules), depth) > states_min


def test_an_agent_that_forgets_what_it_granted_is_found() -> None:
    """The model can fail: here an agent answers before it has written, and starts anew."""

    class Forgetful(Cluster):
        def _written(self, letter: object, *, is_written: bool) -> None:
            disk = self.disks[letter.agent]  # type: ignore[attr-defined]
            super()._written(letter, is_written=is_written)  # type: ignore[arg-type]
            self.disks[letter.agent] = disk  # type: ignore[attr-defined]

    with pytest.raises(Wrong, match="not on its disk"):
        explore(Forgetful(Rules(restarts=1, closes=0)), 7)
