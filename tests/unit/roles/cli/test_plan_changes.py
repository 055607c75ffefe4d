"""What is printed of a change, and what a refused one raises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import pytest

from fabric.errors import ConfigError, FabricError, PeerLost
from fabric.ids import ModelId, NodeId
from fabric.messages import Changed, DrainAsked, StatusListed, UnplacedInfo
from roles.cli import plan_changes
from roles.cli.plan_changes import Cluster, carry_out, show
from roles.cli.restart import RequestRefused, raise_refusal
from roles.runtime.running_cluster import ActiveScheduler


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


@pytest.mark.parametrize(
    ("is_dry", "told"), [(False, "shard 0 did its part; it is not known whether shard 1 did\n"), (True, "")]
)
def test_where_a_shard_goes_away_it_is_told_what_the_others_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_dry: bool, told: str
) -> None:
    active = [
        ActiveScheduler((f"ipc://{shard}",), StatusListed("scheduler-0", 1, (), (), {})) for shard in range(2)
    ]

    @contextmanager
    def both(cluster: Cluster) -> Iterator[tuple[Mapping[int, ActiveScheduler], None]]:
        del cluster
        yield dict(enumerate(active)), None

    def asked(addresses: tuple[str, ...], request: DrainAsked, *, keyring: None) -> Changed:
        del keyring
        if addresses == active[1].addresses:
            raise PeerLost("it went away")
        return Changed(request.request_no, "ok")

    monkeypatch.setattr(plan_changes, "schedulers_of", both)
    monkeypatch.setattr(plan_changes, "ask_change", asked)
    drained = {shard: partial(DrainAsked, node_id=NodeId("n"), gpu=None, is_back=False) for shard in range(2)}
    with pytest.raises(PeerLost):
        carry_out(
            lambda _: drained, Cluster(None, None, None), what="n drained", as_json=False, is_dry=is_dry
        )
    assert capsys.readouterr().err == told
