"""What is compared: the cases, and every peer with its versions, its request and the ways it may be tuned.

Each peer serves one model on one or several devices; how is up to its settings, of which a search takes the best:

- together: one server with as many workers of its own as there are devices
- apart: one server per device, and the load goes to each in turn

Several models share the devices evenly, each with its own: this suits equal rates best, since batches of one model
then never wait for another's.

Waits and batch sizes around what each peer's documents advise for a run time of 6 to 22 ms and an SLO of 25 or
50 ms: first what serves most, then a shorter and a longer wait, and smaller batches where the SLO is tight.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

ALPHA_MS = 1.053
BETA_MS = 5.072
MAX_BATCH = 16
PAYLOAD_FLOATS = 16
DEBIAN_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True, slots=True)
class Case:
    """What is served, and how fast: `models` of equal rates on `devices`, where a batch of b takes beta + alpha * b ms."""

    devices: int
    models: int
    slo_ms: float
    alpha_ms: float = ALPHA_MS
    beta_ms: float = BETA_MS

    @property
    def name(self) -> str:
        """For people."""
        counts = ((self.devices, "device"), (self.models, "model"))
        words = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts]
        return ", ".join([*words, f"{self.slo_ms:g} ms"])

    @property
    def model_names(self) -> tuple[str, ...]:
        """Of the models, in order."""
        return tuple(f"sleep{number}" for number in range(self.models))

    @property
    def bound_rps(self) -> float:
        """No server carries more: every device runs the largest batch all the time."""
        return self.devices * 1000 * MAX_BATCH / (self.alpha_ms * MAX_BATCH + self.beta_ms)


CASES = (Case(1, 1, 25.0), Case(1, 1, 50.0), Case(4, 1, 25.0), Case(4, 4, 25.0))


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a peer; `extra` goes to its server file as it is."""

    max_batch: int
    wait_ms: float
    is_together: bool
    extra: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"batch {self.max_batch}", f"wait {self.wait_ms:g} ms"]
        words += [name if value is True else f"{name} {value}" for name, value in self.extra.items() if value]
        return ", ".join([*words, "together" if self.is_together else "apart"])


@dataclass(frozen=True, slots=True)
class Peer:
    """A rival: how to install it, what to run and what to ask it.

    `interpreter` None means the one that runs us; `python_version` where only one will do. `tunings` are
    (max batch, wait in ms, extra) to try at an SLO; `arrangements` are its values of `is_together` for several
    devices.
    """

    name: str
    requirements: tuple[str, ...]
    path: str
    body: bytes
    tunings: Callable[[float], Sequence[tuple[int, float, Mapping[str, object]]]]
    headers: tuple[str, ...] = ("Content-Type: application/json",)
    arrangements: tuple[bool, ...] = (False, True)
    interpreter: str | None = None
    python_version: str | None = None

    @property
    def distribution(self) -> str:
        """Whose version counts."""
        return self.requirements[0].partition("==")[0].partition("[")[0]

    @property
    def version(self) -> str:
        """The pinned one."""
        return self.requirements[0].partition("==")[2]

    @property
    def server(self) -> str:
        """The file under servers/ that its own interpreter runs."""
        return f"{self.name}_server.py"

    def settings(self, case: Case) -> list[Setting]:
        """All to try in a case."""
        arrangements = self.arrangements if case.devices > 1 else self.arrangements[:1]
        return [
            Setting(max_batch, wait_ms, is_together, extra)
            for is_together in arrangements
            for max_batch, wait_ms, extra in self.tunings(case.slo_ms)
        ]

    def request(self, port: int, model: str) -> bytes:
        """The bytes of one request, the same every time."""
        head = [
            f"POST {self.path.format(model=model)} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            *self.headers,
            f"Content-Length: {len(self.body)}",
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + self.body


def _waits(
    *waits_ms: float, **extra: object
) -> Callable[[float], list[tuple[int, float, Mapping[str, object]]]]:
    """The largest batch with each wait; at a tight SLO also smaller batches, which never block for 22 ms."""

    def tunings(slo_ms: float) -> list[tuple[int, float, Mapping[str, object]]]:
        found: list[tuple[int, float, Mapping[str, object]]] = [
            (MAX_BATCH, wait_ms, extra) for wait_ms in waits_ms
        ]
        if slo_ms < 2 * (ALPHA_MS * MAX_BATCH + BETA_MS):
            found += [(MAX_BATCH // 2, wait_ms, extra) for wait_ms in waits_ms[:2]]
        return found

    return tunings


def _bentoml(slo_ms: float) -> list[tuple[int, float, Mapping[str, object]]]:
    """Its wait is not set but learned, under a promised latency beyond which it sheds."""
    promises_ms = (2 * slo_ms, slo_ms, 10 * slo_ms)
    return [(size, promised_ms, {}) for size in (MAX_BATCH, MAX_BATCH // 2) for promised_ms in promises_ms]


def _each(
    first: Callable[[float], Sequence[tuple[int, float, Mapping[str, object]]]],
    *others: Callable[[float], Sequence[tuple[int, float, Mapping[str, object]]]],
) -> Callable[[float], list[tuple[int, float, Mapping[str, object]]]]:
    return lambda slo_ms: [tuning for tunings in (first, *others) for tuning in tunings(slo_ms)]


_VALUES = [0.5] * PAYLOAD_FLOATS
_RAW = struct.pack(f"<{PAYLOAD_FLOATS}f", *_VALUES)
_JSON = json.dumps({"input": _VALUES}).encode()
_OPEN_INFERENCE_JSON = json.dumps(
    {"inputs": [{"name": "input", "shape": [1, PAYLOAD_FLOATS], "datatype": "FP32", "data": _VALUES}]}
).encode()
_TRITON_HEAD = json.dumps(
    {
        "inputs": [
            {
                "name": "input",
                "shape": [1, PAYLOAD_FLOATS],
                "datatype": "FP32",
                "parameters": {"binary_data_size": len(_RAW)},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
).encode()

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("mosec", ("mosec==0.9.8",), "/{model}", _JSON, _waits(5, 2, 1, 10), arrangements=(True, False)),
        Peer(
            "litserve",
            ("litserve==0.2.19",),
            "/{model}",
            _JSON,
            _each(_waits(5, 2, 10, fast_queue=False), _waits(5, 2, fast_queue=True)),
        ),
        Peer(
            "mlserver",
            ("mlserver==1.7.1",),
            "/v2/models/{model}/infer",
            _OPEN_INFERENCE_JSON,
            _each(_waits(5, 2, 10, blocking=False), _waits(5, 2, 1, blocking=True)),
            arrangements=(False,),  # its workers would each need a batcher of their own
        ),
        Peer(
            "ray",
            ("ray[serve]==2.60.0",),
            "/{model}",
            _JSON,
            _waits(5, 2, 10, 0),
            arrangements=(True,),  # a head node per device would not fit a small host
        ),
        Peer(
            "bentoml",
            ("bentoml==1.4.39",),
            "/{model}",
            b'{"x": [' + json.dumps(_VALUES).encode() + b"]}",
            _bentoml,
        ),
        Peer(
            "triton",
            ("nvidia-pytriton==0.7.0",),
            "/v2/models/{model}/infer",
            _TRITON_HEAD + _RAW,
            _waits(5, 2, 1, 10, 0),
            headers=(
                f"Inference-Header-Content-Length: {len(_TRITON_HEAD)}",
                "Content-Type: application/octet-stream",
            ),
            arrangements=(True, False),
            interpreter=DEBIAN_PYTHON,
            python_version="3.11.2",  # what its stub is linked against: others load no model
        ),
    )
}
