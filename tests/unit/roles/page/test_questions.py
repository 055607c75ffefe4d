"""What may be asked of a page, and which command that is."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from fabric.clock import MonotonicClock
from fabric.errors import InvalidInput, Overloaded, PeerLost
from roles.cli.what_if import what_if
from roles.cli.why import why
from roles.page.questions import ANSWERED_MAX, WAITING_MAX, Question, Questions, question_of
from roles.page.shell import Page, PageOptions
from tests.scarcity import no_descriptors

MODELS = frozenset({"resnet50", "a=b c", "--json"})


def no_room_for_files() -> AbstractContextManager[object]:
    refused = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return mock.patch.object(tempfile, "TemporaryFile", side_effect=refused)


def test_a_question_is_a_command_with_numbers_written_anew() -> None:
    assert question_of("why", "model=resnet50", MODELS).arguments == ("why", "--json", "--", "resnet50")
    asked = question_of("what-if", "model=a%3Db+c&slo_ms=40.50&rate=1e0&gpus=2", MODELS)
    assert asked.arguments == ("what-if", "--json", "--slo=a=b c=40.5", "--rate=a=b c=1", "--gpus=2")
    assert question_of("why", "model=--json", MODELS).arguments[-2:] == ("--", "--json")


@pytest.mark.parametrize(
    ("kind", "query"),
    [
        ("why", ""),
        ("why", "model=other"),
        ("why", "model=resnet50&slo_ms=3"),
        ("what-if", ""),
        ("what-if", "model=resnet50"),
        ("what-if", "slo_ms=40"),
        ("what-if", "model=resnet50&slo_ms=nan"),
        ("what-if", "model=resnet50&slo_ms=-1"),
        ("what-if", "model=resnet50&slo_ms=4;reboot"),
        ("what-if", "model=resnet50&rate=11"),
        ("what-if", "gpus=17"),
        ("what-if", "gpus=%00"),
        ("what-if", "gpus=1&config=/etc/passwd"),
        ("what-if", "&".join(f"x{number}=1" for number in range(50))),
        ("what-if", "%ff=%ff&&"),
    ],
)
def test_anything_else_is_refused_with_what_would_be_right(kind: str, query: str) -> None:
    with pytest.raises(InvalidInput):
        question_of(kind, query, MODELS)


@pytest.mark.parametrize(
    "question",
    [
        question_of("why", "model=--json", MODELS),
        question_of("what-if", "model=--json&slo_ms=4&rate=2&gpus=3", MODELS),
    ],
)
def test_the_commands_take_these_arguments(question: Question, tmp_path: Path) -> None:
    command = {"why": why, "what-if": what_if}[question.arguments[0]]
    arguments = ["--run-dir", str(tmp_path), *question.arguments[1:]]
    result = CliRunner().invoke(command, arguments)
    assert "no cluster runs in" in str(result.exception), result.output


def test_the_same_question_is_not_asked_twice_and_few_may_wait() -> None:
    questions = Questions(Path("/nowhere"), None, MonotonicClock())
    first = questions.ask(Question(("why", "a")))
    assert questions.ask(Question(("why", "a"))) == first
    for number in range(WAITING_MAX - 1):
        questions.ask(Question(("why", str(number))))
    with pytest.raises(Overloaded):
        questions.ask(Question(("why", "one more")))
    assert questions.answer(first) == b""
    assert questions.answer(first + 100) is None
    assert questions.is_busy


def test_only_the_newest_answers_are_kept() -> None:
    questions = Questions(Path("/nowhere"), None, MonotonicClock())
    numbers = []
    for number in range(WAITING_MAX + ANSWERED_MAX + 5):
        numbers.append(questions.ask(Question(("why", str(number)))))
        asked = questions._waiting.popleft()
        asked.answer = b"{}"
    assert questions.answer(numbers[0]) is None
    assert questions.answer(numbers[-1]) == b"{}"


@pytest.mark.parametrize("scarcity", [no_descriptors, no_room_for_files])
def test_a_host_that_has_nothing_left_for_a_command_is_an_answer(
    scarcity: Callable[[], AbstractContextManager[object]],
) -> None:
    questions = Questions(Path("/nowhere"), None, MonotonicClock())
    number = questions.ask(Question(("why", "a")))
    with scarcity():
        questions.turn()
    answer = json.loads(questions.answer(number) or b"")
    assert answer["error"].startswith("this host cannot run the command: ")
    assert not questions.is_busy


def test_what_a_command_remarks_is_in_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that a frontend did not answer: the figures are of the others alone."""
    script = "import sys; print('{}'); print('tenuto: a\\nodd\\ntenuto: b', file=sys.stderr)"
    monkeypatch.setattr("roles.page.questions.module_command", lambda *_: [sys.executable, "-c", script])
    questions = Questions(Path("/nowhere"), None, MonotonicClock())
    number = questions.ask(Question(("why", "m")))
    questions.turn()
    assert questions._running is not None
    questions._running.process.wait(60)
    questions.turn()
    assert json.loads(questions.answer(number) or b"") == {"answer": {}, "remarks": ["a", "b"]}


@pytest.mark.parametrize("error", [PeerLost("nobody"), OSError(errno.EMFILE, os.strerror(errno.EMFILE))])
def test_a_look_that_fails_is_told_and_the_page_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("roles.page.polling.look", mock.Mock(side_effect=error))
    with closing(Page(PageOptions(tmp_path, "127.0.0.1:0"))) as page:
        page._look()
        assert json.loads(page._feed.answer(0, "", 0.0))["trouble"] == str(error)
