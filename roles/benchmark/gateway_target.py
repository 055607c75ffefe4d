"""A gateway as the target of a load: the Open Inference Protocol by HTTP with binary tensors, as its clients send it.

The ledger comes back in `Server-Timing` (W3C). Its `network` is the gateway's own way to a frontend; here what HTTP took is added, so
that the stages of an answer add up to what its sender saw.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from msgspec.structs import replace

from fabric.addresses import PORT_MAX, check_address
from fabric.client import InferResult
from fabric.errors import ConfigError, FabricError, PeerLost, RequestError
from fabric.ids import ModelId, SliceId
from fabric.link import Tensor
from fabric.messages import Ledger, ModelInfo, TensorInfo
from fabric.policy_options import shown
from fabric.tensors import dtype_name
from roles.benchmark.http_connections import OK, HttpAnswer, HttpClient, HttpTarget, Written
from roles.gateway.inference import as_tritons
from roles.gateway.tensors import datatype_of, to_raw

if TYPE_CHECKING:
    from roles.gateway.rpc.client import RpcClient

GATEWAY_SCHEMES: Final = ("http://", "https://", "grpc://", "grpcs://")
_PORTS: Final = {"http": 80, "https": 443}
"""Where an address names none; gRPC has none of its own."""
_HOST: Final = r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]"
_ADDRESS: Final = re.compile(rf"(https?|grpcs?)://(({_HOST})(?::([0-9]{{1,5}}))?)/?")
ASK_S: Final = 10.0
ANSWER_SPARE_S: Final = 2.0
MODELS_BYTES_MAX: Final = 64 << 20
_TIMING: Final = re.compile(r"([a-z]+);dur=(-?[0-9.]+)")
_BATCH: Final = re.compile(r'batch;desc="(\d+) on ([^,"]*), ([^"]*)"')


class GatewayError(RequestError):
    """What a gateway answered instead of outputs, under its code."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code  # type: ignore[misc]  # of this one, not of its class

    def __reduce__(self) -> tuple[type[GatewayError], tuple[str, str]]:
        """A sender tells it to the command's own process."""
        return type(self), (self.code, self.reason)


class GatewayAddress(NamedTuple):
    """Where a gateway listens. `host` is without the brackets of IPv6, `written` is HOST:PORT as the user has it."""

    scheme: str
    host: str
    port: int
    written: str


def gateway_address(address: str) -> GatewayAddress:
    """The parts of ``http://HOST:PORT``, ``grpc://HOST:PORT`` and those with TLS. Raises ConfigError for anything else."""
    found = _ADDRESS.fullmatch(address)
    if found is not None:
        scheme, written, host, digits = found.groups()
        port = int(digits) if digits else _PORTS.get(scheme, 0)
        if 1 <= port <= PORT_MAX:
            return GatewayAddress(scheme, host.strip("[]"), port, written)
    right = "grpc://127.0.0.1:8001" if address.startswith("grpc") else "http://127.0.0.1:8000"
    raise ConfigError(f"{shown(address)} is no gateway's address; it must be like {right}")


def check_target(address: str) -> None:
    """Raise ConfigError for what is neither a frontend's address nor a gateway's, with what it should look like."""
    if address.startswith(GATEWAY_SCHEMES):
        gateway_address(address)
        return
    try:
        check_address(address)
    except ConfigError as error:
        raise ConfigError(f"{error}, or {', '.join(GATEWAY_SCHEMES)}") from error


