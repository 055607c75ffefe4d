"""Who is compared: every peer with its versions, its request and the ways it may be tuned.

Each peer serves one model on one or several devices; how is up to its settings, of which a search takes the best:

- together: one server with as many workers of its own as there are devices
- apart: one server per device, and the load goes to each in turn

Waits and batch sizes around what each peer's documents advise for a run time of 6 to 22 ms and an SLO of 25 or
50 ms: first what serves most, then a shorter and a longer wait, and smaller batches where the SLO is tight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.cases import EMULATED_INPUTS, MAX_BATCH, PAYLOAD_FLOATS, Case, Inputs, RealCase

DATATYPES = {"float32": "FP32", "int64": "INT64"}
DEBIAN_PYTHON = "/usr/bin/python3"


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


Tuning = tuple[int, float, Mapping[str, object]]
"""Largest batch, wait in ms, extra."""
Body = tuple[tuple[str, ...], bytes]
"""Header fields and the body itself."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A rival: how to install it, what to run and what to ask it.

    `body` is of a request to a model of a case. `interpreter` None means the one that runs us; `python_version` where
    only one will do. `tunings` are those to try in a case; `arrangements` are its values of `is_together` for several
    devices. `runs_models`: its server file can also run real ones.
    """

    name: str
    requirements: tuple[str, ...]
    path: str
    body: Callable[[Case, str], Body]
    tunings: Callable[[Case], Sequence[Tuning]]
    arrangements: tuple[bool, ...] = (False, True)
    interpreter: str | None = None
    python_version: str | None = None
    runs_models: bool = False

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
        """All to try in a case, the most promising first; none where it cannot run the case's models."""
        if isinstance(case, RealCase) and not self.runs_models:
            return []
        arrangements = self.arrangements if case.devices > 1 else self.arrangements[:1]
        return [
            Setting(max_batch, wait_ms, is_together, extra)
            for is_together in arrangements
            for max_batch, wait_ms, extra in self.tunings(case)
        ]

    def request(self, port: int, model: str, case: Case) -> bytes:
        """The bytes of one request, the same every time."""
        fields, body = self.body(case, model)
        head = [
            f"POST {self.path.format(model=model)} HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            *fields,
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _waits(*waits_ms: float, **extra: object) -> Callable[[Case], list[Tuning]]:
    """The largest batch with each wait, smaller ones with the first two."""

    def tunings(case: Case) -> list[Tuning]:
        return [
            (size, wait_ms, extra)
            for wait_ms in waits_ms
            for size in (case.batch_sizes if wait_ms in waits_ms[:2] else case.batch_sizes[:1])
        ]

    return tunings


def _bentoml(case: Case) -> list[Tuning]:
    """Its wait is not set but learned, under a promised latency beyond which it sheds."""
    promises_ms = (2 * case.slo_ms, case.slo_ms, 10 * case.slo_ms)
    return [(size, promised_ms, {}) for size in (MAX_BATCH, MAX_BATCH // 2) for promised_ms in promises_ms]


def _one_after_the_other(*all_tunings: Callable[[Case], Sequence[Tuning]]) -> Callable[[Case], list[Tuning]]:
    return lambda case: [tuning for tunings in all_tunings for tuning in tunings(case)]


def _also_in_pairs(tunings: Callable[[Case], Sequence[Tuning]]) -> Callable[[Case], list[Tuning]]:
    """Of one real model the first two also with two workers, of which one copies while the other runs."""

    def with_pairs(case: Case) -> list[Tuning]:
        first, rest = tunings(case)[:2], tunings(case)[2:]
        is_alone = isinstance(case, RealCase) and len(case.served) == 1
        pairs = [(size, wait_ms, {**extra, "workers": 2}) for size, wait_ms, extra in first if is_alone]
        return [*first, *pairs, *rest]

    return with_pairs


def raw(inputs: Inputs) -> bytes:
    """All tensors one after the other, as they lie in memory (little-endian)."""
    return b"".join(value.tobytes() for value in inputs.values())


def _json(document: Mapping[str, object]) -> Callable[[Case, str], Body]:
    """That document; of a real model the tensors themselves, which no server has to parse."""
    text = json.dumps(document).encode()

    def body(case: Case, model: str) -> Body:
        if isinstance(case, RealCase):
            return ("Content-Type: application/octet-stream",), raw(case.inputs[model])
        return ("Content-Type: application/json",), text

    return body


def _open_inference(case: Case, model: str) -> Body:
    """The protocol's binary tensors, which Triton and our gateway take."""
    inputs = case.inputs[model]
    tensors = [
        {
            "name": name,
            "shape": [1, *value.shape],
            "datatype": DATATYPES[value.dtype.name],
            "parameters": {"binary_data_size": value.nbytes},
        }
        for name, value in inputs.items()
    ]
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    fields = (f"Inference-Header-Content-Length: {len(head)}", "Content-Type: application/octet-stream")
    return fields, head + raw(inputs)


_VALUES = EMULATED_INPUTS["input"].tolist()
_OPEN_INFERENCE_JSON = {
    "inputs": [{"name": "input", "shape": [1, PAYLOAD_FLOATS], "datatype": "FP32", "data": _VALUES}]
}

PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "mosec",
            ("mosec==0.9.8",),
            "/{model}",
            _json({"input": _VALUES}),
            _also_in_pairs(_waits(5, 2, 1, 10)),
            arrangements=(True, False),
            runs_models=True,
        ),
        Peer(
            "litserve",
            ("litserve==0.2.19",),
            "/{model}",
            _json({"input": _VALUES}),
            _also_in_pairs(
                _one_after_the_other(_waits(5, 2, 10, fast_queue=False), _waits(5, 2, fast_queue=True))
            ),
            runs_models=True,
        ),
        Peer(
            "mlserver",
            ("mlserver==1.7.1",),
            "/v2/models/{model}/infer",
            _json(_OPEN_INFERENCE_JSON),
            _one_after_the_other(_waits(5, 2, 10, blocking=False), _waits(5, 2, 1, blocking=True)),
            arrangements=(False,),  # its workers would each need a batcher of their own
        ),
        Peer(
            "ray",
            ("ray[serve]==2.60.0",),
            "/{model}",
            _json({"input": _VALUES}),
            _waits(5, 2, 10, 0),
            arrangements=(True,),  # a head node per device would not fit a small host
        ),
        Peer(
            "bentoml",
            ("bentoml==1.4.39",),
            "/{model}",
            _json({"x": [_VALUES]}),
            _bentoml,
        ),
        Peer(
            "triton",
            ("nvidia-pytriton==0.7.0",),
            "/v2/models/{model}/infer",
            _open_inference,
            _waits(5, 2, 1, 10, 0),
            arrangements=(True, False),
            interpreter=DEBIAN_PYTHON,
            python_version="3.11.2",  # what its stub is linked against: others load no model
        ),
    )
}
