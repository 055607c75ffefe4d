"""What `tenuto profile` shows on a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from profiles.measured import MeasuredProfile, Point, Subject
from profiles.requirements import Requirements
from roles.cli.profile import points_table


def test_the_largest_numbers_are_whole_in_80_columns() -> None:
    subject = Subject("m", "ab" * 32, "cuda", "v100", "Tesla V100", "550.54", "2.11", "2026-11-21", ())
    point = Point(100.0, 4096, 12345.678, 12346.789, 12347.891, 12345, 81920 << 20, 700.0, 1980.0)
    measured = MeasuredProfile(subject, [point], 1, 1, {4096: Requirements(80.0, 20.0, 100.0, 2.0)}, {}, None)
    out = io.StringIO()
    Console(file=out, width=80).print(points_table(measured))
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for words in ("p50 ms", "p95 ms", "p99 ms", "memory MB", "SM %"):
        assert words in text
    for number in ("12345.678", "12346.789", "12347.891", "4096", "81920", "700", "1980"):
        assert number in text