class GatewayClient(HttpClient):
    """Submits to one gateway, requests of at most that budget. `token`: a bearer token, where it asks for one. Raises ConfigError for an address that is none."""

    def __init__(self, address: str, token: str = "", budget_ms_max: float = 0.0) -> None:
        at = gateway_address(address)
        self._address, self._host, self._port = address, at.host, at.port
        self._tls = ssl.create_default_context() if at.scheme == "https" else None
        self._head = f"Host: {at.written}\r\n" + (f"Authorization: Bearer {token}\r\n" if token else "")
        # The gateway answers by a request's deadline; this is for one that does not.
        self.limit_s = budget_ms_max / 1e3 + ANSWER_SPARE_S
        super().__init__(HttpTarget({"": [(at.port, b"")]}, at.host, self._tls))

    async def models(self, names: Iterable[ModelId]) -> dict[ModelId, ModelInfo]:
        """What it serves, these and others. Raises PeerLost, and RequestError where it wants a token."""
        del names
        document = await asyncio.to_thread(self._asked, "/v1/models")
        found = {}
        try:
            for one in document["models"]:
                inputs = tuple(
                    TensorInfo(its["name"], its["dtype"], tuple(its["shape"])) for its in one["inputs"]
                )
                found[ModelId(one["name"])] = ModelInfo(ModelId(one["name"]), one["slo_ms"], inputs)
        except (KeyError, TypeError) as error:
            raise PeerLost(f"{self._address} is no gateway of Tenuto's: /v1/models has no {error}") from error
        return found

    def _asked(self, path: str) -> Any:
        kind = http.client.HTTPConnection if self._tls is None else http.client.HTTPSConnection
        more: dict[str, Any] = {} if self._tls is None else {"context": self._tls}
        connection = kind(self._host, self._port, timeout=ASK_S, **more)
        fields = dict(line.split(": ", 1) for line in self._head.splitlines())
        try:
            connection.request("GET", path, headers=fields)
            answer = connection.getresponse()
            body = answer.read(MODELS_BYTES_MAX)
            document = json.loads(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PeerLost(f"nobody answers at {self._address} as a gateway does: {error}") from error
        finally:
            connection.close()
        if answer.status != OK:
            raise _error_of(answer.status, document)
        return document

    def written(
        self, model: str, inputs: Mapping[str, Tensor], budget_ms: float | None, priority: int | None
    ) -> tuple[int, Written]:
        """One request: JSON with what is left of the budget, then the tensors as they are."""
        described, raw = [], []
        for name, array in inputs.items():
            data = to_raw(array)
            raw.append(data)
            described.append(
                {
                    "name": name,
                    "datatype": datatype_of(dtype_name(array.dtype)),
                    "shape": array.shape,
                    "parameters": {"binary_data_size": len(data)},
                }
            )
        parameters: dict[str, Any] = {"binary_data_output": True}
        if priority is not None:
            parameters["priority"] = as_tritons(priority)
        asked = {"inputs": described, "parameters": parameters}

        def request(spent_ms: float) -> bytes | None:
            if budget_ms is not None:
                if spent_ms >= budget_ms:
                    return None
                parameters["deadline_ms"] = round(budget_ms - spent_ms, 3)
            document = json.dumps(asked, separators=(",", ":")).encode()
            size = len(document) + sum(len(data) for data in raw)
            head = (
                f"POST /v2/models/{quote(model, safe='')}/infer HTTP/1.1\r\n{self._head}"
                f"Inference-Header-Content-Length: {len(document)}\r\nContent-Length: {size}\r\n\r\n"
            )
            return b"".join((head.encode("latin-1"), document, *raw))

        return self._port, request

    def read(self, answer: HttpAnswer, model: str, took_ms: float) -> InferResult | FabricError:
        """Its ledger, or what went wrong. Outputs are not looked at."""
        del model
        if answer.status != OK:
            try:
                document = json.loads(answer.body or b"{}")
            except ValueError:
                document = {}
            return _error_of(answer.status, document)
        return InferResult({}, ledger_of(answer.fields.get(b"server-timing", b"").decode("latin-1"), took_ms))


def gateway_client(address: str, token: str, budget_ms_max: float) -> GatewayClient | RpcClient:
    """By HTTP or gRPC, as the address says. Raises ConfigError for one that is none, or without the extra for gRPC."""
    at = gateway_address(address)
    if at.scheme in _PORTS:
        return GatewayClient(address, token, budget_ms_max)
    try:
        from roles.gateway.rpc.client import RpcClient  # noqa: PLC0415  an extra, and a second's import
    except ImportError as error:
        raise ConfigError(
            f"{at.scheme}:// needs more than is installed: pip install 'tenuto[gateway]' ({error})"
        ) from error
    return RpcClient(
        at.written, is_tls=at.scheme == "grpcs", token=token, failed=GatewayError, ledger=ledger_of
    )


def ledger_of(timing: str, took_ms: float) -> Ledger:
    """The ledger in that header field; what was taken beyond its total is the network's."""
    spent = {name: float(ms) for name, ms in _TIMING.findall(timing)}
    batch = _BATCH.search(timing)
    beyond_ms = max(0.0, took_ms - spent.pop("total", took_ms))
    stages = {f"{name}_ms": ms for name, ms in spent.items() if f"{name}_ms" in Ledger.__struct_fields__}
    stages["network_ms"] = stages.get("network_ms", 0.0) + beyond_ms
    ledger = replace(Ledger(total_ms=took_ms), **stages)
    if batch is None:
        return ledger
    size, slice_id, reason = batch.groups()
    return replace(ledger, batch_size=int(size), slice_id=SliceId(slice_id), reason=reason)


def _error_of(status: int, document: object) -> GatewayError:
    told = document if isinstance(document, dict) else {}
    return GatewayError(str(told.get("code", f"HTTP{status}")), str(told.get("error", f"HTTP {status}")))
