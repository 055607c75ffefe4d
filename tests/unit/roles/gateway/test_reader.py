"""One connection as it comes in, on virtual time."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fabric.errors import RequestError
from roles.gateway.failures import NotFound
from roles.gateway.http.compression import chosen
from roles.gateway.http.limits import BodyBudget, HttpLimits
from roles.gateway.http.messages import Head, Request
from roles.gateway.http.reader import ContinueWanted, HttpReader, ReaderEvent, Refused

LIMITS = HttpLimits(head_bytes_max=1_000, headers_max=20, body_bytes_max=5_000, bodies_bytes_max=20_000)


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAA")


def screen(head: Head) -> None:
    if head.path == "/nix":
        raise NotFound("there is no such path")


def reader(limits: HttpLimits = LIMITS, budget: BodyBudget | None = None) -> HttpReader:
    return HttpReader(limits, budget or BodyBudget(limits.bodies_bytes_max), screen, 0.0)


def post(body: bytes = b"", *fields: str, path: str = "/a") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def refusal(events: Sequence[ReaderEvent]) -> RequestError:
    (event,) = events
    assert isinstance(event, Refused)
    return event.error


def test_a_request_is_whole_or_nothing() -> None:
    one = reader()
    data = post(b"hello", "X-Two: 1", "x-two: 2", path="/a%20b?c=d")
    for at in range(len(data) - 1):
        assert list(one.feed(data[at : at + 1], float(at))) == []
    (request,) = one.feed(data[-1:], 99.0)
    assert isinstance(request, Request)
    assert (request.head.method, request.head.path, request.head.query) == ("POST", "/a%20b", "c=d")
    assert request.head.headers["x-two"] == "1, 2"
    assert (request.body, request.began_at_ms, request.keep_alive) == (b"hello", 0.0, True)


@given(
    st.lists(
        # Also longer ones than a head may be.
        st.one_of(st.binary(max_size=40), st.integers(1_000, 2_000).map(bytes)),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(1, 400), max_size=30),
    st.booleans(),
    st.booleans(),
)
def test_however_the_bytes_come_the_requests_are_the_same(
    bodies: list[bytes], cuts: list[int], is_chunked: bool, offers_h2c: bool
) -> None:
    offered = H2C if offers_h2c else ()

    def written(body: bytes) -> bytes:
        if not is_chunked:
            return post(body, *offered)
        chunks = [body[at : at + 7] for at in range(0, len(body), 7)]
        frames = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        head = "\r\n".join(("POST /a HTTP/1.1", "Host: a", "Transfer-Encoding: chunked", *offered)).encode()
        return head + b"\r\n\r\n" + frames + b"0\r\nx-last: 1\r\n\r\n"

    data = b"".join(written(body) for body in bodies)
    budget = BodyBudget(LIMITS.bodies_bytes_max)
    one = reader(budget=budget)
    found: list[ReaderEvent] = []
    at = 0
    for size in [*cuts, len(data)]:
        found += one.feed(data[at : at + size], 0.0)
        at += size
    found += one.feed(data[at:], 0.0)
    assert [event.body for event in found if isinstance(event, Request)] == bodies
    assert len(found) == len(bodies)
    assert budget.used == sum(map(len, bodies))


def test_a_body_and_the_head_behind_it_may_come_together() -> None:
    one, last = reader(), post(bytes(10))
    (first,) = one.feed(post(bytes(4_000)) + last[:-10], 0.0)
    assert isinstance(first, Request)
    (second,) = one.feed(last[-10:], 0.0)
    assert isinstance(second, Request)
    assert second.body == bytes(10)


CHUNKED = b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_frames_of_any_number_of_chunks_may_come_apart_from_what_is_in_them() -> None:
    one = reader()
    one.feed(CHUNKED, 0.0)
    for _ in range(2_000):
        for piece in (b"1\r\n", b"x", b"\r\n"):
            assert list(one.feed(piece, 0.0)) == []
    (request,) = one.feed(b"0\r\n\r\n", 0.0)
    assert isinstance(request, Request)
    assert request.body == b"x" * 2_000


@pytest.mark.parametrize("begun", [b"", b"1\r\nx\r\n"])
@pytest.mark.parametrize("frame", [b"0", b"1;x", b"0\r\nx: y"])
def test_a_frame_without_an_end_is_refused(begun: bytes, frame: bytes) -> None:
    one = reader()
    found = [*one.feed(CHUNKED, 0.0), *one.feed(begun, 0.0), *one.feed(frame, 0.0)]
    for _ in range(LIMITS.head_bytes_max):
        found += one.feed(frame[-1:], 0.0)
    assert refusal(found).code == "HeaderTooLarge"


@given(st.lists(st.binary(max_size=120), max_size=8), st.booleans())
def test_any_bytes_are_read_or_refused_once_and_nothing_is_kept(
    pieces: list[bytes], begins_right: bool
) -> None:
    budget = BodyBudget(LIMITS.bodies_bytes_max)
    one = reader(budget=budget)
    events = list(one.feed(post(b"hello")[:-3], 0.0)) if begins_right else []
    for at, piece in enumerate(pieces):
        events += one.feed(piece, float(at))
    refusals = [event for event in events if isinstance(event, Refused) and event.is_last]
    assert len(refusals) <= 1
    if refusals:
        assert events[-1] is refusals[0]
        assert list(one.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 99.0)) == []
    for event in events:
        if isinstance(event, Request):
            budget.give_back(len(event.body))
    one.close()
    assert budget.used == 0


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"HELO mail\r\n\r\n", "InvalidInput"),
        (b"GET / HTTP/3.7\r\n\r\n", "InvalidInput"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "InvalidInput"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "InvalidInput"),
        (
            b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            "InvalidInput",
        ),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "InvalidInput"),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", "InvalidInput"),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 5001\r\n\r\n", "TooLarge"),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", "InvalidInput"),
        (b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "InvalidInput"),
        (
            b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1389\r\n" + bytes(5_001),
            "TooLarge",
        ),
        (
            b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
            + b"x: yyyyyyyy\r\n" * 200,
            "HeaderTooLarge",
        ),
        (b"GET /" + b"a" * 1_100, "HeaderTooLarge"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1_100, "HeaderTooLarge"),
        (
            b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"x%d: y\r\n" % at for at in range(23)),
            "HeaderTooLarge",
        ),
        (post(b"hello", path="/nix"), "NotFound"),
        (post(b"hello", "Content-Encoding: br"), "Unsupported"),
        (post(b"hello", "Content-Encoding: gzip"), "InvalidInput"),
        (post(gzip.compress(b"hello", mtime=0)[:-3], "Content-Encoding: gzip"), "InvalidInput"),
        (post(gzip.compress(b"hello", mtime=0) + b"more", "Content-Encoding: gzip"), "InvalidInput"),
        (post(gzip.compress(bytes(5_001), mtime=0), "Content-Encoding: gzip"), "TooLarge"),
        (post(b"hello", "Expect: a miracle"), "Unsupported"),
        (post(b"hello", "Connection: Upgrade", "Upgrade: h2c", "Transfer-Encoding: chunked"), "InvalidInput"),
        (post(b"hello", *H2C, "Expect: a miracle"), "Unsupported"),
        (post(b"hello", *H2C, "Content-Encoding: br"), "Unsupported"),
        (post(b"hello", *H2C, path="/nix"), "NotFound"),
        (post(bytes(5_001), *H2C), "TooLarge"),
    ],
)
def test_what_is_wrong_or_too_large_is_refused_and_nothing_more_is_read(data: bytes, code: str) -> None:
    budget = BodyBudget(LIMITS.bodies_bytes_max)
    one = reader(budget=budget)
    assert refusal(list(one.feed(data, 0.0))).code == code
    assert list(one.feed(post(b"x"), 1.0)) == []
    assert budget.used == 0
    assert one.limit_at_ms is None


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_body_is_taken_apart(encoding: str, pack: object) -> None:
    assert callable(pack)
    (request,) = reader().feed(post(pack(b"hello" * 100), f"Content-Encoding: {encoding}"), 0.0)
    assert isinstance(request, Request)
    assert request.body == b"hello" * 100


@given(
    st.integers(0, 6_000),
    st.one_of(st.integers(0, 1 << 70), st.integers(0, 6), st.integers(4_000, 5_000).map(lambda n: 10**n)),
)
@example(zeros=5_000, number=5)
@example(zeros=0, number=(1 << 64) - 1)
def test_any_length_is_read_as_the_number_it_is_or_refused(zeros: int, number: int) -> None:
    """However many digits it has: Python's `int` refuses to read thousands of them."""
    written = b"0" * zeros + (b"%d" % number if number < 10**4_000 else b"1" * 4_500)
    limits = replace(LIMITS, head_bytes_max=20_000)
    head = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: %s\r\n\r\n" % written
    found = list(reader(limits).feed(head + bytes(min(number, 5_000)), 0.0))
    if number <= limits.body_bytes_max:
        (request,) = found
        assert isinstance(request, Request)
        assert request.body == bytes(number)
    else:
        # llhttp itself refuses what is over 64 bits
        assert refusal(found).code == ("TooLarge" if number < 1 << 64 else "InvalidInput")


