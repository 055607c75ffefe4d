"""Graphs of models: what is refused, and the ways through them."""

from __future__ import annotations

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId
from policies.graphs.graph import Graph, Stage, graph_of


def stage(name: str, *after: str, fan_out: float = 1.0) -> Stage:
    return Stage(name, ModelId(f"model-{name}"), after, fan_out)


def diamond() -> Graph:
    return graph_of(
        [
            stage("end", "left", "right"),
            stage("left", "start", fan_out=2),
            stage("right", "start"),
            stage("start"),
        ]
    )


def test_stages_are_put_in_order() -> None:
    graph = diamond()
    names = [one.name for one in graph.stages]
    assert names[0] == "start"
    assert names[-1] == "end"
    assert set(graph.successors["start"]) == {"left", "right"}
    assert not graph.is_tree


def test_the_longest_way_is_found_before_behind_and_through_each_stage() -> None:
    times_ms = {"start": 10.0, "left": 5.0, "right": 20.0, "end": 1.0}
    assert diamond().behind_ms(times_ms) == {"start": 21.0, "left": 1.0, "right": 1.0, "end": 0.0}
    assert diamond().through_ms(times_ms) == {"start": 31.0, "left": 16.0, "right": 31.0, "end": 31.0}
    assert diamond().longest_ms(times_ms) == 31.0


def test_demand_multiplies_along_a_way_and_a_join_starts_once() -> None:
    graph = graph_of(
        [
            stage("a", fan_out=2),
            stage("b", "a", fan_out=1.5),
            stage("c", "b", fan_out=0.5),
            stage("d", "b", "c"),
        ]
    )
    assert graph.demand() == {"a": 2.0, "b": 3.0, "c": 1.5, "d": 1.0}
    assert graph.demand({"b": 3.0}) == {"a": 2.0, "b": 6.0, "c": 3.0, "d": 1.0}


def test_a_circle_is_named() -> None:
    with pytest.raises(ConfigError, match=r"is a circle: . after . after . after .;"):
        graph_of([stage("a", "c"), stage("b", "a"), stage("c", "b")])


def test_a_stage_cannot_wait_for_itself() -> None:
    with pytest.raises(ConfigError, match=r"stages\.a\.after: is a circle: a after a;"):
        graph_of([stage("a", "a")])


def test_a_predecessor_must_be_there_and_once() -> None:
    with pytest.raises(ConfigError, match=r"stages\.b\.after: there is no stage 'start'"):
        graph_of([stage("stat"), stage("b", "start")])
    with pytest.raises(ConfigError, match=r"stages\.b\.after: names a stage twice"):
        graph_of([stage("a"), stage("b", "a", "a")])


def test_a_graph_is_bounded() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        graph_of([])
    with pytest.raises(ConfigError, match="at most 64"):
        graph_of([stage(f"s{place}") for place in range(65)])
    with pytest.raises(ConfigError, match=r"comes to 4,161 requests"):
        graph_of([stage("a"), stage("b", "a", fan_out=64), stage("c", "b", fan_out=64)])
