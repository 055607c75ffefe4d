"""gRPC's server on the running loop: limits, TLS, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Final

import grpc

from fabric.errors import ConfigError
from fabric.frames import ANSWER_BYTES_MAX
from roles.config.gateway import GatewayConfig
from roles.gateway.certificate import Certificate
from roles.gateway.http.limits import BodyBudget, HttpLimits
from roles.gateway.repository import Repository
from roles.gateway.rpc.service import IDLE_MS, RpcService
from roles.gateway.service import Service
from roles.gateway.tokens import Tokens

METADATA_BYTES_MAX: Final = 16 << 10  # as much as the head of an HTTP request may have
_HEAD_ROOM_BYTES: Final = 1 << 20  # of a message, beside its tensors
_KEEPALIVE_MS: Final = 60_000
_KEEPALIVE_LIMIT_MS: Final = 20_000
_LOOK_S: Final = 0.02
_OPENINGS: Final = 250
"""Of one server in the place of another: as many looks."""
_OUTLIVES_S: Final = 86_400.0


_DECODING: Final = "grpc._cython.cygrpc"
"""Where gRPC logs each value of strangers' metadata, and each path, that is no UTF-8, before anybody looks at a token."""


class _UnreadableMetadata(logging.Filter):
    """Keeps such values out of the log, and counts them: there may be a token in one, and anybody could fill the disk with them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.path: UnicodeDecodeError | None = None
        """The last one of a path, which has ended gRPC's server. Of metadata gRPC logs another way."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, UnicodeDecodeError):
            self.path = record.msg
        elif record.exc_info is None or not isinstance(record.exc_info[1], UnicodeDecodeError):
            return True
        self.count += 1
        return False


class RpcServer:
    """One of them."""

    def __init__(
        self,
        service: Service,
        repository: Repository,
        tokens: Tokens,
        config: GatewayConfig,
        budget: BodyBudget,
        certificate: Certificate | None = None,
    ) -> None:
        self._service = RpcService(
            service, repository, tokens, budget, config.connections_max, config.request_bytes_max
        )
        self._config = config
        self._certificate = certificate
        self._pem = (b"", b"")  # that gRPC has
        self._unreadable = _UnreadableMetadata()
        self._server: Any = None  # that listens
        self._former: set[Any] = set()  # that have ended by themselves, with calls that go on
        self._outliving: set[asyncio.Task[None]] = set()
        self._address = ""
        self._is_ending = False
        self._stopping: asyncio.Future[list[None]] | None = None

    @property
    def calls(self) -> int:
        """Since the start."""
        return self._service.calls

    @property
    def under_way(self) -> int:
        """Now; a stream is one."""
        return self._service.under_way

    @property
    def unreadable(self) -> int:
        """How often gRPC read a value of metadata, or a path, that is no UTF-8, since the start; it reads some twice."""
        return self._unreadable.count

    async def open(self) -> str:
        """Listen; where. Raises ConfigError."""
        assert self._config.grpc is not None, "it is wanted"
        self._server = self._made()
        self._address = self._bound(self._server, self._config.grpc)
        logging.getLogger(_DECODING).addFilter(self._unreadable)
        await self._server.start()
        return self._address

    async def keep_open(self) -> None:
        """Until the end is begun. Raises what has ended gRPC's server before.

        A call whose path is no UTF-8 ends it before anybody looks at a token, so then another one takes its place at once. Calls that
        it has go on.
        """
        while not self._is_ending:
            try:
                await self._server.wait_for_termination(_LOOK_S)
            except UnicodeDecodeError:
                await self._replace()

    def has_survived(self, error: object) -> bool:
        """Whether it is what has ended gRPC's server, which `keep_open` hears of; nobody asks for the task of gRPC's that has it too."""
        return error is not None and error is self._unreadable.path

    async def _replace(self) -> None:
        former, self._server = self._server, self._made()
        self._former.add(former)
        outliving = asyncio.ensure_future(self._outlive(former))
        self._outliving.add(outliving)
        outliving.add_done_callback(self._outliving.discard)
        for left in reversed(range(_OPENINGS)):
            try:
                self._bound(self._server, self._address)
                break
            except ConfigError:  # the former one has not let go of it yet
                if not left:
                    raise
            await asyncio.sleep(_LOOK_S)
        if not self._is_ending:
            await self._server.start()

    async def _outlive(self, former: Any) -> None:
        await _end(former, _OUTLIVES_S)
        self._former.discard(former)

    def _made(self) -> Any:
        config = self._config
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", config.request_bytes_max + _HEAD_ROOM_BYTES),
                ("grpc.max_send_message_length", ANSWER_BYTES_MAX + _HEAD_ROOM_BYTES),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.max_concurrent_streams", config.connections_max),
                # More than calls: who has no room for one hears so, and of our health. Older versions of gRPC know of no such limit.
                ("grpc.max_allowed_incoming_connections", 2 * config.connections_max),
                ("grpc.server_handshake_timeout_ms", round(HttpLimits().head_ms)),
                ("grpc.max_connection_idle_ms", round(IDLE_MS)),
                # A client that went without a word, as by a cut cable, is found by asking, and its calls end.
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_LIMIT_MS),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a share of somebody else's calls
            ],
        )
        server.add_generic_rpc_handlers((self._service.handler(),))
        return server

    def _bound(self, server: Any, address: str) -> str:
        """Where it listens. Raises ConfigError."""
        try:
            if self._certificate is not None:
                self._pem = pem = self._certificate.pem
                first = grpc.ssl_server_certificate_configuration([pem])
                credentials = grpc.dynamic_ssl_server_credentials(first, self._renewed)
                port = server.add_secure_port(address, credentials)
            else:
                port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"listen.grpc: cannot listen at {address}: {error}") from error
        return f"{address.rpartition(':')[0]}:{port}"

    def _renewed(self) -> Any:
        """The certificate, where gRPC has another one; None: it has this one. Called by its own threads, for each connection."""
        assert self._certificate is not None, "it is wanted"
        pem = self._certificate.pem
        if pem is self._pem:
            return None
        self._pem = pem
        return grpc.ssl_server_certificate_configuration([pem])

    def drain(self, limit_s: float) -> None:
        """Take no new calls, and let those that are there end by then."""
        self._is_ending = True
        self._stopping = self._ending(limit_s)
        self._service.drain()

    @property
    def is_drained(self) -> bool:
        """Whether all calls have ended, answers that were on their way included."""
        return self._stopping is not None and self._stopping.done()

    async def close(self) -> None:
        """End at once."""
        self._is_ending = True
        if self._server is not None:
            await self._ending(0)
        if self._stopping is not None:
            await self._stopping
        logging.getLogger(_DECODING).removeFilter(self._unreadable)

    def _ending(self, limit_s: float) -> asyncio.Future[list[None]]:
        return asyncio.gather(*(_end(one, limit_s) for one in {self._server, *self._former}))


async def _end(server: Any, limit_s: float) -> None:
    """Also one that ends by itself just now, by a path that is no UTF-8: it raises that, and goes on ending."""
    with contextlib.suppress(UnicodeDecodeError):
        await server.stop(limit_s)
    await server.stop(limit_s)
