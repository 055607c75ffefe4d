"""What is printed of a change, and what a refused one raises."""

from __future__ import annotations

import pytest

from fabric.errors import ConfigError, FabricError
from fabric.ids import ModelId
from fabric.messages import Changed, UnplacedInfo
from roles.cli.plan_changes import show
from roles.cli.restart import RequestRefused, raise_refusal


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_change_that_left_a_model_without_a_place_is_not_told_as_a_whole_one(
    capsys: pytest.CaptureFixture[str], is_dry: bool
) -> None:
    show(Changed(1, "ok", started=1), what="x added", as_json=False, is_dry=is_dry)
    assert "x added; 1 slice started" in capsys.readouterr().err
    partial = Changed(1, "partial", unplaced=(UnplacedInfo(ModelId("x"), None, "full"),))
    with pytest.raises(SystemExit) as ended:
        show(partial, what="x added", as_json=False, is_dry=is_dry)
    said = capsys.readouterr().err
    assert "x added; not every model has a place; 0 slices started" in said
    assert "unplaced: x: full" in said
    assert ended.value.code == 6


@pytest.mark.parametrize("code", ["UnknownModel", "NameTaken", "InvalidConfig", "UnknownGpu", "UnknownRole"])
def test_a_refusal_that_stands_has_its_code(code: str) -> None:
    with pytest.raises(RequestRefused, match=f"^{code}: why$") as raised:
        raise_refusal(Changed(1, "refused", code, "why"))
    assert raised.value.code == code


@pytest.mark.parametrize("code", ["Busy", "NotActive"])
def test_a_refusal_that_passes_is_no_wrong_configuration(code: str) -> None:
    with pytest.raises(FabricError, match=f"^{code}: why$") as raised:
        raise_refusal(Changed(1, "refused", code, "why"))
    assert not isinstance(raised.value, ConfigError)
