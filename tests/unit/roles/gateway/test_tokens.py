from __future__ import annotations

import os
from pathlib import Path

import pytest

from fabric.errors import ConfigError, Unauthorised
from roles.gateway.tokens import Tokens
from roles.gateway.trace_context import traceparent_of
from tests.unit.roles.gateway.doors import Doors, StandIn, at_doors, model

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


OF_A_PAGE = (
    "Host: evil.example",
    "Host: evil.example:8000",
    "Host:",
    "Host: localhost\r\nOrigin: https://evil.example",
    "Host: localhost\r\nOrigin: null",
    "Host: localhost\r\nSec-Fetch-Site: cross-site",
    "Host: localhost\r\nSec-Fetch-Site: same-site",
)
"""A site whose name was made to lead here, and one that asks across sites: without a token, any page that a user of this host has open."""
OF_A_PROGRAM = (
    "Host: localhost:9000",
    "Host: LocalHost",
    "Host: 127.0.0.1:8000",
    "Host: [::1]",
    "Host: x:1",
    "Host: localhost\r\nSec-Fetch-Site: none",
    "Host: localhost\r\nSec-Fetch-Site: same-origin",
)
UNLOAD = "POST /v2/repository/models/m/unload HTTP/1.1\r\n{}\r\nContent-Length: 2\r\n{}\r\n{{}}"
INFER = "POST /v2/models/m/infer HTTP/1.1\r\n{}\r\nContent-Length: 2\r\n{}\r\n{{}}"


def test_without_a_token_no_page_of_another_site_may_ask(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        for of_whom, asked in ((OF_A_PAGE, (403, 403)), (OF_A_PROGRAM, (200, 200))):
            for fields in of_whom:
                listing = await doors.http_raw(f"GET /v1/models HTTP/1.1\r\n{fields}\r\n\r\n".encode())
                live = await doors.http_raw(f"GET /v2/health/live HTTP/1.1\r\n{fields}\r\n\r\n".encode())
                metadata = await doors.http_raw(f"GET /v2/models/m HTTP/1.1\r\n{fields}\r\n\r\n".encode())
                assert (listing[0], metadata[0]) == asked, fields
                assert live[0] == 200, fields
                for request, reason in ((UNLOAD, "model_control"), (INFER, "")):
                    status, told = await doors.http_raw(request.format(fields, "").encode())
                    is_refused = "cluster.gateway.token_file" in told["error"]
                    assert (status == 403 and is_refused) == (of_whom is OF_A_PAGE), fields
                    assert is_refused or reason in told["error"]
        assert (await doors.http_raw(b"GET /v1/models HTTP/1.0\r\n\r\n"))[0] == 200
        assert doors.counted("m")[1] == len(OF_A_PROGRAM), "what a page asks is counted of no model"

    at_doors(tmp_path, StandIn(model()), test)


def test_who_has_a_token_may_ask_under_any_name(tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        more = f"Authorization: Bearer {ONE}\r\n"
        for fields in (*OF_A_PAGE, *OF_A_PROGRAM):
            status, told = await doors.http_raw(INFER.format(fields, more).encode())
            assert (status, told["code"]) == (400, "InvalidInput"), fields
            assert (await doors.http_raw(INFER.format(fields, "").encode()))[0] == 401

    at_doors(tmp_path, StandIn(model()), test, Tokens(written(tmp_path / "t", ONE)))


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
