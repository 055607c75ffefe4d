"""Applications in a living cluster: real models, real glue, one answer and one ledger for each request."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from fabric.client import BlockingClient, Client, RunResult
from fabric.clock import MonotonicClock
from fabric.errors import Internal, InvalidInput, RequestError, TooLarge
from fabric.ids import ModelId
from fabric.link import NamedTensor
from policies.graphs.graph import Stage
from roles.applications.served import GlueSpec
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.frontend.events import MakeInputs
from roles.frontend.graphs.glue import GlueRunner
from roles.frontend.graphs.input_maker import InputMaker
from roles.runtime.message_pipe import MessagePipe
from roles.runtime.payloads import Payloads
from tests.applications_stage import served
from tests.integration.proc import processes_naming, until
from tests.models.glue import BOXES, CROP, SIDE

pytestmark = pytest.mark.timeout(180)

GLUE = "tests.models.glue"
FAULTS = {
    "raises": ("Raises", "raised KeyError"),
    "hangs": ("Hangs", "took longer than 200 ms"),
    "dies": ("Dies", "ended with code -9"),
    "nonsense": ("Nonsense", "item 0 of what it gave is a str, not a dict of arrays"),
    "too-many": ("TooMany", "10000 requests after one answer; at most 64"),
    "wrong-shape": ("WrongShape", "of shape"),
    "huge": ("Huge", "bytes"),
    "missing": ("NoSuchClass", "cannot be made"),
}

CLUSTER = """
models:
 - {name: detector, loader: {python: "tests.models.graphs:Detector"}}
 - {name: classifier, slo_ms: 4000, loader: {python: "tests.models.graphs:Classifier"}}
 - {name: mean, slo_ms: 4000, loader: {python: "tests.models.graphs:Mean"}}
 - {name: nowhere, loader: {python: "tests.models.graphs:NoSuchModel"}}
applications:
 - name: traffic
   slo_ms: 20000
   stages:
    detect: {model: detector, answer: true}
    cars: {model: classifier, after: detect, glue: {python: "tests.models.glue:Cars", limit_ms: 5000}}
    people: {model: mean, after: detect, glue: {python: "tests.models.glue:People", limit_ms: 5000}}
 - name: unserved
   slo_ms: 20000
   stages: {detect: {model: detector}, rest: {model: nowhere, after: detect}}
 - name: partial
   slo_ms: 20000
   stages:
    detect: {model: detector, answer: true}
    rest: {model: mean, after: detect, optional: true, glue: {python: "tests.models.glue:Raises"}}
 - name: counted
   slo_ms: 20000
   stages:
    detect: {model: detector}
    again: {model: detector, after: detect, fan_out: {from: outputs.cars}}
FAULTS
cluster:
  nodes: [{host: cpu, gpus: 2, device: cpu}]
batching: eager
placement:
  given:
    slices:
     - {gpu: 0, models: [{model: detector}, {model: classifier}, {model: mean}]}
     - {gpu: 1, models: [{model: detector}, {model: classifier}, {model: mean}, {model: nowhere}]}
"""


def _fault(name: str, glue: str) -> str:
    return f"""
 - name: {name}
   slo_ms: 20000
   stages:
    detect: {{model: detector}}
    rest: {{model: mean, after: detect, glue: {{python: "{GLUE}:{glue}", limit_ms: 200}}}}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[TemporaryCluster]:
    text = CLUSTER.replace("FAULTS", "".join(_fault(name, glue) for name, (glue, _) in FAULTS.items()))
    path = Path(f"/tmp/t-applications-{os.getpid()}.yaml")
    path.write_text(text, encoding="utf-8")
    try:
        with temporary_cluster(path) as one:
            yield one
    finally:
        path.unlink()


@pytest.fixture
def client(cluster: TemporaryCluster) -> Iterator[BlockingClient]:
    with BlockingClient(cluster.endpoints["client"][0]) as one:
        yield one


def picture(cars: int, people: int) -> NDArray[np.float32]:
    noise = np.random.default_rng(10 * cars + people).standard_normal((1, SIDE, SIDE)).astype(np.float32)
    noise[0, 0, :2] = cars, people
    return noise


def crop(of: NDArray[np.float32], place: int) -> NDArray[np.float32]:
    return of[:, 4 * place : 4 * place + CROP, 4 * place : 4 * place + CROP]


