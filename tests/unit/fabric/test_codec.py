from __future__ import annotations

import gc
import itertools
import math
import sys
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric import codec
from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.ids import (
    FRONTEND_NAME_BYTES_MAX,
    BatchId,
    FrontendId,
    Incarnation,
    ModelId,
    NodeId,
    SliceId,
)
from fabric.limits import INTEGER_MAX, NAME_CHARS_MAX, REASON_CHARS_MAX
from fabric.messages import (
    LEAVING_TERM,
    PARTS_MAX,
    REQUESTS_TOLD_MAX,
    TENSORS_MAX,
    WIRE_VERSION,
    AnyMessage,
    Arrivals,
    DesiredSlices,
    Directory,
    Done,
    Dropped,
    Envelope,
    ModelInfo,
    ModelSet,
    ModelSpec,
    Outputs,
    Parcel,
    Part,
    Ping,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceSpec,
    SliceStatus,
    StatusListed,
    Withdraw,
    split_runs,
)
from profiles.model import BATCH_SIZE_LIMIT

ARRIVALS = [12, "m", 0, 1, 25.0, 0.0, 0.0]  # tag, model, first_seq, count, budget, span, ready_in


def raw(body: list[Any], version: int = WIRE_VERSION, sent_at_ms: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([version, 0, sent_at_ms, [[[], body]]])


def envelope(body: AnyMessage) -> Envelope:
    return Envelope(WIRE_VERSION, 0, 1.0, (codec.checked(Parcel((), body)),))


def changed(place: int, value: object) -> list[Any]:
    return [*ARRIVALS[:place], value, *ARRIVALS[place + 1 :]]


def test_a_header_is_an_array_with_the_tag_first() -> None:
    header = codec.encode(envelope(Ping(5)))
    assert msgspec.msgpack.decode(header) == [WIRE_VERSION, 0, 1.0, [[[], [7, 5]]]]


def test_fields_a_newer_peer_appended_are_passed_over() -> None:
    assert codec.decode(raw([7, 5, "from the future"])).parcels[0].body == Ping(5)


def test_defaults_stand_in_for_fields_an_older_peer_leaves_out() -> None:
    assert codec.decode(raw(ARRIVALS[:5])).parcels[0].body == Arrivals(ModelId("m"), 0, 1, 25.0)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(raw([7, 5], version=WIRE_VERSION + 1), id="another version"),
        pytest.param(raw([999, 5]), id="unknown tag"),
        pytest.param(raw(["Ping", 5]), id="tag of the wrong type"),
        pytest.param(raw([7, "five"]), id="wrong type"),
        pytest.param(raw([7]), id="missing field"),
        pytest.param(raw([7, -1]), id="negative number"),
        pytest.param(raw([7, 2**60]), id="oversized number"),
        pytest.param(raw([7, 5], sent_at_ms=math.nan), id="sent at NaN"),
        pytest.param(raw(changed(1, "m" * 513)), id="long name"),
        pytest.param(raw(changed(2, -1)), id="negative seq"),
        pytest.param(raw(changed(3, 0)), id="empty run"),
        pytest.param(raw(changed(3, 65_537)), id="endless run"),
        pytest.param(raw(changed(4, math.nan)), id="NaN budget"),
        pytest.param(raw(changed(4, math.inf)), id="infinite budget"),
        pytest.param(raw(changed(4, -1.0)), id="negative budget"),
        pytest.param(raw(changed(5, 2.0)), id="span over a millisecond"),
        pytest.param(raw([31, 1, "s", "m", [1, -2], 1, 0.0, 0.0, 0.0]), id="negative seq in a list"),
        pytest.param(raw([13, "m", [[0, 65_536]] * 17]), id="over a million requests in one message"),
        pytest.param(raw([22, 1, "s", "m", "sleeping", 1, [], 0.0, 0.0, 0.0]), id="status nobody knows"),
        pytest.param(msgspec.msgpack.encode([1, 0, 1.0, []]), id="no message"),
        pytest.param(msgspec.msgpack.encode([1, 0, 1.0, [[[], [7, 5]]] * 65]), id="too many messages"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x91" * 5_000, id="nested without end"),
        pytest.param(
            msgspec.msgpack.encode([1, 0, 1.0, [[[], [1, 1, b"\xff", None]]]]), id="bytes for a string"
        ),
        pytest.param(b"\x94\x01\x00\x01\x91\x92\x90\x93\x01\x01\xa1\xff", id="not UTF-8"),
        pytest.param(b"\x00" * (17 << 20), id="17 MB"),
    ],
)
def test_what_breaks_the_rules_is_the_senders_error(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(header)


@pytest.mark.parametrize(
    "body",
    [
        Arrivals(ModelId("m"), 0, 0, 1.0),
        Arrivals(ModelId("m"), 0, 1, -0.5),
        Arrivals(ModelId("m"), 0, 1, math.nan),
        Arrivals(ModelId("m"), 0, 1, np.float64(1.0)),  # a numpy float would be refused by the encoder
        Arrivals(ModelId("m\ud800"), 0, 1, 1.0),
        Withdraw(ModelId("m"), (SeqRun(0, 0),)),
        Done(
            BatchId(1), SliceId("s"), ModelId("m"), "ok", 1,
            (Part(FrontendId("f"), (SeqRun(1, 70_000),)),), 0.0, 0.0, 0.0,
        ),
        Outputs(BatchId(1), SliceId("s"), ModelId("m"), (1, -1), 2, 0.0, 0.0, 0.0),
        StatusListed("r", 1, (), (), {"requests": math.inf}),
    ],
    ids=lambda body: type(body).__name__,
)  # fmt: skip
def test_a_sender_is_held_to_the_same_rules(body: AnyMessage) -> None:
    with pytest.raises(LocalProtocolError, match=type(body).__name__):
        codec.encode(envelope(body))


def test_a_model_that_leaves_its_shard_can_be_told_of_and_no_term_is_lower() -> None:
    info = ModelInfo(ModelId("m"), 10.0, (), (), None, 1, term=LEAVING_TERM)
    codec.encode(envelope(Directory(1, (info,), (), ())))
    for message in (
        Directory(1, (replace(info, term=LEAVING_TERM - 1),), (), ()),
        ModelSet(1, ModelId("m"), term=LEAVING_TERM),
    ):
        with pytest.raises(LocalProtocolError, match="term"):
            codec.encode(envelope(message))


@pytest.mark.parametrize("count", [1, 3, 65_536])
def test_of_a_run_no_request_has_a_number_that_cannot_be_told(count: int) -> None:
    """A scheduler cuts runs, and tells of what is left."""
    last = INTEGER_MAX - count
    for first_seq in (last, last + 1):
        run, other = SeqRun(first_seq, count), SeqRun(0, 1)
        arrivals = raw([*changed(2, first_seq)[:3], count, *changed(2, first_seq)[4:]])
        said = [
            arrivals,
            *(raw([13, "m", [[r.first_seq, r.count] for r in runs]]) for runs in ([run], [other, run])),
        ]
        for one in said:
            if first_seq == last:
                codec.decode(one)
            else:
                with pytest.raises(RemoteProtocolError, match=r"first_seq|runs"):
                    codec.decode(one)


def test_the_error_names_the_field() -> None:
    with pytest.raises(RemoteProtocolError, match=r"Arrivals\.budget_ms is out of bounds: -1\.0"):
        codec.decode(raw(changed(4, -1.0)))


def test_an_overlong_reason_is_cut_not_refused() -> None:
    status = SliceStatus(SliceId("s"), Incarnation("i"), "failed", "x" * 100_000)
    body = codec.decode(codec.encode(envelope(SliceChanged(NodeId("n"), status)))).parcels[0].body
    assert isinstance(body, SliceChanged)
    assert len(body.status.reason) == REASON_CHARS_MAX
    assert body.status.reason.endswith("…")


@pytest.mark.parametrize("length", [0, REASON_CHARS_MAX])
def test_half_a_character_in_a_reason_is_written_out_and_in_a_name_refused(length: int) -> None:
    """An exception's text may have it, where a path has odd bytes: nobody would hear that the slice has failed."""
    status = SliceStatus(SliceId("s"), Incarnation("i"), "failed", "no file \udc80" + "x" * length)
    body = codec.decode(codec.encode(envelope(SliceChanged(NodeId("n"), status)))).parcels[0].body
    assert isinstance(body, SliceChanged)
    assert body.status.reason.startswith("no file \\udc80")
    assert len(body.status.reason) <= REASON_CHARS_MAX
    with pytest.raises(LocalProtocolError):
        codec.encode(envelope(SliceChanged(NodeId("\udc80"), status)))


def test_messages_about_a_whole_cluster_may_be_larger_than_others() -> None:
    model = ModelSpec(ModelId("m"), 25.0, 512, exec_ms=tuple(float(b) + 0.1 for b in range(512)))
    slices = tuple(SliceSpec(SliceId(f"n/gpu{i}/0"), i, "emulated", None, (model,) * 40) for i in range(8))
    want = envelope(DesiredSlices(1, slices))
    header = codec.encode(want)
    assert len(header) > codec.HEADER_BYTES_MAX
    assert codec.decode(header) == want


def test_what_lists_a_batch_or_what_is_pending_ends_at_a_megabyte() -> None:
    outputs = Outputs(BatchId(1), SliceId("s"), ModelId("m"), (2**50,) * 65_536, 1, 0.0, 0.0, 0.0)
    header = codec.encode(envelope(outputs))
    assert codec.HEADER_BYTES_MAX < len(header) < codec.LONG_HEADER_BYTES_MAX
    assert codec.decode(header).parcels[0].body == outputs
    with pytest.raises(RemoteProtocolError, match="come by this link"):
        codec.decode(header, codec.HEADER_BYTES_MAX)


def test_several_messages_together_are_read_only_as_far_as_half_a_list_of_runs_takes() -> None:
    """Counted in runs: what a turn reads grows with them, and one message has 4,096 at the most."""
    runs = tuple(SeqRun(1, 1) for _ in range(REQUESTS_TOLD_MAX))  # as short as runs can be
    fitting = codec.JOINED_HEADER_BYTES_MAX // len(codec.encode(envelope(Withdraw(ModelId("m"), runs))))
    assert fitting * REQUESTS_TOLD_MAX <= 11_000
    many = Envelope(
        WIRE_VERSION, 0, 1.0, tuple(Parcel((), Withdraw(ModelId("m"), runs)) for _ in range(fitting))
    )
    assert codec.decode(codec.encode(many)) == many
    over = replace(many, parcels=many.parcels * 2)
    with pytest.raises(RemoteProtocolError, match="at most 32768 are allowed for what is in it"):
        codec.decode(codec.encode(over))
    beginning = codec.encode(over)[:64]
    with pytest.raises(RemoteProtocolError, match="at most 32768"):
        codec.decode(beginning + b"\xc1" * codec.JOINED_HEADER_BYTES_MAX)  # nothing behind it is looked at


def test_the_largest_batch_of_as_many_frontends_as_there_may_be_can_be_sent() -> None:
    """Every request is a run of its own, every number as long as one can be, every name too."""
    each = REQUESTS_TOLD_MAX // PARTS_MAX
    parts = tuple(
        Part(
            FrontendId(f"{number:0{FRONTEND_NAME_BYTES_MAX}}"),
            tuple(SeqRun(INTEGER_MAX - 1 - number * each - place, 1) for place in range(each)),
        )
        for number in range(PARTS_MAX)
    )
    long = "x" * NAME_CHARS_MAX
    run = RunBatch(
        BatchId(INTEGER_MAX), SliceId(long), Incarnation(long), ModelId(long), parts, 1e9, 1e9, 1e9
    )
    assert codec.decode(codec.encode(envelope(run))).parcels[0].body == run
    done = Done(BatchId(INTEGER_MAX), SliceId(long), ModelId(long), "expired", 0, parts, 1e9, 1e9, 1e9)
    assert codec.decode(codec.encode(envelope(done))).parcels[0].body == done


@given(st.lists(st.integers(1, 200_000), max_size=40), st.booleans())
def test_runs_of_any_length_are_told_in_messages_that_can_be_sent(counts: list[int], is_many: bool) -> None:
    counts += [1] * 9_000 * is_many
    firsts = itertools.accumulate((count + 1 for count in counts), initial=0)
    runs = tuple(SeqRun(first, count) for first, count in zip(firsts, counts, strict=False))
    told = list(split_runs(runs))
    for some in told:
        codec.encode(envelope(Dropped(ModelId("m"), some, "Overloaded", "")))
    pieces = [run for some in told for run in some]
    joined: list[SeqRun] = []
    for piece in pieces:
        if joined and joined[-1].first_seq + joined[-1].count == piece.first_seq:
            joined[-1] = SeqRun(joined[-1].first_seq, joined[-1].count + piece.count)
        else:
            joined.append(piece)
    assert tuple(joined) == runs


def test_a_sender_joins_no_more_than_a_receiver_reads() -> None:
    runs = tuple(SeqRun(1, 1) for _ in range(REQUESTS_TOLD_MAX))
    one = codec.encode_parcel(Parcel((), Withdraw(ModelId("m"), runs)))
    fitting = next(n for n in range(1, 99) if codec.are_too_long((n + 1) * len(one)))
    joined = codec.joined([one] * fitting, epoch=0, sent_at_ms=1.0)
    assert len(codec.decode(joined).parcels) == fitting == 2


def test_other_headers_end_at_an_eighth_of_it() -> None:
    parts = tuple(Part(FrontendId("f" * 500), (SeqRun(1, 1),)) for _ in range(500))
    done = Done(BatchId(1), SliceId("s"), ModelId("m"), "ok", 1, parts, 0.0, 0.0, 0.0)
    with pytest.raises(LocalProtocolError, match="header of Done"):
        codec.encode(envelope(done))
    with pytest.raises(RemoteProtocolError, match="at most 131072 are allowed"):
        codec.decode(msgspec.msgpack.encode(envelope(done)))


def test_the_largest_batch_of_one_frontend_fits_a_message() -> None:
    assert BATCH_SIZE_LIMIT == TENSORS_MAX == REQUESTS_TOLD_MAX


def test_what_one_message_cannot_tell_is_split() -> None:
    runs = tuple(SeqRun(2 * number, 1) for number in range(2 * REQUESTS_TOLD_MAX + 1))
    with pytest.raises(LocalProtocolError, match=r"Withdraw\.runs is out of bounds"):
        codec.checked(Parcel((), Withdraw(ModelId("m"), runs)))
    parts = list(split_runs(runs))
    assert [len(part) for part in parts] == [REQUESTS_TOLD_MAX, REQUESTS_TOLD_MAX, 1]
    assert sum(parts, ()) == runs
    for part in parts:
        sent = envelope(Withdraw(ModelId("m"), part))
        assert codec.decode(codec.encode(sent)) == sent
    assert list(split_runs(())) == []


def header_of(*parcels: list[Any]) -> bytes:
    return msgspec.msgpack.encode([WIRE_VERSION, 0, 0.0, list(parcels)])


MB = 1 << 20
SPEC = ["", "bool", []]
RUNS = [[1, 1]] * (MB // 3)
COSTLY = {
    "12 MB of tensors": header_of([[SPEC] * (12 * MB // 8), [1, 1, "m"]]),
    "a MB of tensors": header_of([[SPEC] * (MB // 8 - 100), [1, 1, "m"]]),
    "64 messages of 4,000 tensors": header_of(*[[[SPEC] * 500, [1, 1, "m"]]] * 64),
    "12 MB of a message that may not be so long": header_of([[], [13, "m", RUNS * 12]]),
    "a MB of runs": header_of([[], [13, "m", RUNS[:-100]]]),
    "64 messages of a MB of runs": header_of(*[[[], [13, "m", RUNS[: len(RUNS) // 64 - 10]]]] * 64),
    "a MB of runs in parts": header_of(
        [[], [22, 1, "s", "m", "ok", 1, [["f", RUNS[:20_000]]] * 16, 0, 0, 0]]
    ),
    "a MB of seqs": header_of([[], [30, 1, "s", "i", "m", "f", 0, [1] * (MB - 300)]]),
    "a tensor of a million dimensions": header_of([[["", "bool", [1] * (MB - 300)]], [1, 1, "m"]]),
    "15 MB of replicas": header_of([[], [20, "s", "i", "n", 0, [], [["m", 1, []]] * (5 * MB // 2)]]),
    "one run too many": header_of([[], [13, "m", RUNS[: REQUESTS_TOLD_MAX + 1]]]),
    "12 MB of garbage": b"\xc1" * (12 * MB),
    "12 MB that begin well": header_of([[], [11, 1]])[:-1] + b"\x90" * (12 * MB),
    "nested without end": b"\x94\x01\x00\x00" + b"\x91" * (12 * MB),
    "a quarter of a MB of runs": header_of([[], [13, "m", RUNS[: len(RUNS) // 4 - 100]]]),
    "a quarter of a MB of tensors": header_of([[SPEC] * (MB // 32 - 100), [1, 1, "m"]]),
}
CALLS_MAX, BYTES_MAX = 200, 5 * MB


@pytest.mark.parametrize("name", COSTLY)
def test_what_is_refused_costs_next_to_nothing(name: str) -> None:
    """Before there was a limit, some of these took seconds: an object for each byte, a call for each tensor."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    gc.disable()  # a collection calls whatever other tests have left
    tracemalloc.start()
    try:
        sys.setprofile(count)
        try:
            with pytest.raises(RemoteProtocolError) as caught:
                codec.decode(COSTLY[name])
        finally:
            sys.setprofile(None)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert calls < CALLS_MAX
    assert peak_bytes < BYTES_MAX
    assert len(str(caught.value)) < 300
