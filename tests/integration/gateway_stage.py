"""A gateway's process, and a stand-in frontend behind it that answers as told."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fabric.ids import ModelId
from fabric.link import Received
from fabric.messages import (
    Answer,
    ImagePreprocess,
    Infer,
    Ledger,
    ModelInfo,
    ModelsAsked,
    ModelsListed,
    Refusal,
    TensorInfo,
    TensorSpec,
)
from fabric.tensors import dtype_name
from roles.frontend.admission import wrong_inputs
from roles.runtime.process import read_run_file
from tests.integration.proc import until
from tests.integration.test_client import Frontend

FIXED = TensorInfo("x", "float32", (3,))
MODELS = {
    info.model_id: info
    for info in (
        *(ModelInfo(ModelId(name), 5_000.0, replicas=1) for name in ("echo", "never", "busy", "soon")),
        ModelInfo(ModelId("fixed"), 5_000.0, (FIXED,), (FIXED,), replicas=1),
        ModelInfo(
            ModelId("pictures"),
            5_000.0,
            (TensorInfo("image", "float32", (3, 8, 8)),),
            image=ImagePreprocess("image", 8, 8, (0, 0, 0), (1, 1, 1)),
            replicas=1,
        ),
        ModelInfo(ModelId("idle"), 5_000.0),
    )
}


class Served(Frontend):
    """Answers with its inputs what its model can take; `busy` is Overloaded, `soon` DeadlineExceeded, `never` without an end."""

    @property
    def asked(self) -> list[Infer]:
        return [received.message for received in self.seen if isinstance(received.message, Infer)]

    def _reply(self, received: Received) -> None:
        peer = received.peer
        match received.message:
            case ModelsAsked():
                self.link.send(peer, ModelsListed(tuple(MODELS.values())))
            case Infer(number, "soon"):
                self.link.send(peer, Refusal(number, "DeadlineExceeded", "too late", retryable=False))
            case Infer(number, name) if name in ("echo", "fixed", "pictures"):
                specs = [
                    TensorSpec(one.name, dtype_name(one.array.dtype), one.array.shape)
                    for one in received.tensors
                ]
                wrong = wrong_inputs(MODELS[name], specs)
                if wrong is not None:
                    self.link.send(peer, Refusal(number, "InvalidInput", wrong, retryable=False))
                else:
                    self.link.send(peer, Answer(number, Ledger(gpu_ms=1.5, batch_size=1)), received.tensors)
            case Infer(number, name) if name not in MODELS:
                self.link.send(
                    peer, Refusal(number, "ModelNotFound", f"no model {name!r:.60}", retryable=False)
                )
            case _:
                super()._reply(received)


@dataclass
class GatewayProcess:
    """One of them. `http` and `grpc`: host:port."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    run_dir: Path

    @property
    def port(self) -> int:
        return int(self.http.rpartition(":")[2])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, document (or bytes), and headers with names in small letters."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in answer.getheaders()}
        is_json = found.get("content-type") == "application/json" and "content-encoding" not in found
        return answer.status, json.loads(raw) if is_json and raw else raw, found

    def infer(self, model: str, values: Any = (1, 2, 3), **more: Any) -> tuple[int, Any, Mapping[str, str]]:
        """By JSON."""
        tensor = {"name": "x", "datatype": "FP32", "shape": [len(values)], "data": list(values)}
        body = json.dumps({"inputs": [tensor], **more}).encode()
        return self.ask("POST", f"/v2/models/{model}/infer", body)


EC: Final = "ec -pkeyopt ec_paramgen_curve:P-256"
RSA: Final = "rsa:2048"


def certified(home: Path, key_type: str = EC) -> tuple[Path, Path]:
    """A certificate of this host, `c.pem`, and its key, `k.pem`."""
    command = f"openssl req -x509 -newkey {key_type} -nodes -days 2 -subj /CN=localhost"
    certificate, key = home / "c.pem", home / "k.pem"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return certificate, key


@contextmanager
def gateway(
    home: Path, frontends: list[str], document: Mapping[str, Any] | None = None
) -> Iterator[GatewayProcess]:
    """Runs until the end of the block; then it must end by itself."""
    file = home / "c.json"
    line = {"alpha_ms": 1, "beta_ms": 5}
    models = [{"name": "echo", "slo_ms": 100, "profile": line}]
    file.write_text(
        json.dumps({"models": models, "cluster": {"gpus": 1}, **(document or {})}), encoding="utf-8"
    )
    addresses = [word for address in frontends for word in ("--frontend", address)]
    ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command = [
        sys.executable,
        "-m",
        "roles.cli",
        "gateway",
        str(file),
        "--run-dir",
        str(home),
        *addresses,
        *ports,
    ]
    log = home / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ})
    try:
        run_file = home / "gateway-0.json"
        until(
            lambda: read_run_file(run_file) is not None or process.poll() is not None,
            what="the gateway's start",
        )
        found = read_run_file(run_file)
        assert found is not None, log.read_text(encoding="utf-8")
        addresses_of = {purpose: its[0].partition("://")[2] for purpose, its in found.addresses.items()}
        yield GatewayProcess(process, addresses_of["http"], addresses_of["grpc"], home)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        assert process.returncode == 0, log.read_text(encoding="utf-8")
        assert not list(home.glob("*.defect")), log.read_text(encoding="utf-8")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
