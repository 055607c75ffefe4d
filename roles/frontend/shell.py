"""The frontend as a process: a ROUTER for clients, a DEALER to the scheduler, PULL and PUSH for payload."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, field

from fabric.clock import Clock, MonotonicClock
from fabric.curve import CLIENT_KINDS, guarded
from fabric.errors import LocalProtocolError, code_of_unsendable
from fabric.frames import ANSWER_BYTES_MAX, REQUEST_BYTES_MAX
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import FrontendId, Incarnation, PeerId, new_incarnation, peer_id
from fabric.inproc import HubLink, ServerLink
from fabric.keys import NODE, Keyring
from fabric.link import Link, NamedTensor, Received
from fabric.messages import (
    Answer,
    AnyMessage,
    Arrivals,
    FrontendHello,
    Infer,
    Left,
    Outputs,
    Refusal,
    StatusListed,
)
from fabric.outbox import Outbox
from fabric.shared_memory import memory_address
from fabric.sockets import LinkOptions, PushOptions
from fabric.transport import ZMQ, Transport
from roles.applications.served import ServedApplication
from roles.frontend.core import FrontendCore
from roles.frontend.decoding import Decoding
from roles.frontend.events import (
    Asked,
    ClientSaid,
    Computed,
    DropSlice,
    FrontendAction,
    FrontendEvent,
    FrontendSettings,
    KeepRow,
    MakeInputs,
    OpenSlice,
    Preprocess,
    PushInputs,
    Release,
    Reply,
    ReplyWithAll,
    Report,
    Tell,
    TurnEnded,
    Unannounced,
    Unpushed,
    UseScheduler,
    WorkerSaid,
)
from roles.frontend.graphs.input_maker import InputMaker
from roles.frontend.scheduler_links import SchedulerLinks
from roles.frontend.tensor_lists import described, in_order, kept_row, named_results
from roles.runtime.core import SCHEDULER, Lost
from roles.runtime.defects import DefectReport
from roles.runtime.environment import RunDir
from roles.runtime.loop.client_source import ClientLinkSource
from roles.runtime.loop.driver import Role, run_roles
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.loop.sources import CLOSED, LinkSource, SendingSource, Source, TranslatedSource
from roles.runtime.metrics import catalog
from roles.runtime.metrics.common import about_process, about_role, other_events, page_server
from roles.runtime.metrics.snapshot import SnapshotAsked
from roles.runtime.payloads import Payloads
from roles.runtime.process import RunFile, StopSignal, log, log_offences, remove_run_file, write_run_file
from roles.runtime.process_events import StopAsked

_LEVELS = {
    "pending": catalog.PENDING,
    "pending_bytes": catalog.PENDING_BYTES,
    "is_ready": catalog.FRONTEND_READY,
    "shards_linked": catalog.SHARDS_LINKED,
    "tasks_pending": catalog.TASKS_PENDING,
}
"""Of its counters, those that fall again."""
_COUNTED = ("answers_unsendable", "answers_dropped", "scheduler_full")
_CLIENT_QUEUE_MAX = 4_096  # answers for one client that does not read; what is over is dropped and counted


class FrontendOptions(Struct, frozen=True):
    """How to run one frontend. `client_addresses` beside the ipc one that every frontend has in its run directory.

    `metrics`: HOST:PORT of its page; None: it has none. `scheduler_addresses`: of each scheduler; `scheduler_shards`: the shard of
    each, empty: there is one. `host`: the interface of the TCP address at which workers leave outputs.
    `incarnation`, `clock`, `transport`: a process has its own; tests may know better.
    """

    frontend_id: FrontendId
    run_dir: Path
    scheduler_addresses: Sequence[Sequence[str]]
    client_addresses: Sequence[str] = ("tcp://127.0.0.1:0",)
    request_bytes_max: int = REQUEST_BYTES_MAX
    pending_max: int = 65_536
    pending_bytes_max: int = 1 << 30
    decode_threads: int = 2
    host: str = "127.0.0.1"
    keyring: Keyring | None = None
    metrics: str | None = None
    heartbeats: HeartbeatTiming = field(default_factory=HeartbeatTiming)
    incarnation: Incarnation = field(default_factory=new_incarnation)
    clock: Clock = field(default_factory=MonotonicClock)
    transport: Transport = ZMQ
    scheduler_shards: Sequence[int] = ()
    applications: tuple[ServedApplication, ...] = ()


class FrontendShell:
    """Does what the core decides, with the links of one frontend.

    `hub`: of the scheduler with number `beside`, where that is in this process; its addresses are not needed then.
    `stop` begins its drain. Raises ConfigError for an address that cannot be bound.
    """

    def __init__(
        self, options: FrontendOptions, stop: Source[StopAsked], hub: HubLink | None = None, beside: int = 0
    ) -> None:
        incarnation, transport = options.incarnation, options.transport
        own = peer_id(options.frontend_id, incarnation)
        self._run_dir = options.run_dir
        self._id = options.frontend_id
        self._payloads = Payloads(bytes_max=1 << 62)  # the core bounds it: only it can refuse with a reason
        self._clock = options.clock
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._unsent: Mailbox[Unannounced | Unpushed] = Mailbox()
        run_dir = RunDir(options.run_dir)
        client_options = LinkOptions(
            queue_messages_max=_CLIENT_QUEUE_MAX,
            # Over the core's limit, so that too large a request gets a typed answer.
            payload_bytes_max=max(ANSWER_BYTES_MAX, options.request_bytes_max),
            is_sharing=True,
        )
        ipc = run_dir.ipc_address(f"{self._id}.client")
        keyring = options.keyring
        self._clients = transport.bind_peers(
            [ipc, *options.client_addresses], client_options, guarded(keyring, CLIENT_KINDS)
        )
        self._from_clients = ClientLinkSource[FrontendEvent](
            self._clients, self._clock, self._from_client, lambda peer: Lost(peer, CLOSED)
        )
        self._outputs = transport.bind_payload(
            [run_dir.ipc_address(f"{self._id}.outputs"), f"tcp://{options.host}:0"],
            guard=guarded(keyring, {NODE}, names=False),
        )
        shards = options.scheduler_shards or (0,) * len(options.scheduler_addresses)
        links: list[dict[int, ServerLink]] = [{} for _ in range(max(shards) + 1)]
        for number, control in enumerate(options.scheduler_addresses):
            links[shards[number]][number] = (
                hub.connect(own)
                if hub is not None and number == beside
                else transport.connect(own, SCHEDULER, control, guarded(keyring))
            )
        self._shards = [
            SchedulerLinks(shard, of_shard, self._clock, options.heartbeats, partial(self._untold, shard))
            for shard, of_shard in enumerate(links)
        ]
        self._slices = transport.push(
            PushOptions(shared_bytes_max=options.pending_bytes_max), guarded(keyring)
        )
        self._to_clients = Outbox(self._clients, self._undelivered, client_options.payload_bytes_max)
        self._decoding = Decoding(self._payloads, options.decode_threads)
        self._inputs = InputMaker(
            self._payloads, options.applications, self._clock, options.request_bytes_max
        )
        self._is_alone = hub is None
        self._metrics = page_server(options.metrics, self._id, self._clock)
        asked: list[Source[FrontendEvent]] = (
            [] if self._metrics is None else [TranslatedSource(self._metrics.asked, self._show)]
        )
        self._core = FrontendCore(
            FrontendSettings(
                self._id,
                incarnation,
                tuple(self._outputs.addresses),
                options.request_bytes_max,
                options.pending_max,
                options.pending_bytes_max,
                memory_address(),
                len(self._shards),
                options.applications,
            ),
            self._clock.now_ms(),
        )
        self.role = Role[FrontendEvent, FrontendAction](
            self._core,
            [
                stop,
                self._from_clients,
                *(source for links in self._shards for source in links.sources),
                LinkSource(self._outputs, self._from_worker),
                SendingSource(self._slices),
                self._decoding,
                self._inputs,
                self._unsent,
                *asked,
            ],
            self._perform,
            self._end_turn,
        )
        addresses = {"client": list(self._clients.addresses), "payload": list(self._outputs.addresses)}
        if self._metrics is not None:
            addresses["metrics"] = [self._metrics.address]
        self._run_file = RunFile(self._id, os.getpid(), incarnation, addresses)

    def announce(self) -> None:
        """Say where it is."""
        write_run_file(self._run_dir, self._run_file)
        log.info("frontend_serving addresses=%s", ",".join(self._clients.addresses))

    @property
    def is_drained(self) -> bool:
        """Whether it was asked to stop, and has answered everything."""
        return self._core.is_drained(self._clock.now_ms())

    def close(self) -> None:
        """Flush for at most 100 ms, end the decoding threads."""
        remove_run_file(self._run_dir, self._run_file)
        if self._metrics is not None:
            self._metrics.close()
        links: tuple[Link, ...] = (self._clients, self._outputs, self._slices)
        for link in links:
            link.close()
        for shard in self._shards:
            shard.close()
        self._decoding.close()
        self._inputs.close()
        self._unsent.close()

    def _from_client(self, received: Received) -> FrontendEvent:
        match received.message:
            case Infer() as message:
                specs, size_bytes = described(received.tensors)
                handle = self._payloads.put(received.tensors)
                assert handle is not None, "the core bounds the bytes, and has to see a request to refuse it"
                late_ms, unread_ms = received.late_ms, self._from_clients.waited_ms(received)
                return Asked(received.peer, message, late_ms, handle, specs, size_bytes, unread_ms)
            case message:
                return ClientSaid(received.peer, message)

    def _from_worker(self, received: Received) -> FrontendEvent:
        match received.message:
            case Outputs() as message:
                specs, _ = described(received.tensors)
                handle = self._payloads.put(received.tensors)
                assert handle is not None, "outputs are gone again before the turn ends"
                return Computed(message, handle, specs)
            case message:
                return WorkerSaid(message)

    def _perform(self, action: FrontendAction) -> None:
        """Do one action."""
        match action:
            case Reply():
                self._reply(action)
            case Release(payload, may_be_read):
                self._payloads.release(payload, may_be_read=may_be_read)
                self._decoding.forget(payload)
            case Tell(FrontendHello() as hello, shard):
                self._shards[shard].greet(hello)
            case Tell(message, shard):
                self._tell(message, shard)
            case UseScheduler(number, shard):
                self._shards[shard].use(number)
            case PushInputs():
                self._push(action)
            case Preprocess(payload, image):
                self._decoding.start(payload, image)
            case MakeInputs():
                self._inputs.start(action)
            case KeepRow(payload, row, kept):
                self._payloads.keep(kept, kept_row(self._payloads.get(payload), row))
            case ReplyWithAll():
                self._reply_with_all(action)
            case OpenSlice(slice_id, incarnation, addresses):
                self._slices.know(PeerId(slice_id), incarnation, addresses)
            case DropSlice(slice_id):
                self._slices.drop(PeerId(slice_id))
            case Report(peer):
                self._to_clients.put(peer, self._status())

    def _reply(self, action: Reply) -> None:
        tensors = self._payloads.get(action.payload) if action.payload else ()
        rows = [NamedTensor(tensor.name, tensor.array[action.row, ...]) for tensor in tensors]
        self._put(action.peer, action.message, rows)

    def _reply_with_all(self, action: ReplyWithAll) -> None:
        kept = [self._payloads.get(payload) for payload in action.payloads]
        self._put(action.peer, action.message, named_results(action.message.results, kept))

    def _put(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor]) -> None:
        try:
            self._to_clients.put(peer, message, tensors)
        except LocalProtocolError as error:  # what users' models make of an answer is no bug of ours
            self._counts["answers_unsendable"] += 1
            if isinstance(message, Answer):
                reason = f"its outputs cannot be sent: {error}"
                number, code = message.request_no, code_of_unsendable(error)
                refused = Refusal(number, code, reason, retryable=False, may_be_read=message.may_be_read)
                self._to_clients.put(peer, refused)

    def _tell(self, message: AnyMessage, shard: int) -> None:
        try:
            self._shards[shard].tell(message)
        except LocalProtocolError as error:
            log.warning("message_unsendable message=%s error=%r", type(message).__name__, str(error))
            self._untold(shard, SCHEDULER, message)

    def _end_turn(self) -> None:
        if self._core.has_gathered:
            for action in self._core.handle(TurnEnded(), self._clock.now_ms()):
                self._perform(action)
        log_offences(self._core.offences)
        for links in self._shards:
            links.flush()
            if links.ungreeted:
                links.greet_others(self._core.hello)
        self._to_clients.flush()

    def _undelivered(self, peer: PeerId, message: AnyMessage) -> None:
        """A client that does not read, or is gone, loses its answers; the others do not wait for it."""
        del peer, message
        self._counts["answers_dropped"] += 1

    def _untold(self, shard: int, peer: PeerId, message: AnyMessage) -> None:
        del peer
        self._counts["scheduler_full"] += 1
        if isinstance(message, Arrivals | Left):
            self._unsent.post(Unannounced(message, shard))

    def _push(self, action: PushInputs) -> None:
        tensors = [
            tensor
            for payload in action.payloads
            for tensor in in_order(self._payloads.get(payload), action.names)
        ]
        try:
            is_sent = self._slices.send(PeerId(action.message.slice_id), action.message, tensors)
        except LocalProtocolError as error:
            log.warning("inputs_unsendable slice=%s error=%r", action.message.slice_id, str(error))
            code, reason = code_of_unsendable(error), f"its batch cannot be sent: {error}"
            self._unsent.post(Unpushed(action.message, code, reason))
            return
        if not is_sent:
            self._unsent.post(Unpushed(action.message))

    def _show(self, asked: SnapshotAsked) -> None:
        """Somebody wants its page of metrics. What is about the process the scheduler in it shows, if there is one."""
        del asked
        assert self._metrics is not None, "it asked"
        core, counters = self._core, self._counters()
        process = about_process(self.role.stats) if self._is_alone else ()
        self._metrics.publish(
            [
                about_role("frontend"),
                *process,
                *core.recorder.measured(core.margins_ms),
                *other_events(counters, _LEVELS),
            ]
        )

    def _counters(self) -> dict[str, float]:
        counters: dict[str, float] = {**self._core.counters, **self._counts}
        links: dict[str, Link] = {
            "client": self._clients,
            **{f"scheduler{number or ''}": links.link for number, links in enumerate(self._shards)},
            "inputs": self._slices,
            "outputs": self._outputs,
        }
        for name, link in links.items():
            counters |= {f"{name}_{counter}": value for counter, value in link.counters.items()}
        return counters

    def _status(self) -> StatusListed:
        counters = self._counters()
        return self.role.stats.told_in(StatusListed(self._id, os.getpid(), (), self._core.models, counters))


def run_frontend(options: FrontendOptions, stop: StopSignal) -> None:
    """Serve until told to stop and all is answered; see `FrontendShell`."""
    shell = FrontendShell(options, stop)
    try:
        shell.announce()
        on_defect = DefectReport(options.frontend_id, options.run_dir).end
        run_roles([shell.role], lambda: shell.is_drained, on_defect)
    finally:
        shell.close()