@pytest.mark.parametrize("raised", [ValueError, RecursionError, AssertionError, MemoryError])
@pytest.mark.parametrize("data", [b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n", post(b"hello")])
def test_whatever_reading_raises_is_refused_as_wrong_input(data: bytes, raised: type[BaseException]) -> None:
    def broken(head: Head) -> None:
        raise raised

    budget = BodyBudget(LIMITS.bodies_bytes_max)
    one = HttpReader(LIMITS, budget, broken, 0.0)
    (event,) = one.feed(data, 0.0)
    assert isinstance(event, Refused)
    assert (event.error.code, event.is_last, type(event.defect)) == ("InvalidInput", True, raised)
    assert list(one.feed(data, 1.0)) == []
    assert budget.used == 0


def test_a_wrong_path_without_a_body_does_not_end_the_connection() -> None:
    one = reader()
    found = one.feed(b"GET /nix HTTP/1.1\r\nHost: a\r\n\r\n" + post(b"x"), 0.0)
    assert isinstance(found[0], Refused)
    assert not found[0].is_last
    assert isinstance(found[1], Request)


def test_a_client_that_waits_for_a_sign_gets_it_before_its_body() -> None:
    one = reader()
    data = post(b"hello", "Expect: 100-continue")
    assert list(one.feed(data[:-5], 0.0)) == [ContinueWanted()]
    (request,) = one.feed(data[-5:], 1.0)
    assert isinstance(request, Request)


@pytest.mark.parametrize("body", [b"", b"hello"])
@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_another_protocol_that_is_offered_is_not_taken_and_the_request_answered(
    body: bytes, protocol: str
) -> None:
    """The connection goes on, too: nobody speaks the other one before we have said that we do (RFC 9110, 7.8)."""
    offer = post(body, "Connection: keep-alive, Upgrade", f"Upgrade: {protocol}", "X-Two: 2", path="/a?b=c")
    budget = BodyBudget(LIMITS.bodies_bytes_max)
    one = reader(budget=budget)
    first, again, plain = one.feed(offer + offer + post(b"x"), 0.0)
    for found in (first, again):
        assert isinstance(found, Request)
        assert (found.head.method, found.head.path, found.head.query) == ("POST", "/a", "b=c")
        assert found.head.headers["x-two"] == "2"
        assert (found.body, found.keep_alive) == (body, True)
    assert isinstance(plain, Request)
    assert plain.body == b"x"
    assert one.is_idle
    assert budget.used == 2 * len(body) + 1


def test_a_request_that_offers_another_protocol_is_the_last_one_where_it_says_so() -> None:
    (request,) = reader().feed(post(b"hello", "Connection: Upgrade, close", "Upgrade: h2c"), 0.0)
    assert isinstance(request, Request)
    assert not request.keep_alive
    (old,) = reader().feed(post(b"hello", *H2C).replace(b"HTTP/1.1", b"HTTP/1.0"), 0.0)
    assert isinstance(old, Request)
    assert (old.body, old.keep_alive) == (b"hello", False)


def test_a_client_that_offers_another_protocol_is_told_once_to_send_its_body() -> None:
    one = reader()
    data = post(b"hello", *H2C, "Expect: 100-continue")
    assert list(one.feed(data[:-5], 0.0)) == [ContinueWanted()]
    (request,) = one.feed(data[-5:], 1.0)
    assert isinstance(request, Request)


def test_many_offers_in_one_piece_take_no_longer_than_their_bytes() -> None:
    """Each of them is read by a parser of its own: what follows is not copied for that."""
    data = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n" * 4_000
    tracemalloc.start()
    try:
        assert len(reader().feed(data, 0.0)) == 4_000
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("offer", [(), H2C], ids=["plain", "h2c"])
def test_what_is_wrong_behind_an_offer_of_another_protocol_is_the_clients_doing(offer: Sequence[str]) -> None:
    """And no defect of ours, as without one."""
    found = refusal(reader().feed(post(b"", "Content-Encoding: gzip", *offer), 0.0))
    assert (found.code, found.reason) == ("InvalidInput", "the compressed body ends too early")


def test_after_connect_nothing_more_is_read() -> None:
    """What follows would be somebody else's protocol."""
    (request,) = reader().feed(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n" + post(b"x"), 0.0)
    assert isinstance(request, Request)
    assert not request.keep_alive


def test_a_client_of_http_1_0_knows_no_sign_to_go_on() -> None:
    """It would take it for its answer (RFC 9110, 10.1.1)."""
    data = post(b"hello", "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    one = reader()
    assert list(one.feed(data[:-5], 0.0)) == []
    (request,) = one.feed(data[-5:], 1.0)
    assert isinstance(request, Request)


def test_a_slow_head_is_refused_by_its_first_byte() -> None:
    one = reader()
    one.feed(post(b"x"), 5_000.0)
    limits_at_ms = [one.limit_at_ms]  # none while it is idle: that is the connection's own limit
    one.feed(b"GET", 6_000.0)
    limits_at_ms.append(one.limit_at_ms)
    assert limits_at_ms == [None, 16_000.0]
    for at_ms in range(7_000, 16_000, 1_000):  # a byte a second does not help
        one.feed(b" " if at_ms == 7_000 else b"/", float(at_ms))
        assert list(one.tick(float(at_ms))) == []
    assert refusal(list(one.tick(16_000.0))).code == "TooSlow"


def test_the_time_in_which_an_answer_was_awaited_is_not_the_clients() -> None:
    one = reader()
    one.feed(b"GET /a", 1_000.0)
    one.held_up(2_000.0, 32_000.0)
    assert list(one.tick(40_999.0)) == []
    found = one.feed(b" HTTP/1.1\r\nHost: a\r\n\r\n", 40_999.0)
    assert isinstance(found[0], Request)
    assert found[0].began_at_ms == 1_000.0, "its deadline counts from its first byte all the same"
    one.feed(b"GET", 50_000.0)
    assert one.limit_at_ms == 60_000.0
    body = reader()
    body.feed(post(bytes(5_000))[:-5_000], 1_000.0)
    body.held_up(2_000.0, 32_000.0)
    assert list(body.tick(40_999.0)) == []
    assert refusal(list(body.tick(41_000.0))).code == "TooSlow"
    begun_meanwhile = reader()
    begun_meanwhile.feed(b"GET", 20_000.0)
    begun_meanwhile.held_up(2_000.0, 32_000.0)
    assert begun_meanwhile.limit_at_ms == 42_000.0


def test_who_says_nothing_at_all_is_refused_too() -> None:
    one = reader()
    assert list(one.tick(9_999.0)) == []
    assert refusal(list(one.tick(10_000.0))).code == "TooSlow"


def test_a_slow_body_is_refused_once_it_is_slower_than_allowed() -> None:
    one = reader(replace(LIMITS, bytes_per_s_min=100.0))
    one.feed(post(bytes(5_000))[:-5_000], 1_000.0)
    refused_at_ms = []
    for at_ms in range(2_000, 51_000, 1_000):  # half as fast as it must be, after the first ten seconds
        one.feed(bytes(50), float(at_ms))
        refused_at_ms += [at_ms for event in one.tick(float(at_ms)) if isinstance(event, Refused)]
    assert refused_at_ms == [21_000]  # 20 s, of which 10 for 1,000 bytes


def test_bodies_share_one_budget() -> None:
    budget = BodyBudget(6_000)
    first, second = reader(budget=budget), reader(budget=budget)
    first.feed(post(bytes(4_000))[:-1], 0.0)
    assert refusal(list(second.feed(post(bytes(4_000)), 0.0))).code == "Overloaded"
    first.close()
    assert budget.used == 0


@pytest.mark.parametrize("size", [1, 2, 700])
def test_a_body_in_many_small_pieces_takes_no_more_room_than_its_bytes(size: int) -> None:
    limits = HttpLimits()
    budget = BodyBudget(limits.bodies_bytes_max)
    one = reader(limits, budget)
    piece = b"ab" * 700
    frames = b"%x\r\n%s\r\n" % (size, piece[:size]) * (200_000 // (size + 10))
    one.feed(b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", 0.0)
    tracemalloc.start()
    try:
        for _ in range(10):
            assert list(one.feed(frames, 0.0)) == []
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.3 * budget.used + 20_000
    (request,) = one.feed(b"0\r\n\r\n", 0.0)
    assert isinstance(request, Request)
    assert request.body == piece[:size] * (200_000 // (size + 10)) * 10


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://host/v2", "/v2", ""),
        ("HTTPS://user@[::1]:8000/v2/models?a=b", "/v2/models", "a=b"),
        ("http://host", "/", ""),
        ("http://host?a=http://b", "/", "a=http://b"),
        ("/http://host/v2", "/http://host/v2", ""),
    ],
)
def test_a_target_may_come_with_scheme_and_host(target: str, path: str, query: str) -> None:
    (request,) = reader().feed(f"GET {target} HTTP/1.1\r\nHost: host\r\n\r\n".encode(), 0.0)
    assert isinstance(request, Request)
    assert (request.head.path, request.head.query) == (path, query)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_connection_goes_on_only_where_both_sides_take_that_for_granted(version: str) -> None:
    (request,) = reader().feed(
        f"GET /a HTTP/{version}\r\nHost: a\r\nConnection: keep-alive\r\n\r\n".encode(), 0.0
    )
    assert isinstance(request, Request)
    assert request.keep_alive == (version == "1.1")


@pytest.mark.parametrize("lines", [b"\r\n", b"\n", b"\r\n" * 3, b"\r"])
@pytest.mark.parametrize("is_together", [True, False])
def test_empty_lines_before_a_request_are_none_of_it(lines: bytes, *, is_together: bool) -> None:
    """Its time begins with its first byte, and until then nothing is awaited (RFC 9112, 2.2)."""
    one = reader()
    if is_together:
        found = list(one.feed(post(b"x") + lines, 0.0))
    else:
        found = [*one.feed(post(b"x"), 0.0), *one.feed(lines, 0.0)]
    assert len(found) == 1
    assert one.is_idle
    assert one.limit_at_ms is None
    assert not one.tick(1e6)
    (request,) = one.feed(lines + post(b"y"), 2e6)
    assert isinstance(request, Request)
    assert request.began_at_ms == 2e6


def test_who_sends_nothing_but_empty_lines_is_too_slow() -> None:
    one = reader()
    for at_ms in range(0, 10_000, 1_000):
        assert not one.feed(b"\r\n", float(at_ms))
        assert not one.tick(float(at_ms))
    assert refusal(one.tick(10_000.0)).code == "TooSlow"


@pytest.mark.parametrize(
    ("hosts", "is_read"),
    [((), False), (("Host: a",), True), (("Host:",), True), (("Host: a", "host: a"), False)],
)
def test_a_request_of_http_1_1_names_one_host(hosts: tuple[str, ...], *, is_read: bool) -> None:
    """RFC 9112, 3.2; one of HTTP/1.0 may leave it out."""
    lines = ("GET /a HTTP/1.1", *hosts, "", "")
    found = reader().feed("\r\n".join(lines).encode(), 0.0)
    assert isinstance(found[0], Request) == is_read
    if not is_read:
        assert refusal(found).code == "InvalidInput"
    if len(hosts) < 2:
        (old,) = reader().feed("\r\n".join(lines).replace("1.1", "1.0").encode(), 0.0)
        assert isinstance(old, Request)


@pytest.mark.parametrize(
    ("coding", "code"),
    [
        ("chunked", ""),
        ("Chunked ", ""),
        ("gzip, chunked", "Unsupported"),
        ("identity, chunked", "Unsupported"),
        ("chunked, chunked", "InvalidInput"),
        ("xchunked, chunked", "Unsupported"),
    ],
)
def test_a_body_in_another_coding_than_chunks_is_refused(coding: str, code: str) -> None:
    """It would be taken for what it is not."""
    head = f"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: {coding}\r\n\r\n"
    found = reader().feed(head.encode() + b"1\r\nx\r\n0\r\n\r\n", 0.0)
    if code:
        assert refusal(found).code == code
    else:
        assert isinstance(found[0], Request)
        assert found[0].body == b"x"


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0.000", None),
        ("gzip; q=0.", None),
        ("gzip;\tq = 0.00", None),
        ("GZIP;Q=0.00, deflate", "deflate"),
        ("gzip;q=0.001", "gzip"),
        ("gzip;q=1.000", "gzip"),
        ("br", None),
    ],
)
def test_an_encoding_of_no_weight_is_not_chosen(accepted: str, encoding: str | None) -> None:
    assert chosen(accepted, 10_000) == encoding