def check_ledger(result: RunResult) -> None:
    """Its path's stages take all the time there was, and each its own."""
    on_path = [line for line in result.stages if line.is_on_path]
    inside_ms = result.ledger.total_ms - result.ledger.network_ms
    assert sum(line.ledger.total_ms for line in on_path) == pytest.approx(inside_ms, abs=1e-6)
    for line in on_path:
        own = line.ledger
        parts = (own.preprocess_ms, own.held_ms, own.waited_ms, own.transfer_ms, own.queue_ms, own.gpu_ms)
        assert sum(parts) + own.return_ms == pytest.approx(own.total_ms, abs=1e-6)


@pytest.mark.parametrize(("cars", "people"), [(2, 3), (0, 1), (BOXES, 0), (0, 0)])
def test_boxes_decide_how_many_classifiers_are_asked_and_each_gets_its_own_crop(
    client: BlockingClient, cars: int, people: int
) -> None:
    own = picture(cars, people)
    result = client.run("traffic", {"picture": own})
    assert {stage: len(answers) for stage, answers in result.outputs.items()} == {
        "detect": 1,
        "cars": cars,
        "people": people,
    }
    assert result.places["cars"] == [(0, nth) for nth in range(cars)]
    means = [float(one["mean"]) for one in result.outputs["people"]]
    assert means == pytest.approx([crop(own, cars + nth).mean() for nth in range(people)], abs=1e-5)
    # The same crops, sent to the same model one by one.
    for nth, answer in enumerate(result.outputs["cars"]):
        alone = client.infer("classifier", {"crop": crop(own, nth)})
        np.testing.assert_allclose(answer["scores"].tolist(), alone.outputs["scores"].tolist(), atol=1e-5)
    assert [(line.stage, line.requests) for line in result.stages] == [
        ("detect", 1),
        ("cars", cars),
        ("people", people),
    ]
    check_ledger(result)


def test_an_output_decides_how_many_follow_without_glue(client: BlockingClient) -> None:
    result = client.run("counted", {"picture": picture(3, 0)})
    assert len(result.outputs["again"]) == 3
    check_ledger(result)


@pytest.mark.parametrize("name", FAULTS)
def test_glue_that_does_what_it_should_not_is_one_clear_error_and_the_rest_serves(
    client: BlockingClient, name: str
) -> None:
    with pytest.raises(RequestError) as caught:
        client.run(name, {"picture": picture(1, 1)})
    assert "stage rest: " in caught.value.reason
    assert FAULTS[name][1] in caught.value.reason
    check_ledger(client.run("traffic", {"picture": picture(1, 1)}))


def test_what_an_optional_stage_lacks_is_said_beside_the_rest(client: BlockingClient) -> None:
    result = client.run("partial", {"picture": picture(1, 1)})
    assert result.is_partial
    assert (len(result.outputs["detect"]), len(result.outputs["rest"])) == (1, 0)
    (rest,) = [line for line in result.stages if line.stage == "rest"]
    assert (rest.requests, rest.lost, rest.reason.partition(":")[0]) == (0, 0, "Internal")
    check_ledger(result)


def test_bad_requests_are_refused_with_what_is_wrong(client: BlockingClient) -> None:
    with pytest.raises(RequestError, match=r"stage rest of application 'unserved': nothing .* 'nowhere'"):
        client.run("unserved", {"picture": picture(1, 1)})
    with pytest.raises(InvalidInput, match=r"stage detect: .*picture"):
        client.run("traffic", {"photo": picture(1, 1)})
    with pytest.raises(InvalidInput, match="'mean' is a model"):
        client.run("mean", {"crop": crop(picture(1, 1), 0)})
    assert {info.model_id for info in client.models()} >= {"traffic", "detector"}


def test_a_worker_killed_in_the_middle_of_graphs_leaves_each_request_one_answer(
    cluster: TemporaryCluster,
) -> None:
    """What ran there runs again on the other slice, which hosts the same models: the SLO leaves time for that."""

    def workers() -> list[int]:
        named = processes_naming(str(cluster.run_dir))
        return sorted(pid for pid, command in named.items() if "roles.gpu_worker" in command)

    async def play() -> list[RunResult | BaseException]:
        async with Client(cluster.endpoints["client"][0]) as client:
            asked = []
            for nth in range(60):
                asked.append(asyncio.ensure_future(client.run("traffic", {"picture": picture(2, 2)})))
                if nth == 30:
                    os.kill(workers()[-1], signal.SIGKILL)
                await asyncio.sleep(0.01)
            return await asyncio.gather(*asked, return_exceptions=True)

    assert workers(), "there is somebody to kill"
    answers = asyncio.run(play())
    assert len(answers) == 60
    for answer in answers:
        assert isinstance(answer, RunResult), answer
        assert (len(answer.outputs["cars"]), len(answer.outputs["people"])) == (2, 2)
        check_ledger(answer)


