"""Payload through client, frontend and worker, beside bare chains over the same two hops.

    python -m benchmarks.payload [--seconds 2] [--repeat 5] [--in-flight 8] [--sizes 0.6 9.6] [--json FILE]

Every chain has three processes: a client that keeps `--in-flight` messages of `--sizes` MB under way, a middle
that passes each on whole, and an end that answers with a few bytes. All chains run in turn, `--repeat` times,
and the median counts; a ratio compares medians of one run. That results are bit-exact is for the test suite to say
(`tests/integration/test_cluster.py`).

- ours: a cluster of this host, emulated no-op model, `tenuto`; shared memory between all, as chosen for one host
- pyzmq ipc, pyzmq tcp: the same sockets (DEALER, ROUTER, PUSH, PULL) without the fabric
- tcp relay: plain sockets, each message read whole and sent on
- grpc unary, grpc stream: a protobuf message with a bytes field (needs grpcio and protobuf, else left out)
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import zmq

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.stage import cluster, context, free_ports, processes
from fabric.client import Client

MB = 1_000_000
Chain = Callable[[int, float, int], float]
"""(bytes of a message, seconds, in flight) -> bytes per second."""

LINES = {
    ("0.6", "pyzmq tcp"): 0.9,
    ("9.6", "pyzmq tcp"): 2.5,
    ("0.6", "pyzmq ipc"): 0.9,
    ("9.6", "pyzmq ipc"): 2.0,
    ("0.6", "tcp relay"): 0.65,
    ("9.6", "tcp relay"): 1.8,
    ("0.6", "grpc unary"): 3.0,
    ("9.6", "grpc unary"): 9.0,
    ("0.6", "grpc stream"): 3.0,
    ("9.6", "grpc stream"): 9.0,
}
"""By size and chain: the least that ours may be of it."""

CLUSTER = """
models: [{name: noop, slo_ms: 60000, profile: {alpha_ms: 0.0001, beta_ms: 0.001, max_batch: 16}}]
cluster: {gpus: 1}
batching: tenuto
"""

# ---------------------------------------------------------------- ours


@contextmanager
def ours() -> Iterator[Chain]:
    """The fabric: what the SDK's `submit` and `await` cost is in it."""
    with cluster(CLUSTER) as stage:

        def run(size: int, seconds: float, in_flight: int) -> float:
            return asyncio.run(_ours(stage.clients, size, seconds, in_flight))

        yield run


async def _ours(addresses: Sequence[str], size: int, seconds: float, in_flight: int) -> float:
    inputs = {"input": np.random.default_rng(0).integers(0, 256, size, np.uint8)}
    async with Client(addresses) as client:
        await client.infer("noop", inputs)
        began_s = time.perf_counter()
        until_s = began_s + seconds
        done = 0

        async def keep_one_going() -> None:
            nonlocal done
            while time.perf_counter() < until_s:
                await client.infer("noop", inputs)
                done += 1

        await asyncio.gather(*(keep_one_going() for _ in range(in_flight)))
        return done * size / (time.perf_counter() - began_s)


# ---------------------------------------------------------------- pyzmq alone


