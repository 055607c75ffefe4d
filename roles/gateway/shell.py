"""The gateway as a process: HTTP and gRPC on one asyncio loop, and the SDK's client behind them.

Its end is in order: it says that it is not ready, so that a balancer sends nothing new; what still comes in the next moment is taken;
then it listens no more, answers what it has, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabric.client import Client, ClientOptions
from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError
from fabric.frames import ANSWER_BYTES_MAX
from fabric.ids import Incarnation, new_incarnation
from roles.config.gateway import GatewayConfig
from roles.gateway.certificate import Certificate
from roles.gateway.failures import Unsupported
from roles.gateway.http.connection import HttpServer
from roles.gateway.http.limits import HttpLimits
from roles.gateway.http.routes import Routes
from roles.gateway.metrics import measured_gateway
from roles.gateway.repository import Repository
from roles.gateway.service import Service
from roles.gateway.status_link import StatusLink
from roles.gateway.tokens import Tokens
from roles.runtime.defects import DefectReport
from roles.runtime.environment import RunDir
from roles.runtime.host_header import own_hosts
from roles.runtime.process import RunFile, StopSignal, log, remove_run_file, write_run_file

if TYPE_CHECKING:
    from roles.gateway.rpc.server import RpcServer

UNDERWAY_MS: Final = 150.0
"""From the end of its readiness to the end of its listening: requests on their way still come in."""
DRAIN_MS_MAX: Final = 5_000.0
_LOOK_S: Final = 0.01
_STOP_LOOK_S: Final = 0.05
_REFRESH_S: Final = 1.0
_BODIES_BYTES: Final = 1 << 30
_BACKLOG: Final = 1_024
_GC_YOUNG: Final = 20_000  # frozen at the start, there is little to look at; a collection takes a millisecond


@dataclass(slots=True, frozen=True)
class GatewayOptions:
    """How to run one gateway. `frontends`: addresses of each. `sections`: the file's models, by name, that may be loaded.

    `base_dir`: of paths in such sections.
    """

    role_id: str
    run_dir: Path
    config: GatewayConfig
    frontends: Sequence[str]
    key_file: Path | None = None
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    base_dir: Path = field(default_factory=Path)
    incarnation: Incarnation = field(default_factory=new_incarnation)
    clock: Clock = field(default_factory=MonotonicClock)


class Gateway:
    """Everything of one gateway. Belongs to the running loop."""

    def __init__(self, options: GatewayOptions) -> None:
        config = options.config
        self._options = options
        self._clock = options.clock
        self._tokens = Tokens(config.token_file)
        self._certificate: Certificate | None = None
        if config.tls_certificate is not None and config.tls_key is not None:
            self._certificate = Certificate(config.tls_certificate, config.tls_key)
        client_options = ClientOptions(
            key_file=options.key_file,
            payload_bytes_max=min(config.request_bytes_max, ANSWER_BYTES_MAX),
            clock=options.clock,
        )
        self._service = Service(Client(options.frontends, client_options), options.clock)
        repository = Repository(
            options.sections, options.run_dir, options.base_dir, is_open=config.is_model_control
        )
        limits = HttpLimits(
            connections_max=config.connections_max,
            body_bytes_max=config.request_bytes_max,
            bodies_bytes_max=max(_BODIES_BYTES, config.request_bytes_max),
        )
        hosts = own_hosts() if config.http is None else own_hosts(config.http)
        self._http = HttpServer(
            Routes(self._service, repository, self._tokens, self._page, hosts), limits, options.clock
        )
        self._repository = repository
        self._rpc: RpcServer | None = None
        self._listeners: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._status = StatusLink(RunDir(options.run_dir), options.role_id, self._counters)
        self._run_file: RunFile | None = None

    async def open(self) -> None:
        """Listen, and say where. Raises ConfigError for an address or a file that is of no use."""
        config = self._options.config
        addresses: dict[str, list[str]] = {"control": self._status.addresses}
        context = None if self._certificate is None else self._certificate.context
        scheme = "http" if context is None else "https"
        if config.http is not None:
            listener = await self._listen(config.http, context)
            host, port = listener.sockets[0].getsockname()[:2]
            addresses["http"] = [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"]
        if config.grpc is not None:
            from roles.gateway.rpc.server import RpcServer  # noqa: PLC0415  a second's import, and not all want it

            budget = self._http.budget  # of all bodies, however they come
            self._rpc = RpcServer(
                self._service, self._repository, self._tokens, config, budget, self._certificate
            )
            addresses["grpc"] = [f"grpc{'s' if context else ''}://{await self._rpc.open()}"]
        self._http.watch()
        self._tasks.append(asyncio.ensure_future(self._service.keep_connected()))
        self._tasks.append(asyncio.ensure_future(self._follow("tokens", self._tokens)))
        if self._certificate is not None:
            self._tasks.append(asyncio.ensure_future(self._follow("certificate", self._certificate)))
        if self._rpc is not None:
            self._tasks.append(asyncio.ensure_future(self._rpc.keep_open()))
        for task in self._tasks:
            task.add_done_callback(_die_of)
        own = self._options
        self._run_file = RunFile(own.role_id, os.getpid(), own.incarnation, addresses)
        await self._wait_for_a_frontend()
        write_run_file(own.run_dir, self._run_file)
        log.info("gateway_serving addresses=%s", ",".join(one for its in addresses.values() for one in its))

    async def serve(self, stop: StopSignal) -> None:
        """Until it is told to stop, and all is answered."""
        await _until(lambda: stop.is_set, _STOP_LOOK_S)

    async def drain(self) -> None:
        """End in order."""
        self._service.is_draining = True
        until_ms = self._clock.now_ms() + DRAIN_MS_MAX
        await asyncio.sleep(UNDERWAY_MS / 1e3)
        for listener in self._listeners:
            listener.close()
        self._http.drain()
        if self._rpc is not None:
            self._rpc.drain((until_ms - self._clock.now_ms()) / 1e3)
        await _until(lambda: self._is_idle or self._clock.now_ms() > until_ms, _LOOK_S)

    async def close(self) -> None:
        """End at once what is left."""
        if self._run_file is not None:
            remove_run_file(self._options.run_dir, self._run_file)
        for listener in self._listeners:
            listener.close()
        self._http.close()
        if self._rpc is not None:
            await self._rpc.close()
        for task in self._tasks:
            task.remove_done_callback(_die_of)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._service.close()
        self._repository.close()
        self._status.close()

    def has_survived(self, error: object) -> bool:
        """Whether it has ended something that is replaced."""
        return self._rpc is not None and self._rpc.has_survived(error)

    async def _listen(self, address: str, context: ssl.SSLContext | None) -> asyncio.Server:
        host, _, port = address.rpartition(":")
        try:
            listener = await asyncio.get_running_loop().create_server(
                self._http.connection,
                host.strip("[]"),
                int(port),
                ssl=context,
                ssl_handshake_timeout=None if context is None else HttpLimits().head_ms / 1e3,
                backlog=_BACKLOG,
            )
        except (OSError, UnicodeError) as error:  # the latter of what cannot be a host's name
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"listen.http: cannot listen at {address}: {reason}") from error
        self._listeners.append(listener)
        return listener

    async def _wait_for_a_frontend(self) -> None:
        """It listens, and answers that it is not ready; but who waits for its run file wants to be served."""
        await _until(lambda: self._service.is_ready, _LOOK_S)

    @property
    def _is_idle(self) -> bool:
        is_rpc_idle = self._rpc is None or self._rpc.is_drained
        return is_rpc_idle and not self._http.connections and not self._service.under_way

    async def _follow(self, what: str, files: Tokens | Certificate) -> None:
        told = ""
        while True:
            await asyncio.sleep(_REFRESH_S)
            trouble = ""
            try:
                files.refresh()
            except ConfigError as error:
                trouble = str(error)
            if trouble and trouble != told:  # once, and not each second until somebody mends it
                log.warning("%s_not_taken_over reason=%r", what, trouble)
            elif told and not trouble:
                log.info("%s_taken_over", what)
            told = trouble

    async def _page(self, accept: str) -> tuple[bytes, str]:
        try:
            from roles.runtime.metrics.page import page_of  # noqa: PLC0415  an extra
        except ImportError as error:
            raise Unsupported("metrics need the extra 'metrics': pip install 'tenuto[metrics]'") from error
        snapshot = list(measured_gateway(self._service.statistics, self._counters()))
        # It is written aside: of many models it takes longer than a request may wait.
        return await asyncio.to_thread(page_of, self._options.role_id, snapshot, accept)

    def _counters(self) -> Mapping[str, float]:
        statistics = self._service.statistics
        return {
            "is_ready": float(self._service.is_ready),
            "http_connections": float(self._http.served),
            "http_requests": float(self._http.requests),
            "http_refused": float(self._http.refused),
            "http_defects": float(self._http.defects),
            "http_bytes_held": float(self._http.budget.used),
            "under_way": float(self._service.under_way),
            "grpc_calls": 0.0 if self._rpc is None else float(self._rpc.calls),
            "grpc_under_way": 0.0 if self._rpc is None else float(self._rpc.under_way),
            "grpc_unreadable": 0.0 if self._rpc is None else float(self._rpc.unreadable),
            "answered": float(statistics.answered),
            **{f"failed_{code}": float(count) for code, count in statistics.failures.items()},
        }


async def _until(claim: Callable[[], bool], look_s: float) -> None:
    """Wait until it is so: of signals and connections nobody tells a coroutine."""
    while not claim():  # noqa: ASYNC110
        await asyncio.sleep(look_s)


def run_gateway(options: GatewayOptions, stop: StopSignal) -> None:
    """Serve until told to stop and all is answered."""
    try:
        import uvloop  # noqa: PLC0415  only a gateway needs it
    except ImportError as error:
        raise ConfigError(
            "the gateway needs more than is installed: pip install 'tenuto[gateway]'"
        ) from error
    gc.freeze()
    gc.set_threshold(_GC_YOUNG)
    uvloop.run(_run(options, stop))


async def _run(options: GatewayOptions, stop: StopSignal) -> None:
    gateway = Gateway(options)
    report = DefectReport(options.role_id, options.run_dir)
    serving = asyncio.ensure_future(_serve(gateway, stop))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_handler(gateway, report))
    try:
        await serving
    finally:
        await gateway.close()


async def _serve(gateway: Gateway, stop: StopSignal) -> None:
    opening = asyncio.ensure_future(gateway.open())
    while not opening.done() and not stop.is_set:
        await asyncio.wait([opening], timeout=0.05)
    if not opening.done():
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
        return
    opening.result()
    await gateway.serve(stop)
    await gateway.drain()


def _handler(
    gateway: Gateway, report: DefectReport
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError | ssl.SSLError):  # a client's connection; it is over
            return
        if gateway.has_survived(error):
            return
        if isinstance(error, Exception):
            report.end(error, ())
        loop.default_exception_handler(context)

    return handle


def _die_of(task: asyncio.Task[None]) -> None:
    """What keeps us connected, or open, has failed: a defect, which ends the process."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