ODD_GLUE = """
import asyncio

class Untold(Exception):
    def __str__(self):
        raise RuntimeError("nobody knows")

    __repr__ = __str__

class NoArray:
    def __array__(self, *_, **__):
        raise RuntimeError("it requires grad")

class Own:
    def split(self, outputs, request):
        match int(request["x"][0]):
            case 1:
                raise Untold
            case 2:
                raise asyncio.CancelledError
            case 3:
                raise SystemExit(3)
            case 4:
                return [{"x": NoArray()}]
        return [outputs]
"""


def test_whatever_a_users_glue_raises_is_the_end_of_one_call_and_not_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other requests would wait for all that it imports."""
    (tmp_path / "own.py").write_text(ODD_GLUE)
    monkeypatch.chdir(tmp_path)
    came: queue.Queue[tuple[int, object]] = queue.Queue()
    clock = MonotonicClock()
    runner = GlueRunner("shop", {"two": GlueSpec("own:Own", 30_000.0)}, came.put, clock, 1 << 20)
    try:
        for job in range(6):
            x = [NamedTensor("x", np.array([job]))]
            runner.start(job, "two", [("one", [x])], x, clock.now_ms() + 60_000.0)
        answers = [came.get(timeout=60) for _ in range(6)]
    finally:
        runner.close()
    assert [number for number, _ in answers] == list(range(6))
    _, *refused, _ = [made for _, made in answers]
    assert [str(error).partition(": ")[2] for error in refused] == [
        "it raised Untold",
        "it raised CancelledError: ",
        "it raised SystemExit: 3",
        "item 0 of what it gave has no arrays: RuntimeError: it requires grad",
    ]
    assert all(isinstance(made, Sequence) for _, made in (answers[0], answers[-1])), answers


class SlowPipe(MessagePipe):
    """To a host that takes more than a second for what it is to be given, which is less than it may."""

    def send(self, *args: Any) -> None:
        time.sleep(1.2)
        super().send(*args)


def test_a_call_has_its_limit_from_when_it_was_given_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(ODD_GLUE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("roles.frontend.graphs.glue.MessagePipe", SlowPipe)
    came: queue.Queue[tuple[int, object]] = queue.Queue()
    clock = MonotonicClock()
    runner = GlueRunner("shop", {"two": GlueSpec("own:Own", 1_000.0)}, came.put, clock, 1 << 20)
    try:
        x = [NamedTensor("x", np.array([0]))]
        large = [*x, NamedTensor("large", np.zeros(1 << 27, np.uint8))]
        runner.start(0, "two", [("one", [x])], large, clock.now_ms() + 60_000.0)
        _, made = came.get(timeout=60)
    finally:
        runner.close()
    assert isinstance(made, Sequence), made


COUNTING_GLUE = """
import pathlib, time

class Own:
    def split(self, outputs, request):
        number = int(request["x"])
        while number == 0 and not pathlib.Path("go").exists():
            time.sleep(0.005)
        with open("ran", "a") as ran:
            ran.write(str(number))
        return []
"""


def test_glue_of_a_request_that_nobody_waits_for_any_more_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cancelled, or has its answer."""
    (tmp_path / "own.py").write_text(COUNTING_GLUE)
    monkeypatch.chdir(tmp_path)
    clock, payloads = MonotonicClock(), Payloads(1 << 20)
    application = served(Stage("two", ModelId("mean")))
    application = replace(application, glue={"two": GlueSpec("own:Own", 30_000.0)})
    maker = InputMaker(payloads, (application,), clock, 1 << 20)
    handles = [payloads.put([NamedTensor("x", np.array(number))]) for number in range(4)]
    try:
        for number, handle in enumerate(handles):
            assert handle is not None
            until_ms = clock.now_ms() + 60_000.0
            maker.start(MakeInputs(number, ModelId("app"), "two", (), handle, (), until_ms))
        for handle in handles[1:3]:
            assert handle is not None
            payloads.release(handle)
        (tmp_path / "go").touch()
        ended: list[int] = []

        def are_done() -> bool:
            ended.extend(one.job for one in maker.take(9, clock.now_ms()))
            return len(ended) == 2

        until(are_done, what="two of four jobs")
    finally:
        maker.close()
    assert (tmp_path / "ran").read_text() == "03"


