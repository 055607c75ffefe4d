"""What a newcomer sees first: the demo's table on a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deploy.local.demo.command import CONFIG, Account, accounts_table, verdict_of
from roles.config.cluster import ClusterConfig
from roles.config.read_config import load_config

HEADINGS = (
    *("model", "sent", "answered", "late", "expired", "refused"),
    *("p50 ms", "p99 ms", "batch", "largest"),
)


def config() -> ClusterConfig:
    return load_config(CONFIG)


def test_the_table_shows_every_word_and_number_in_80_columns() -> None:
    account = Account(12345, 1234, 1235, 1236, 1111.11, 2222.22, 33.33, 512)
    accounts = {model.name: account for model in config().models}
    out = io.StringIO()
    Console(file=out, width=80).print(accounts_table(accounts, dict.fromkeys(accounts, 54321)))
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for heading in HEADINGS:
        assert heading in text
    for model in config().models:
        assert model.name in text
    for number in ("54321", "12345", "1234", "1235", "1236", "1111.1", "2222.2", "33.3", "512"):
        assert number in text


def test_a_model_that_got_no_answer_has_no_latency() -> None:
    silent = Account(0, 0, 3, 4, None, None, None, None)
    out = io.StringIO()
    Console(file=out, width=80).print(accounts_table({"digits": silent}, {"digits": 7}))
    assert "nan" not in out.getvalue()


@pytest.mark.parametrize(
    ("answered", "late", "accuracy", "verdict"),
    [
        (
            100,
            1,
            0.98,
            "it works: 99 of 100 requests were answered within their SLO, and the answers are right",
        ),
        (100, 2, 0.98, "it works, but this host is too slow or too busy for these SLOs: only 98 of 100 "),
        (100, 0, 0.96, "it does not work here: too few answers are right; 100 of 100 "),
        (0, 0, 0.0, "it does not work here: too few answers are right; 0 of 100 "),
    ],
)
def test_the_demo_ends_with_a_verdict(answered: int, late: int, accuracy: float, verdict: str) -> None:
    account = Account(answered, late, 0, 0, None, None, None, None)
    assert verdict_of({"digits": account}, {"digits": 100}, accuracy).startswith(verdict)
