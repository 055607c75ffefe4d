"""An application as a frontend serves it."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId
from policies.graphs import ApplicationPlan, FanOut
from policies.graphs.graph import Stage, graph_of
from roles.applications.served import GlueSpec, ServedApplication

ONE = ((0.0, 1.0),)


@pytest.mark.parametrize(
    ("fan_out", "has_glue", "is_drawn"),
    [
        (FanOut("fixed", ONE), False, False),
        (FanOut("poisson", ONE), False, True),
        (FanOut("share", ONE), False, True),
        (FanOut("poisson", ONE, "boxes"), False, False),
        (FanOut("poisson", ONE), True, False),
    ],
)
def test_what_neither_the_file_nor_data_decide_is_drawn(
    fan_out: FanOut, has_glue: bool, is_drawn: bool
) -> None:
    plan = ApplicationPlan("app", graph_of([Stage("a", ModelId("m"))]), 100.0, {}, 1)
    glue = {"a": GlueSpec("a:B", 100.0)} if has_glue else {}
    application = ServedApplication(plan, {"a": fan_out}, "carried", glue=glue)
    assert application.is_drawn is is_drawn
    assert application.drawn((0, 1)).is_drawn is (fan_out.process != "fixed")
