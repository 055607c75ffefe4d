"""The search at a living cluster, with the cluster taken out."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric.errors import PeerLost
from roles.benchmark.targets import default_processes, one_of_each
from roles.config.read_config import parse_config
from roles.lab.goodput import Question, find_goodput, question_of
from roles.lab.live_goodput import InlineExecutor

DOCUMENT = {
    "models": [{"name": "a", "slo_ms": 25, "rate_rps": 100, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
    "cluster": {"gpus": 1, "frontends": 5},
}


def asked() -> Question:
    return question_of(parse_config(DOCUMENT, Path()), warmup_s=0.1, duration_s_min=1.0)


def test_the_search_finds_what_the_cluster_can_carry_one_load_at_a_time() -> None:
    sent: list[float] = []

    def can_carry(question: Question, seed: int, total_rps: float) -> bool:
        del question, seed
        sent.append(total_rps)
        return total_rps <= 123.0

    found = find_goodput(asked(), (1,), InlineExecutor(), 1, lambda _: None, can_carry)
    assert found.goodput_rps == pytest.approx(123.0, rel=0.005)
    assert len(sent) == len(set(sent)) < 20


def test_a_cluster_that_is_gone_ends_the_search() -> None:
    def gone(question: Question, seed: int, total_rps: float) -> bool:
        del question, seed, total_rps
        raise PeerLost("nobody there")

    with pytest.raises(PeerLost):
        find_goodput(asked(), (1,), InlineExecutor(), 1, lambda _: None, gone)


def test_every_frontend_gets_a_sender() -> None:
    addresses = ["ipc:///run/0.sock", "tcp://127.0.0.1:1", "ipc:///run/1.sock", "tcp://127.0.0.1:2"]
    assert one_of_each(addresses) == ("ipc:///run/0.sock", "ipc:///run/1.sock")
    assert default_processes(parse_config(DOCUMENT, Path())) >= 5
