"""Everything of ours that makes something of bytes: each with good examples, and the errors it may raise."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgpack
import msgspec
import numpy as np
from PIL import Image

from fabric import codec, frames, tensors
from fabric.curve import keyless, new_pair
from fabric.errors import ConfigError, FabricError, InvalidInput, RemoteProtocolError
from fabric.ids import Epoch, Incarnation, ModelId, PeerId
from fabric.keys import KeyPair, Trusted, TrustedKey, read_pair, read_trusted
from fabric.limits import OutOfBounds, check
from fabric.link import NamedTensor
from fabric.messages import (
    WIRE_VERSION,
    Envelope,
    ImagePreprocess,
    Infer,
    Parcel,
    PlanCopy,
    SharedAt,
    TensorSpec,
)
from fabric.shared_memory import Borrowed
from fabric.sockets.routes import new_route
from roles.config.checks import check_endpoint
from roles.config.documents import read_value
from roles.config.read_config import load_config, parse_config
from roles.frontend.preprocess import preprocess
from roles.node_agent.lease import LeaseRecord
from roles.node_agent.lease_file import LeaseFile
from roles.runtime.core import Heard, Send
from roles.runtime.journal import Journal, JournalReader
from roles.runtime.process import RunFile, read_run_file
from roles.scheduler.planning.desired_state import controller_settings
from roles.scheduler.planning.saved_plan import SavedPlan
from roles.scheduler.replay_start import about_scheduler, settings_of
from roles.scheduler.settings import settings_from
from tests.hostile import TYPES, Hostile
from tests.malformed import requests

LOG: Final = logging.getLogger("tenuto")
_IMAGE: Final = ImagePreprocess("input", 32, 32, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
_T = TypeVar("_T")
_MEMORY_FOLDER: Final = "/dev/shm"


@dataclass(frozen=True)
class Decoder:
    """`decode` takes any bytes and may raise nothing but `errors`. `weight`: its part of all inputs; slow ones get less."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    examples: Sequence[bytes]
    weight: int = 100


@contextlib.contextmanager
def decoders(seed: int = 1) -> Iterator[list[Decoder]]:
    """All of them, with a folder for those that read files."""
    draws = random.Random(seed)
    place = _MEMORY_FOLDER if Path(_MEMORY_FOLDER).is_dir() else None
    former = LOG.level
    LOG.setLevel(logging.CRITICAL)  # what cannot be read is logged each time
    try:
        with tempfile.TemporaryDirectory(prefix="tenuto-malformed-", dir=place) as name:
            http = Decoder("HTTP requests", requests.read, requests.ERRORS, requests.examples()[:6])
            yield [*_wire(draws), *_files(Path(name), draws), _pictures(draws), http]
    finally:
        LOG.setLevel(former)


def _wire(draws: random.Random) -> list[Decoder]:
    messages = [Hostile(draws, {}).message() for _ in range(4 * len(TYPES))]
    headers = [codec.encode(Envelope(WIRE_VERSION, 3, 12.5, (Parcel((), message),))) for message in messages]
    several = codec.encode(Envelope(WIRE_VERSION, 0, 0.0, tuple(Parcel((), one) for one in messages[:9])))
    specs = [
        TensorSpec(name, dtype, shape)
        for name, dtype, shape in (
            ("x", "float32", (2, 3)),
            ("é", "bool", (4,)),
            ("y", "int64", ()),
            ("z", "uint8", (0, 5)),
        )
    ]
    shared = SharedAt("1/3/4096/tenuto-" + "0" * 32, 0)
    return [
        Decoder("headers", codec.decode, (RemoteProtocolError,), [*headers, several]),
        Decoder("messages", _split, (RemoteProtocolError,), [_framed(number) for number in (0, 1, 2, 5)]),
        Decoder(
            "tensors",
            _tensor,
            (RemoteProtocolError, OutOfBounds),
            [msgspec.msgpack.encode((spec, bytes(tensors.size_of(spec)))) for spec in specs],
        ),
        Decoder(
            "shared memory",
            _shared,
            (RemoteProtocolError, OutOfBounds),
            [msgspec.msgpack.encode((shared, 100))],
            weight=20,
        ),
        Decoder(
            "identities",
            frames.peer_from,
            (RemoteProtocolError,),
            [new_route(PeerId("frontend-0/5f3a9c01")), b"client/alice/1", b"worker-a-1/2#1.00"],
            weight=50,
        ),
        Decoder(
            "addresses",
            _address,
            (ConfigError,),
            [b"tcp://127.0.0.1:5555?key=" + b"0a" * 32, b"ipc:///run/x", b"tcp://[::1]:0", b"tcp://*:1"],
            weight=50,
        ),
    ]