UNSENDABLE = """
import numpy as np

class Own:
    def split(self, outputs, request):
        return [{"x": np.array(["cat"]) if len(outputs["x"]) == 1 else np.zeros(1 << 21)}]
"""


def test_glue_whose_result_cannot_be_sent_is_told_too_large_only_where_that_is_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(UNSENDABLE)
    monkeypatch.chdir(tmp_path)
    came: queue.Queue[tuple[int, object]] = queue.Queue()
    clock = MonotonicClock()
    runner = GlueRunner("shop", {"two": GlueSpec("own:Own", 30_000.0)}, came.put, clock, 1 << 20)
    text, large = np.array(["cat"]), np.zeros(1 << 21, np.uint8)
    try:
        for job, x in enumerate((np.zeros(1), np.zeros(2), text, large)):
            answers = [("one", [[NamedTensor("x", x)]])]
            runner.start(job, "two", answers, [NamedTensor("x", np.zeros(1))], clock.now_ms() + 60_000.0)
        made = [came.get(timeout=60)[1] for _ in range(4)]
    finally:
        runner.close()
    assert [type(error) for error in made] == [Internal, TooLarge, Internal, TooLarge], made


def test_glue_is_given_all_that_came_before_though_that_is_more_than_it_may_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n    def split(self, outputs, request):\n        return [{'x': request['x'][:1] + outputs['x'][:1]}]\n"
    )
    monkeypatch.chdir(tmp_path)
    came: queue.Queue[tuple[int, Any]] = queue.Queue()
    clock = MonotonicClock()
    runner = GlueRunner("shop", {"two": GlueSpec("own:Own", 30_000.0)}, came.put, clock, 1 << 20)
    part = NamedTensor("x", np.ones(1 << 20, np.uint8))  # a request within the limit, and an answer
    try:
        runner.start(0, "two", [("one", [[part]])], [part], clock.now_ms() + 60_000.0)
        _, ((made,),) = came.get(timeout=60)
    finally:
        runner.close()
    assert made.array.tolist() == [2]


def test_glue_goes_on_when_every_process_of_a_cluster_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frontend answers what it has accepted first."""
    (tmp_path / "own.py").write_text(
        "import os, signal\n\nclass Own:\n    def split(self, outputs, request):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n        return [outputs]\n"
    )
    monkeypatch.chdir(tmp_path)
    came: queue.Queue[tuple[int, object]] = queue.Queue()
    clock = MonotonicClock()
    runner = GlueRunner("shop", {"two": GlueSpec("own:Own", 30_000.0)}, came.put, clock, 1 << 20)
    try:
        x = [NamedTensor("x", np.arange(3))]
        runner.start(7, "two", [("one", [x])], x, clock.now_ms() + 30_000.0)
        _, made = came.get(timeout=60)
        assert isinstance(made, Sequence), made
    finally:
        runner.close()


def test_what_lies_beside_a_users_glue_hides_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a fabric.py or roles/ is a common one: two well-known tools look for them."""
    for name in ("fabric", "roles", "policies"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not yours')\n")
    (tmp_path / "own.py").write_text(
        "class Own:\n    def split(self, outputs, request):\n        return [outputs]\n"
    )
    monkeypatch.chdir(tmp_path)
    came: queue.Queue[tuple[int, object]] = queue.Queue()
    clock = MonotonicClock()
    runner = GlueRunner("shop", {"two": GlueSpec("own:Own", 30_000.0)}, came.put, clock, 1 << 20)
    try:
        x = [NamedTensor("x", np.arange(3))]
        runner.start(7, "two", [("one", [x])], x, clock.now_ms() + 30_000.0)
        number, made = came.get(timeout=60)
        assert number == 7
        assert isinstance(made, Sequence), made
        assert [[one.name for one in item] for item in made] == [["x"]]
    finally:
        runner.close()
