"""The process of a user's glue, without its pipes."""

from __future__ import annotations

import pytest

from fabric.errors import Internal
from fabric.messages import GlueAsked, GluePart
from roles.frontend.graphs.glue_process import _answer, _made


def test_a_class_that_cannot_be_made_keeps_nothing_of_the_requests_that_asked_for_it() -> None:
    stage, made = _made("cars=tests:NoSuchClass")
    assert (stage, type(made)) == ("cars", Internal)
    for _ in range(2):
        with pytest.raises(Internal, match=r"it cannot be made: .*NoSuchClass"):
            _answer(made, GlueAsked("cars", (), (GluePart("", 0),)), ())
    assert made.__traceback__ is None, "its frames would hold their tensors"