def _zmq_middle(front: str, back: str, acks: str) -> None:
    with zmq.Context() as ctx:
        clients, workers, answers = ctx.socket(zmq.ROUTER), ctx.socket(zmq.PUSH), ctx.socket(zmq.PULL)
        clients.bind(front)
        workers.connect(back)
        answers.bind(acks)
        poller = zmq.Poller()
        poller.register(clients, zmq.POLLIN)
        poller.register(answers, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                if ready is clients:
                    workers.send_multipart(clients.recv_multipart(copy=False), copy=False)
                else:
                    clients.send_multipart(answers.recv_multipart())


def _zmq_end(back: str, acks: str) -> None:
    with zmq.Context() as ctx:
        inputs, answers = ctx.socket(zmq.PULL), ctx.socket(zmq.PUSH)
        inputs.bind(back)
        answers.connect(acks)
        while True:
            parts = inputs.recv_multipart(copy=False)
            answers.send_multipart([parts[0].bytes, parts[1].bytes])


@contextmanager
def bare_zmq(transport: str) -> Iterator[Chain]:
    """The same sockets, nothing around them."""
    with ExitStack() as stack:
        if transport == "ipc":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            front, back, acks = (f"ipc://{directory}/{name}" for name in ("front", "back", "acks"))
        else:
            front, back, acks = (f"tcp://127.0.0.1:{port}" for port in free_ports(3))
        stack.enter_context(processes((_zmq_middle, (front, back, acks)), (_zmq_end, (back, acks))))
        ctx = stack.enter_context(zmq.Context())
        dealer = stack.enter_context(ctx.socket(zmq.DEALER))
        dealer.connect(front)

        def run(size: int, seconds: float, in_flight: int) -> float:
            payload = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
            head = b"x" * 100

            def send() -> None:
                dealer.send(head, zmq.SNDMORE)
                dealer.send(payload, copy=False)

            return _closed_loop(send, dealer.recv_multipart, size, seconds, in_flight)

        yield run


# ---------------------------------------------------------------- plain TCP


def _receive(connection: socket.socket, buffer: memoryview) -> bool:
    while buffer:
        got = connection.recv_into(buffer)
        if got == 0:
            return False
        buffer = buffer[got:]
    return True


def _tcp_relay(front: int, back: int) -> None:
    with socket.create_server(("127.0.0.1", front)) as server:
        upstream = _connected(back)
        client, _ = server.accept()
        for each in (client, upstream):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with futures.ThreadPoolExecutor(2) as threads:
            threads.submit(_pass_answers, upstream, client)
            size_field = bytearray(8)
            buffer = bytearray(1)
            while _receive(client, memoryview(size_field)):
                (size,) = struct.unpack("<Q", size_field)
                if len(buffer) != size:
                    buffer = bytearray(size)
                _receive(client, memoryview(buffer))
                upstream.sendall(size_field)
                upstream.sendall(buffer)


def _pass_answers(upstream: socket.socket, client: socket.socket) -> None:
    answer = bytearray(1)
    while _receive(upstream, memoryview(answer)):
        client.sendall(answer)


def _tcp_end(back: int) -> None:
    with socket.create_server(("127.0.0.1", back)) as server:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size_field = bytearray(8)
        buffer = bytearray(1)
        while _receive(connection, memoryview(size_field)):
            (size,) = struct.unpack("<Q", size_field)
            if len(buffer) != size:
                buffer = bytearray(size)
            _receive(connection, memoryview(buffer))
            connection.sendall(b"y")


@contextmanager
def tcp_relay() -> Iterator[Chain]:
    """Store and forward over plain sockets."""
    front, back = free_ports(2)
    with processes((_tcp_end, (back,)), (_tcp_relay, (front, back))), _connected(front) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def run(size: int, seconds: float, in_flight: int) -> float:
            payload = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
            head = struct.pack("<Q", size)
            # Sending blocks here, so answers are counted by another thread, as the kernel would.
            slots = context.BoundedSemaphore(in_flight)
            counted = 0

            def count() -> None:
                nonlocal counted
                answer = bytearray(1)
                while _receive(connection, memoryview(answer)) and not is_over:
                    counted += 1
                    slots.release()

            def take_slot() -> None:
                if not slots.acquire(timeout=30):
                    connection.shutdown(socket.SHUT_RDWR)  # which ends the counting too
                    raise TimeoutError("the relay does not answer")

            def send() -> None:
                connection.sendall(head)
                connection.sendall(payload)

            is_over = False
            with futures.ThreadPoolExecutor(1) as thread:
                counting = thread.submit(count)
                began_s = time.perf_counter()
                while time.perf_counter() < began_s + seconds:
                    take_slot()
                    send()
                for _ in range(in_flight):
                    take_slot()
                took_s = time.perf_counter() - began_s
                is_over = True
                send()  # its answer is not counted: it ends the counting
                counting.result(30)
                return counted * size / took_s

        yield run


# ---------------------------------------------------------------- gRPC


def _grpc_server(port: int, next_port: int | None) -> None:
    import grpc  # noqa: PLC0415  a rival, not always there
    from google.protobuf.wrappers_pb2 import BytesValue, Int32Value  # noqa: PLC0415  see above

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    following = None
    if next_port is not None:
        channel = grpc.insecure_channel(f"127.0.0.1:{next_port}", options=options)
        grpc.channel_ready_future(channel).result(30)
        following = (
            channel.unary_unary("/chain/Unary", BytesValue.SerializeToString, Int32Value.FromString),
            channel.stream_stream("/chain/Stream", BytesValue.SerializeToString, Int32Value.FromString),
        )

    def unary(request: Any, _: Any) -> Any:
        return following[0](request) if following else Int32Value(value=1)

    def stream(requests: Any, _: Any) -> Any:
        if following:
            yield from following[1](requests)
        else:
            for _request in requests:
                yield Int32Value(value=1)

    server = grpc.server(futures.ThreadPoolExecutor(32), options=options)
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(
            unary, BytesValue.FromString, Int32Value.SerializeToString
        ),
        "Stream": grpc.stream_stream_rpc_method_handler(
            stream, BytesValue.FromString, Int32Value.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("chain", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


@contextmanager
def grpc_chain(kind: str) -> Iterator[Chain]:
    """Two hops of gRPC: each message is made, read and made again."""
    import grpc  # noqa: PLC0415  a rival, not always there
    from google.protobuf.wrappers_pb2 import BytesValue, Int32Value  # noqa: PLC0415  see above

    front, back = free_ports(2)
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with (
        processes((_grpc_server, (back, None)), (_grpc_server, (front, back))),
        grpc.insecure_channel(f"127.0.0.1:{front}", options=options) as channel,
    ):
        grpc.channel_ready_future(channel).result(30)

        def unary(size: int, seconds: float, in_flight: int) -> float:
            call = channel.unary_unary("/chain/Unary", BytesValue.SerializeToString, Int32Value.FromString)
            payload = np.random.default_rng(0).bytes(size)
            waiting = [call.future(BytesValue(value=payload)) for _ in range(in_flight)]
            began_s, done = time.perf_counter(), 0
            while time.perf_counter() < began_s + seconds:
                waiting.pop(0).result(60)
                done += 1
                waiting.append(call.future(BytesValue(value=payload)))
            for one in waiting:
                one.result(60)
                done += 1
            return done * size / (time.perf_counter() - began_s)

        def stream(size: int, seconds: float, in_flight: int) -> float:
            call = channel.stream_stream("/chain/Stream", BytesValue.SerializeToString, Int32Value.FromString)
            payload = np.random.default_rng(0).bytes(size)
            slots = context.BoundedSemaphore(in_flight)
            began_s, done = time.perf_counter(), 0

            def requests() -> Iterator[Any]:
                while time.perf_counter() < began_s + seconds:
                    slots.acquire()
                    yield BytesValue(value=payload)

            for _ in call(requests()):
                done += 1
                slots.release()
            return done * size / (time.perf_counter() - began_s)

        yield unary if kind == "unary" else stream


# ---------------------------------------------------------------- the run


def _closed_loop(
    send: Callable[[], None], receive: Callable[[], object], size: int, seconds: float, in_flight: int
) -> float:
    for _ in range(in_flight):
        send()
    began_s, done = time.perf_counter(), 0
    while time.perf_counter() < began_s + seconds:
        receive()
        send()
        done += 1
    took_s = time.perf_counter() - began_s
    for _ in range(in_flight):
        receive()
    return done * size / took_s


def _connected(port: int) -> socket.socket:
    until_s = time.perf_counter() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.perf_counter() > until_s:
                raise
            time.sleep(0.05)


def chains() -> dict[str, Callable[[], Any]]:
    """By name; gRPC where it is installed."""
    found: dict[str, Callable[[], Any]] = {
        "ours": ours,
        "pyzmq ipc": lambda: bare_zmq("ipc"),
        "pyzmq tcp": lambda: bare_zmq("tcp"),
        "tcp relay": tcp_relay,
    }
    try:
        import google.protobuf  # noqa: PLC0415  a rival, not always there
        import grpc  # noqa: PLC0415  see above
    except ImportError:
        print("grpc: left out, grpcio and protobuf are not installed")
    else:
        del google, grpc
        found["grpc unary"] = lambda: grpc_chain("unary")
        found["grpc stream"] = lambda: grpc_chain("stream")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.6, 9.6], help="in MB")
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("payload")
    speeds: dict[str, dict[str, list[float]]] = {}
    makers = chains()
    with ExitStack() as stack:
        running = {name: stack.enter_context(make()) for name, make in makers.items()}
        for _ in range(options.repeat):
            for size in options.sizes:
                for name, run in running.items():
                    gb_s = run(int(size * MB), options.seconds, options.in_flight) / 1e9
                    speeds.setdefault(f"{size:g}", {}).setdefault(name, []).append(gb_s)
    for size, by_name in speeds.items():
        table = figures.table(
            f"{size} MB, {options.in_flight} in flight, GB/s",
            "chain",
            "median",
            "lowest",
            "highest",
            "ours / it",
        )
        mine = statistics.median(by_name["ours"])
        for name, values in by_name.items():
            median = statistics.median(values)
            table.rows.append((name, median, min(values), max(values), mine / median))
            if (size, name) in LINES:
                line = Line(f"ours of {name} at {size} MB", mine / median, at_least=LINES[size, name])
                figures.lines.append(line)
    tell(figures, options.json)


if __name__ == "__main__":
    main()
