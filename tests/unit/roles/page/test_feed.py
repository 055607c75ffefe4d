"""What readers of the page get, and that it stays small however long a page stays open."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import ModelId, NodeId
from fabric.messages import GpuRef, ModelInfo, PlanReport
from roles.page.feed import ANSWER_BYTES_MAX, EXPLAINED_MAX, FRAME_BATCHES_MAX, FRAMES_MAX, Feed
from roles.page.json_view import MODELS_MAX, SLICES_MAX, _says
from roles.page.palette import COLOURS, GONE_MAX, Numbers
from tests.page_stage import Stage, batch, gpu, live, request, slice_of

SLICE = "here/gpu0/0"


def told(feed: Feed, after: int = 0, now_ms: float = 0.0) -> dict[str, Any]:
    served = json.loads(feed.answer(0, "", now_ms))["served"]
    found: dict[str, Any] = json.loads(feed.answer(after, served, now_ms))
    assert found.pop("served") == served
    return found


def test_before_the_first_look_there_is_nothing_and_no_age() -> None:
    assert told(Feed(), now_ms=5.0) == {
        "at_ms": 5.0,
        "age_ms": None,
        "trouble": "",
        "state": None,
        "frames": [],
    }


def test_a_reader_gets_each_frame_once_and_the_newest_state_each_time() -> None:
    feed, stage = Feed(), Stage()
    feed.look(stage.look(1_000.0, [batch("a", SLICE, 900.0, 20.0)]))
    first = told(feed)
    assert [frame["seq"] for frame in first["frames"]] == [1]
    feed.look(stage.look(2_000.0))
    feed.look(stage.look(3_000.0))
    assert [frame["seq"] for frame in told(feed, after=1)["frames"]] == [2, 3]
    assert told(feed, after=3)["frames"] == []
    assert told(feed, after=3)["state"]["models"] == first["state"]["models"]


def test_a_batch_is_told_by_numbers_that_the_state_explains() -> None:
    feed = Feed()
    stage = Stage(slices=[slice_of("here/gpu0/0", "a"), slice_of("here/gpu0/1", "b")])
    fine, odd = batch("b", "here/gpu0/1", 950.0, 20.0, 7), batch("a", SLICE, 940.0, 10.0, 2, "cut_off")
    unknown = batch("gone", SLICE, 930.0, 10.0)
    feed.look(stage.look(1_000.0, [odd, fine, unknown]))
    state, (frame,) = told(feed)["state"], told(feed)["frames"]
    models = {one["number"]: one["id"] for one in state["models"]}
    slices = {one["number"]: one["id"] for gpu in state["gpus"] for one in gpu["slices"]}
    rows = [(slices[row[0]], models[row[1]], *row[2:]) for row in frame["batches"]]
    assert rows == [(SLICE, "a", 940.0, 10.0, 2, 1), ("here/gpu0/1", "b", 950.0, 20.0, 7, 0)]


def test_trouble_is_told_beside_what_was_seen_last() -> None:
    feed = Feed()
    feed.look(Stage().look(1_000.0))
    feed.fail("no active scheduler answers")
    found = told(feed, now_ms=4_000.0)
    assert (found["trouble"], found["age_ms"]) == ("no active scheduler answers", 3_000)
    assert found["state"]["models"]
    feed.look(Stage().look(5_000.0))
    assert told(feed, now_ms=5_000.0)["trouble"] == ""


def test_a_page_that_is_served_anew_gives_an_old_reader_all_it_has() -> None:
    """However many looks it has had by then: a reader that is hidden does not ask."""
    former, feed = Feed(), Feed()
    for at_ms in (1_000.0, 2_000.0, 3_000.0):
        former.look(Stage().look(at_ms))
        feed.look(Stage().look(at_ms))
    served = json.loads(former.answer(0, "", 0.0))["served"]
    assert json.loads(former.answer(2, served, 0.0))["served"] == served
    for after in (2, 3, 700):
        answer = json.loads(feed.answer(after, served, 0.0))
        assert [frame["seq"] for frame in answer["frames"]] == [1, 2, 3]
        assert answer["served"] != served


def test_a_script_that_does_not_say_of_which_page_it_asks_gets_each_frame_once() -> None:
    """It is of a version before, on a page that stayed open across an upgrade."""
    feed = Feed()
    for at_ms in (1_000.0, 2_000.0, 3_000.0):
        feed.look(Stage().look(at_ms))

    def asked(after: int) -> list[int]:
        return [frame["seq"] for frame in json.loads(feed.answer(after, "", 0.0))["frames"]]

    assert asked(700) == [1, 2, 3], "of the server before this one"
    assert asked(2) == [3]
    assert asked(3) == []


def test_hours_of_looking_keep_no_more_than_a_minute() -> None:
    feed, stage = Feed(), Stage()
    sizes = []
    for second in range(3 * FRAMES_MAX):
        at_ms = 1e3 * second
        its = [batch("a", SLICE, at_ms - 10.0 * number, 8.0) for number in range(50, 0, -1)]
        bad = [request("a", "late", at_ms, second, held_ms=30.0, gpu_ms=40.0)]
        feed.look(stage.look(at_ms, its, bad))
        sizes.append(len(feed.answer(0, "", at_ms)))
    assert len(told(feed)["frames"]) == FRAMES_MAX
    assert len(told(feed)["state"]["late"]) == 1, "the newest of the model"
    assert sizes[-1] < 1.05 * sizes[FRAMES_MAX + 5]


def test_a_flood_of_batches_is_cut_and_told_as_cut() -> None:
    feed = Feed()
    its = [batch("a", SLICE, 0.1 * number, 0.1) for number in range(FRAME_BATCHES_MAX + 500)]
    feed.look(Stage().look(1_000.0, its))
    (frame,) = told(feed)["frames"]
    assert (len(frame["batches"]), frame["left_out"]) == (FRAME_BATCHES_MAX, 500)
    for second in range(2, 60):
        feed.look(Stage().look(1_000.0 * second, its))
    assert len(feed.answer(0, "", 60_000.0)) < 2 * ANSWER_BYTES_MAX


def test_a_cluster_that_is_too_large_is_told_in_part() -> None:
    feed = Feed()
    names = [f"m{number:04}" for number in range(MODELS_MAX + 3)]
    slices = [slice_of(f"here/gpu{number}/0", names[0]) for number in range(SLICES_MAX + 4)]
    feed.look(Stage(models=names, slices=slices, gpus=[]).look(1_000.0))
    state = told(feed)["state"]
    assert (len(state["models"]), state["models_more"]) == (MODELS_MAX, 3)
    assert (sum(len(gpu["slices"]) for gpu in state["gpus"]), state["slices_more"]) == (SLICES_MAX, 4)


def test_models_that_are_not_shown_count_in_the_verdict() -> None:
    feed = Feed()
    names = [f"m{number:04}" for number in range(MODELS_MAX + 44)]
    missed = {name: live(name, late=50, bad_rate=1.0) for name in names[-5:]}
    feed.look(Stage(models=names, figures=missed).look(1_000.0))
    state = told(feed)["state"]
    assert not any(one["is_missed"] for one in state["models"])
    assert state["missed"] == {"count": 5, "named": names[-5:-2]}


def test_a_rare_model_of_which_everything_fails_does_not_keep_its_slo() -> None:
    feed = Feed()
    rare = live(
        "a",
        rate_rps=0.1,
        goodput_rps=0.0,
        dropped={"DeadlineExceeded": 1},
        bad_rate=1.0,
        p50_ms=None,
        p99_ms=None,
    )
    feed.look(Stage(figures={"a": rare}).look(1_000.0))
    state = told(feed)["state"]
    assert state["models"][0]["says"] == "Misses its SLO of 50 ms: 100.0% of the last 10 s late or dropped."
    assert state["missed"] == {"count": 1, "named": ["a"]}
    assert state["alarms"] == []


def test_gpus_are_in_the_order_of_their_numbers() -> None:
    feed = Feed()
    slices = [slice_of(f"{host}/gpu{number}/0", "a") for host in ("b", "a") for number in (10, 9, 0)]
    feed.look(Stage(slices=slices, gpus=[]).look(1_000.0))
    assert [gpu["id"] for gpu in told(feed)["state"]["gpus"]] == [
        f"{host}/gpu{number}" for host in ("a", "b") for number in (0, 9, 10)
    ]


def test_a_gpu_that_is_drained_says_so() -> None:
    feed = Feed()
    plan = PlanReport("steady", "", 1, 1, (), 0, 0, drained=(GpuRef(NodeId("here"), 1),))
    feed.look(Stage(gpus=[gpu(0), gpu(1)], plan=plan).look(1_000.0))
    assert [one["is_drained"] for one in told(feed)["state"]["gpus"]] == [False, True]


@pytest.mark.parametrize(
    ("coming_in_ms", "words"), [(2_000.0, "; one should be ready in 2 s"), (0.0, ""), (None, "")]
)
def test_when_a_slice_that_is_late_will_be_ready_is_not_said(coming_in_ms: float | None, words: str) -> None:
    info = ModelInfo(ModelId("a"), 50.0, coming_in_ms=coming_in_ms)
    assert _says(info, None, None) == f"No ready slice hosts it{words}."


def test_what_is_no_number_is_null_for_json_has_no_word_for_it() -> None:
    feed = Feed()
    feed.look(Stage(figures={"a": live("a", p99_ms=float("inf"))}).look(1_000.0))
    assert told(feed)["state"]["models"][0]["p99_ms"] is None


def test_late_requests_are_explained_one_of_each_model_first() -> None:
    feed = Feed()
    flood = [request("a", "late", 990.0 + number, number, held_ms=30.0, gpu_ms=40.0) for number in range(9)]
    other = request("b", "Overloaded", 980.0, 77)
    fault = request("b", "Cancelled", 981.0, 78)
    feed.look(Stage().look(1_000.0, [], [other, fault, *flood]))
    late = told(feed)["state"]["late"]
    assert {(one["model"], one["outcome"]) for one in late} == {("a", "late"), ("b", "Overloaded")}
    (of_a,) = [one for one in late if one["model"] == "a"]
    assert of_a["sentences"][0].startswith("Request f-8 of a was answered too late: after 70 ms")
    assert of_a["ago_ms"] == 2


def test_a_flood_of_one_models_late_requests_hides_no_other_models() -> None:
    feed = Feed()
    feed.look(Stage().look(1_000.0, [], [request("rare", "late", 990.0, 1, gpu_ms=70.0)]))
    for second in range(2, 40):
        flood = [
            request(name, "late", 1e3 * second - at, 10 * second + at, gpu_ms=70.0)
            for at, name in enumerate(("a", "b", "c", "d", "e"))
        ]
        feed.look(Stage().look(1e3 * second, [], flood))
    late = told(feed)["state"]["late"]
    assert sorted(one["model"] for one in late) == ["a", "b", "c", "d", "e", "rare"]
    assert all(one["ago_ms"] < 3_000 for one in late[:5]), "five a second take turns, four at once"
    many = [request(f"m{at}", "late", 50_000.0 + at, at, gpu_ms=70.0) for at in range(4 * EXPLAINED_MAX)]
    for second in range(50, 90):
        feed.look(Stage().look(1e3 * second, [], many))
    assert len(told(feed)["state"]["late"]) == EXPLAINED_MAX


@pytest.mark.parametrize("kind", ["slices", "models"])
def test_batches_that_a_page_keeps_stay_of_those_that_ran_them(kind: str) -> None:
    """A slice and a model go, another slice and another model come: a page has the frames of both."""
    feed = Feed()
    former, later = slice_of("here/gpu0/0", "a"), slice_of("here/gpu0/1", "b")
    feed.look(Stage(models=["a"], slices=[former]).look(1_000.0, [batch("a", former.slice_id, 900.0, 20.0)]))
    feed.look(Stage(models=["b"], slices=[later]).look(2_000.0, [batch("b", later.slice_id, 1_900.0, 20.0)]))
    own = {"slices": 0, "models": 1}[kind]
    numbers = [frame["batches"][0][own] for frame in told(feed)["frames"]]
    assert len(set(numbers)) == 2


@given(st.lists(st.sets(st.sampled_from("abcdefgh")), max_size=12))
def test_a_number_is_one_names_for_good(rounds: list[set[str]]) -> None:
    numbers = Numbers()
    known: dict[str, int] = {}
    for names in rounds:
        now = dict(numbers.keep(sorted(names)))
        assert set(now) == names
        assert all(now[name] == known[name] for name in names & known.keys())
        known |= now
        assert len(set(known.values())) == len(known), "no two have had one number"


def test_models_that_come_take_the_colours_of_those_that_went() -> None:
    numbers = Numbers()
    names = [f"m{number}" for number in range(COLOURS)]
    before = dict(numbers.keep(names))
    assert {number % COLOURS for number in before.values()} == set(range(COLOURS))
    after = numbers.keep([*names[:3], *names[4:], "new"])
    assert after["new"] % COLOURS == before["m3"] % COLOURS


def test_no_more_than_so_many_that_are_gone_are_remembered() -> None:
    numbers = Numbers()
    for number in range(3 * GONE_MAX):
        numbers.keep([f"m{number}"])
    assert len(numbers._gone) == GONE_MAX
    assert numbers.keep(["m0"])["m0"] > GONE_MAX, "it has another number: its own is not known any more"
