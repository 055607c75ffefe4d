"""What strangers send by HTTP on purpose: each attack is pieces that are sent one after the other, on one connection.

Mutants of good requests (`mutations.py`) seldom get behind the parser. These do: they are right up to the place that they are about.
"""

from __future__ import annotations

import gzip
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

Pieces = Sequence[bytes]
INFER: Final = "/v2/models/fixed/infer"
PREDICT: Final = "/v1/models/fixed:predict"
_BOMB_BYTES: Final = 9 << 20  # over the limit that the attacked gateway has
_POOL: Final = 600
_NEW: Final = 0.04
_NUMBERS: Final = (
    "0",
    "-1",
    "1e400",
    "-0",
    "9" * 400,
    "1" * 5_000,
    "0" * 5_000,
    "0" * 5_000 + "14",
    "0" * 20 + "15",
    "18446744073709551616",
    "0x10",
    "+5",
    "1_0",
    "٣",
)
_DATATYPES: Final = (
    "FP32",
    "FP16",
    "BF16",
    "BYTES",
    "BOOL",
    "INT8",
    "UINT64",
    "fp32",
    "",
    "FP32\0",
    "O",
    "V8",
)
_SHAPES: Final[Sequence[Sequence[Any]]] = (
    [3], [1, 3], [0], [], [-1], [1 << 62, 1 << 62], [1 << 63], [0, 1 << 62], [1] * 33, [1] * 5_000, [3.0], ["3"], [None], [True], [256, 3], [257, 3],
)  # fmt: skip