def _framed(count: int) -> bytes:
    """A whole message with tensors, as one piece of bytes that `_split` takes apart again."""
    named = [NamedTensor(f"t{number}", np.arange(20, dtype=np.float32)) for number in range(count)]
    named += [NamedTensor("large", np.zeros(frames.SMALL_BELOW_BYTES // 4, np.float32))] if count == 1 else []
    parts = frames.join((frames.pack(Infer(1, ModelId("m")), named),), epoch=Epoch(0), sent_at_ms=0.0)
    return bytes(msgpack.packb([bytes(part) for part in parts]))


def _split(data: bytes) -> object:
    try:
        parts = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        parts = [data]
    if not isinstance(parts, list) or not all(isinstance(part, bytes) for part in parts):
        parts = [data[:50], data[50:]]
    return frames.split(parts)


def _tensor(data: bytes) -> object:
    read = _parsed(data, tuple[TensorSpec, bytes])
    if read is None:
        return None
    spec, frame = read
    check(spec)
    tensors.size_of(spec)
    return tensors.from_frame(spec, frame)


def _shared(data: bytes) -> object:
    read = _parsed(data, tuple[SharedAt, int])
    if read is None or read[1] < 0:
        return None
    check(read[0])
    return Borrowed().place(*read)


def _parsed(data: bytes, kind: type[_T]) -> _T | None:
    """What the header's decoder would hand on; None for what it would refuse."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _address(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    check_endpoint(text.partition("?")[0], "listen.client", schemes=("tcp", "ipc"))
    return keyless(text)


def _files(folder: Path, draws: random.Random) -> list[Decoder]:
    pairs = [new_pair(one) for one in ("scheduler", "frontend", "node/a", "client/alice")]
    trusted = Trusted(tuple(TrustedKey(one.principal, one.public, "2026-11-23") for one in pairs))
    client = KeyPair("client/alice", pairs[3].public, pairs[3].secret, trusted.keys[1:2])
    document = read_value(CONFIGURATION_JSON.decode(), "an example")
    about = _about(document)
    plan, lease = folder / "scheduler-0.plan", folder / "node-a.lease"
    saved = SavedPlan(folder, "scheduler-0", document)
    saved.write(PlanCopy(16, 1, saved.digest, about.decode()), 0.0)
    LeaseFile(folder, "a").write(LeaseRecord(Epoch(16), "scheduler-0", Incarnation("5f3a9c01")))
    return [
        Decoder("plans", settings_of, (ConfigError,), [about], weight=10),
        _file(folder / "trusted.json", read_trusted, [msgspec.json.encode(trusted)], 10),
        _file(folder / "alice.key", read_pair, [msgspec.json.encode(one) for one in (client, *pairs)], 10),
        _file(
            folder / "journal",
            lambda path: list(JournalReader(path).entries()),
            [_journal(folder, draws)],
            10,
        ),
        _file(plan, lambda _: SavedPlan(folder, "scheduler-0", document).read(), [plan.read_bytes()], 10),
        _file(lease, lambda _: LeaseFile(folder, "a").read(), [lease.read_bytes()], 10),
        _file(folder / "scheduler-0.json", read_run_file, [_run_file()], 20),
        _file(folder / "cluster.yaml", load_config, CONFIGURATIONS, 2),
        _file(folder / "cluster.json", load_config, [CONFIGURATION_JSON], 4),
    ]


def _file(path: Path, read: Callable[[Path], object], examples: Sequence[bytes], weight: int) -> Decoder:
    def decode(data: bytes) -> object:
        path.write_bytes(data)
        path.chmod(0o600)
        return read(path)

    return Decoder(f"file {path.name}", decode, (FabricError,), examples, weight)


def _journal(folder: Path, draws: random.Random) -> bytes:
    path = folder / "recorded"
    journal = Journal(path, b"about")
    hostile = Hostile(draws, {})
    for number in range(30):
        message = hostile.message()
        journal.note(Heard(PeerId("client/1"), message, 0.5), float(number), [Send(PeerId("a/1"), message)])
    journal.close()
    return path.read_bytes()


def _about(document: dict[str, object]) -> bytes:
    """What a scheduler of that configuration writes down of itself."""
    config = parse_config(document, Path("/"), source="an example")
    placement = config.place()
    settings = settings_from(config, placement)
    planning = controller_settings(config, document, "/", placement, settings)
    return about_scheduler(settings, config.batching, planning)


def _run_file() -> bytes:
    return msgspec.json.encode(RunFile("scheduler-0", 5, "5f3a9c01", {"control": ["ipc:///run/x"]}))


def _pictures(draws: random.Random) -> Decoder:
    pixels = np.frombuffer(draws.randbytes(40 * 48 * 3), np.uint8).reshape(40, 48, 3)
    examples = []
    for kind in ("PNG", "JPEG", "BMP", "GIF", "WEBP"):
        written = io.BytesIO()
        Image.fromarray(pixels).save(written, kind)
        examples.append(written.getvalue())

    def decode(data: bytes) -> object:
        return preprocess(np.frombuffer(data, np.uint8), _IMAGE)

    return Decoder("pictures", decode, (InvalidInput,), examples, weight=5)


CONFIGURATIONS: Final = (
    b"""
seed: 1
rate_rps: 100
popularity: {zipf: 0.9}
models:
 - {name: resnet50, slo_ms: 25, arrival: {process: gamma, shape: 0.5}, profile: {alpha_ms: 1.053, beta_ms: 5.072, max_batch: 64}}
 - name: bert
   slo_ms: 5e1
   profile: {table: {1: 5.9, 2: 7.1, "8": 20}}
   memory_mb: 300
   priority: 1
cluster:
  nodes: [{host: a, gpus: 4, type: v100, memory_gb: 16, price_per_hour: 3.06, device: emulated}]
  frontends: 2
  network: {control_ms: 0.1, data_ms_per_item: 0.01, result_ms: 0, jitter_ms: 0}
  interference: none
batching: {deferred: {drop: simple}}
placement: symphony
listen: {client: "tcp://127.0.0.1:0", http: "127.0.0.1:8000"}
""",
    (
        b"models: [&m {name: a, slo_ms: 9, rate_rps: [[0, 5], [10, 8]], profile: {by_type: {v100: {ref: thesis-v100/resnet50}}}}]\n"
        b"cluster: {gpus: 2, gpu_type: v100}\nplacement: {usher: {groups: [[a]]}}\nbatching: {timeout: {timeout_ms: 3}}\n"
    ),
)
CONFIGURATION_JSON: Final = b'{"models": [{"name": "a", "slo_ms": 20, "rate_rps": 5, "profile": {"alpha_ms": 1, "beta_ms": 2}}], "cluster": {"gpus": 1}}'
