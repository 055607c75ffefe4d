from __future__ import annotations

from pathlib import Path

import pytest

from roles.config.read_config import parse_config
from roles.lab.frontend_limit import FRONTEND_RPS_MAX, remarks_on_frontends

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("frontends", "total_rps", "needed"), [(1, 931_170.6, 67), (2, 28_001.0, 3), (2, 28_000.0, 0)]
)
def test_a_rate_that_the_frontends_of_a_file_do_not_carry_is_told_with_how_many_would(
    frontends: int, total_rps: float, needed: int
) -> None:
    document = {
        "models": [{"name": "a", "slo_ms": 50, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
        "cluster": {"gpus": 1, "frontends": frontends},
    }
    remarks = remarks_on_frontends(parse_config(document, Path()), total_rps)
    assert [f"this takes {needed}, each" in one for one in remarks] == [True] * bool(needed)
    if frontends == 1:
        assert remarks[0].startswith("931,171 r/s is more than the file's 1 frontend can pass on: ")


def test_the_figure_is_that_of_the_documentation() -> None:
    page = (ROOT / "docs/operate/scaling.md").read_text(encoding="utf-8")
    assert f"a core is full at {FRONTEND_RPS_MAX:,} requests/s" in page