def post(path: str, body: bytes, *fields: str, length: str | None = None) -> bytes:
    """A request. `length`: what it says instead of its body's length."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body) if length is None else length}",
        *fields,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Attacks:
    """The next one is drawn; everything is from one `random.Random`."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._bombs = [packed(bytes(_BOMB_BYTES)) for packed in (gzip.compress, zlib.compress)]
        kinds: Sequence[tuple[int, Callable[[], Pieces]]] = (
            (6, self._wrong_json),
            (4, self._binary),
            (3, self._chunked),
            (3, self._pipelined),
            (2, self._head),
            (2, self._lengths),
            (2, self._compressed),
            (1, self._cut),
        )
        self._kinds = [kind for weight, kind in kinds for _ in range(weight)]
        self._pool = [self._new() for _ in range(_POOL)]

    def one(self) -> Pieces:
        """What to send: one of the last ones, since making them takes longer than sending them."""
        draws = self._draws
        at = draws.randrange(len(self._pool))
        if draws.random() < _NEW:
            self._pool[at] = self._new()
        return self._pool[at]

    def bomb(self) -> Pieces:
        """A small body that becomes one over any limit. It costs the gateway some ms, so that it is drawn seldom."""
        encoding, bomb = self._draws.choice((("gzip", self._bombs[0]), ("deflate", self._bombs[1])))
        return [post(INFER, bomb, f"Content-Encoding: {encoding}")]

    def _new(self) -> Pieces:
        return self._draws.choice(self._kinds)()

    # ------------------------------------------------------------ bodies

    def _wrong_json(self) -> Pieces:
        draws = self._draws
        path = draws.choice((INFER, PREDICT, "/v2/models/echo/infer", "/v2/repository/index"))
        if draws.random() < 0.1:
            depth = draws.choice((30, 66, 500, 20_000))
            inner = "[" * depth + "]" * (depth if draws.random() < 0.7 else depth // 2)
            text = draws.choice(
                (
                    inner,
                    '{"inputs": [{"name": "x", "shape": [3], "datatype": "FP32", "data": ' + inner + "}]}",
                )
            )
        elif draws.random() < 0.2:
            text = (
                '{"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": ['
                + draws.choice(_NUMBERS)
                + "]}]}"
            )
        elif draws.random() < 0.5:
            text = json.dumps(self._request())
        else:
            text = json.dumps(
                {draws.choice(("inputs", "instances")): self._value(4), "parameters": self._value(2)}
            )
        return [post(path, text.encode("utf-8", "surrogatepass"), "Content-Type: application/json")]

    def _request(self) -> dict[str, Any]:
        """A whole one in which a key or two are of a wrong kind."""
        draws = self._draws
        tensor: dict[str, Any] = {
            "name": draws.choice(("x", "y", "", "x" * 5_000, "\ud800", 7)),
            "shape": draws.choice(_SHAPES),
            "datatype": draws.choice(_DATATYPES),
            "data": draws.choice(
                (
                    [1, 2, 3],
                    [[1, 2, 3]],
                    [[1], [2, 3]],
                    [None] * 3,
                    ["a", "b", "c"],
                    [True, 1, 2.5],
                    {},
                    "abc",
                    [1e308] * 3,
                )
            ),
        }
        request: dict[str, Any] = {
            "inputs": [tensor] * draws.choice((0, 1, 1, 2, 2_000)),
            "id": draws.choice(("7", 7, None, "\n" * 300)),
        }
        request["parameters"] = {
            draws.choice(
                ("deadline_ms", "timeout", "priority", "sequence_id", "binary_data_output")
            ): self._value(1)
        }
        request["outputs"] = draws.choice(
            ([], [{"name": "x"}], [{"name": "no"}], [{"name": "x", "parameters": {"classification": 3}}], {})
        )
        for key in list(request):
            if draws.random() < 0.15:
                request[key] = self._value(2)
        return request

    def _value(self, depth: int) -> Any:
        """Anything that JSON has."""
        draws = self._draws
        match draws.randrange(11 if depth else 8):
            case 0:
                return None
            case 1:
                return draws.choice((True, False))
            case 2:
                return draws.choice((0, -1, 3, 10, 1 << 31, -(1 << 63), 1 << 64, 10**300))
            case 3:
                return draws.choice((0.5, -0.0, 1e308, float("nan"), float("-inf"), 1e-320))
            case 4:
                return draws.choice(("", "x", "aGVsbG8=", "=", "\0", "\ud83d", "é" * 500))
            case 5:
                return {"b64": draws.choice(("", "!", "aGVsbG8=", "A" * 4_097, 3, None))}
            case 6:
                return [1, 2, 3]
            case 7:
                return []
            case 8 | 9:
                return [self._value(depth - 1) for _ in range(draws.choice((1, 2, 3, 300)))]
            case _:
                return {
                    draws.choice(("x", "image", "name", "data", "shape", "")): self._value(depth - 1)
                    for _ in range(3)
                }

    def _binary(self) -> Pieces:
        """Heads of binary tensors that say what is not there."""
        draws = self._draws
        raw = struct.pack("<3f", 1, 2, 3) * draws.choice((0, 1, 1, 2, 500))
        sizes = (12, 0, 11, 13, -1, 1 << 31, 1 << 63, 1 << 64, 1e3, "12", True, None, len(raw))
        inputs = [
            {
                "name": name,
                "shape": draws.choice(_SHAPES),
                "datatype": draws.choice(_DATATYPES),
                "parameters": {"binary_data_size": draws.choice(sizes)},
            }
            for name in "xyz"[: draws.choice((1, 1, 2, 3))]
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        if draws.random() < 0.2:  # elements of BYTES that say lengths of their own
            raw = struct.pack("<I", draws.choice((0, 1, 5, 0xFFFFFFFF, 0x7FFFFFFF))) + raw
        told = draws.choice(
            (
                str(len(head)),
                str(len(head)),
                str(len(head) - 1),
                str(len(head) + 5),
                *_NUMBERS,
                "",
                " ",
                "9" * 12,
            )
        )
        told = told.encode("utf-8").decode("latin-1")
        request = post(INFER, head + raw)
        field = f"Inference-Header-Content-Length: {told}\r\n".encode("latin-1")
        return [request.replace(b"Content-Length", field + b"Content-Length", 1)]

    def _compressed(self) -> Pieces:
        draws = self._draws
        plain = json.dumps(self._request()).encode()
        data = gzip.compress(plain, 1)
        match draws.randrange(6):
            case 0:
                data = data[: draws.randrange(len(data))]
            case 1:
                data += draws.choice((data, b"more", bytes(2_000)))
            case 2:
                data = gzip.compress(data, 1)
            case 3:
                data = data[:-8] + draws.randbytes(8)
            case 4:
                data = zlib.compress(plain)[: draws.randrange(200)]
            case _:
                data = plain
        encoding = draws.choice(
            ("gzip", "gzip", "deflate", "x-gzip", "br", "gzip, gzip", "identity", "GZIP", "")
        )
        return [post(INFER, data, f"Content-Encoding: {encoding}", "Accept-Encoding: gzip;q=0, *")]

    # ------------------------------------------------------------ HTTP itself

    def _chunked(self) -> Pieces:
        """Sizes, frames, extensions and trailers of chunks, in pieces."""
        draws = self._draws
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n"
        codings = ("chunked",) * 6 + (
            "Chunked",
            "gzip, chunked",
            "chunked, gzip",
            "identity",
            "xchunked",
            "chunked\r\nContent-Length: 4",
        )
        head += f"Transfer-Encoding: {draws.choice(codings)}\r\n\r\n"
        body = json.dumps(self._request()).encode()
        width = draws.choice((1, 2, 7, 4_096))
        chunks = b"".join(
            b"%x\r\n%s\r\n" % (len(body[at : at + width]), body[at : at + width])
            for at in range(0, min(len(body), 6_000), width)
        )
        wrong = (
            b"", b"", b"", b"ffffffffffffffff\r\n", b"-1\r\n", b"8000000000000000\r\n", b"1" * 40 + b"\r\n", b"5;" + b"e=" * 9_000 + b"\r\nabcde\r\n",
            b"5 \r\nabcde\r\n", b"5\nabcde\n", b"5\r\nabcdeXX", b"\r\n", b"g\r\n",
        )  # fmt: skip
        ends = (
            b"0\r\n\r\n",
            b"0\r\n\r\n",
            b"0\r\n",
            b"",
            b"0\r\nX: y\r\n" * 1 + b"\r\n",
            b"0\r\n" + b"X: y\r\n" * 300 + b"\r\n",
            b"0\r\nX: " + b"y" * 20_000,
        )
        whole = head.encode() + chunks + draws.choice(wrong) + draws.choice(ends)
        cut = draws.randrange(len(whole))
        return [whole[:cut], whole[cut:]]

    def _pipelined(self) -> Pieces:
        """Many requests at once, good and bad ones."""
        draws = self._draws
        good = post(
            "/v2/models/echo/infer",
            json.dumps(
                {"inputs": [{"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}]}
            ).encode(),
        )
        kinds = (
            good, good, b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /v2/models HTTP/9.9\r\n\r\n", b"\r\n\r\n",
            b"HEAD /v2 HTTP/1.0\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", post(INFER, b"{}"), post(INFER, b"", "Expect: 100-continue"),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /v2 HTTP/1.1\r\nConnection: close\r\n\r\n",
        )  # fmt: skip
        count = draws.choice((2, 5, 16, 40, 300))
        if draws.random() < 0.7:
            return [good * (count - 1) + draws.choice(kinds)]
        return [b"".join(draws.choice(kinds) for _ in range(count))]

    def _head(self) -> Pieces:
        """Floods of header fields, and fields and paths that are no such thing."""
        draws = self._draws
        path = draws.choice(
            (
                "/v2", "/v2/models/" + "x" * 20_000, "/v2/models/%ff%fe", "/v2/models/%00", "/v1/models/:predict", "//v2", "/../v2", "http://a/v2",
                "/v2/models/a%2fb/infer", "/v1/models/fixed:predict?deadline_ms=nan", "/v1/models/fixed:predict?priority=" + "9" * 3_000, "*", "/v2?" + "&" * 9_000,
            )
        )  # fmt: skip
        flood = draws.choice(
            (
                "",
                "X: y\r\n" * 101,
                "X: y\r\n" * 5_000,
                f"X: {'y' * 17_000}\r\n",
                f"{'X' * 17_000}: y\r\n",
                "Content-Length: 1\r\n" * 2,
                ": y\r\n",
            )
        )
        odd = draws.choice(
            (
                "",
                " folded: x\r\n",
                "A\0: b\r\n",
                "Authorization: Bearer \xff\r\n",
                "traceparent: 00-" + "0" * 900 + "\r\n",
                "Host: b\r\n",
                "Expect: x\r\n",
                "X y\r\n",
            )
        )
        method = draws.choice(("GET", "POST", "DELETE", "get", "G" * 3_000, "PURGE", "QUERY"))
        text = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{flood}{odd}\r\n".encode("latin-1")
        cut = draws.randrange(len(text))
        return [text] if draws.random() < 0.5 else [text[:cut], text[cut:]]

    def _lengths(self) -> Pieces:
        """Content-Length that says something else."""
        draws = self._draws
        body = b'{"inputs": []}'
        length = draws.choice(
            (*_NUMBERS, "13", "15", "99999999", "67108865", "14, 14", "14\r\nContent-Length: 15", "")
        )
        return [
            post(INFER, body, length=length.encode("utf-8").decode("latin-1")),
            b"X" * draws.choice((0, 1, 30)),
        ]

    def _cut(self) -> Pieces:
        """The beginning of a good one, whose rest never comes."""
        whole = post(INFER, bytes(1_000))
        return [whole[: self._draws.randrange(1, len(whole))]]
