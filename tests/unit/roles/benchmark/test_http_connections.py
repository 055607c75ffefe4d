from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import RemoteProtocolError
from roles.benchmark.http_connections import AnswerReader

WITH_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nserver: x\r\n\r\n[1.0]"
IN_CHUNKS = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1.\r\n2;x=1\r\n0]\r\n0\r\n\r\n"


@pytest.mark.parametrize(("answer", "status"), [(WITH_LENGTH, 200), (IN_CHUNKS, 503)])
@given(data=st.data())
def test_an_answer_is_complete_with_its_last_byte_however_it_is_cut(
    answer: bytes, status: int, data: st.DataObject
) -> None:
    reader = AnswerReader()
    for _ in range(2):  # a connection is kept
        cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=6)))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert reader.is_untouched
        for piece in pieces[:-1]:
            assert reader.feed(piece) is None
        assert reader.feed(pieces[-1]) == status
    assert not reader.is_last


def test_an_empty_body_is_an_answer() -> None:
    assert AnswerReader().feed(b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n") == 500


def test_a_server_may_say_that_it_closes() -> None:
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n") == 200
    assert reader.is_last


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        WITH_LENGTH + b"and more",
        b"x" * 70_000,
    ],
)
def test_what_cannot_be_read_is_an_error(said: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        AnswerReader().feed(said)
