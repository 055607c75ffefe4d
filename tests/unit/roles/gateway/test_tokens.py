from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabric.errors import ConfigError, Unauthorised
from roles.gateway.tokens import Tokens
from roles.gateway.trace_context import traceparent_of

ONE, OTHER = "a-token-of-some-length", "another.token/of+length="


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_one_of_the_tokens_is_needed(tmp_path: Path) -> None:
    tokens = Tokens(written(tmp_path / "t", f"{ONE}\n{OTHER}\n"))
    tokens.check(f"Bearer {ONE}")
    tokens.check(f"bearer  {OTHER}")
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ONE}",
        ONE,
        f"Bearer {ONE}x",
        f"Bearer {ONE} {OTHER}",
    ):
        with pytest.raises(Unauthorised):
            tokens.check(wrong)


def test_without_a_file_everybody_may_ask() -> None:
    Tokens(None).check(None)


def test_a_file_that_changed_is_taken_over_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    path = written(tmp_path / "t", ONE)
    tokens = Tokens(path)
    written(path, OTHER)
    os.utime(path, ns=(1, 1))
    tokens.refresh()
    tokens.check(f"Bearer {OTHER}")
    with pytest.raises(Unauthorised):
        tokens.check(f"Bearer {ONE}")
    written(path, "short")
    os.utime(path, ns=(2, 2))
    with pytest.raises(ConfigError):
        tokens.refresh()
    tokens.check(f"Bearer {OTHER}")


@pytest.mark.parametrize("is_another_file", [False, True])
def test_a_file_that_changed_under_its_former_time_is_taken_over(
    tmp_path: Path, *, is_another_file: bool
) -> None:
    """As `cp -p`, `rsync -t` and archives carry times over: who is not in it any more asks no more."""
    path = written(tmp_path / "t", ONE)
    os.utime(path, ns=(1, 1))
    tokens = Tokens(path)
    draft = written(tmp_path / "draft" if is_another_file else path, OTHER[: len(ONE)])
    os.utime(draft, ns=(1, 1))
    draft.replace(path)
    tokens.refresh()
    tokens.check(f"Bearer {OTHER[: len(ONE)]}")
    with pytest.raises(Unauthorised):
        tokens.check(f"Bearer {ONE}")


@pytest.mark.parametrize(
    ("text", "mode"),
    [("", 0o600), ("short", 0o600), ("with spaces", 0o600), (ONE, 0o644), (f"{ONE}é", 0o600)],
)
def test_files_that_are_of_no_use_are_refused(tmp_path: Path, text: str, mode: int) -> None:
    with pytest.raises(ConfigError):
        Tokens(written(tmp_path / "t", text, mode))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokens(tmp_path / "nowhere")


def test_traceparents() -> None:
    right = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"  # the standard's example
    assert traceparent_of(right) == right
    assert traceparent_of(None) is None
    for wrong in (
        right.upper(),
        right + "-x",
        f"ff{right[2:]}",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        "nix",
        right[:-1],
    ):
        assert traceparent_of(wrong) is None


def test_a_file_without_a_time_as_images_have_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "t", f"{ONE}\n")
    os.utime(path, ns=(0, 0))
    Tokens(path).check(f"Bearer {ONE}")
