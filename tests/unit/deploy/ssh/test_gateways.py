"""A gateway on each host with frontends: when it starts, what starts it again, what it goes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import asdict

from deploy.keys import gateway_secrets
from deploy.ssh import deployed_cluster, shell
from deploy.ssh.changes import plan_down, plan_restart, plan_rollback
from deploy.ssh.deployed_cluster import GATEWAY_LIMIT_MS, DeployedCluster
from deploy.ssh.facts import HostFacts
from deploy.ssh.inventory import inventory_of
from deploy.ssh.rollout import Ended, Rollout
from deploy.ssh.shell import Deployment
from deploy.ssh.steps import Phase, Plan
from fabric.errors import ConfigError, FabricError
from roles.config.gateway import GatewayConfig
from roles.config.read_config import parse_config
from roles.runtime.exit_codes import EXIT_PARTIAL
from tests.unit.deploy.ssh.stage import CLUSTER, MODEL, OWN, Stage, lines
from tests.unit.deploy.ssh.test_deployed_cluster import Clock, HostOf, Hosts, Told, cluster_of

if TYPE_CHECKING:
    from deploy.ssh.connection import HostConnection
    from fabric.clock import MonotonicClock

TOKEN = b"a-token-of-some-length\n"
GATEWAY = {"token_file": "tokens", "request_mb": 8}
LISTEN = {"http": "127.0.0.1:8080"}


def with_gateway(*, listen: dict[str, Any] | None = None, **gateway: Any) -> Stage:
    """Frontends on `head` and `g1`, and so gateways."""
    made = Stage(cluster={**CLUSTER, "gateway": {**GATEWAY, **gateway}}, listen=listen or LISTEN)
    made.keys |= {f"gateway.{key}": TOKEN for key in ("token_file", "tls_certificate", "tls_key")}
    return made


@pytest.fixture
def stage() -> Stage:
    """One that is up."""
    made = with_gateway()
    made.done(made.plan())
    return made


def cluster_with(stage: Stage, **changed: Any) -> None:
    stage.document = {**stage.document, "cluster": {**stage.document["cluster"], **changed}}


def carried_out(plan: Plan, failing: str = "", *, is_rolling: bool = False) -> Rollout:
    """`failing`: a host, or a role that does not start."""
    rollout = Rollout(plan, is_rolling=is_rolling)
    going = list(rollout.begin())
    while going:
        step = going.pop(0)
        is_done = failing not in (step.host, step.request.get("role_id"))
        going += rollout.handle(Ended(step, "" if is_done else "no room"))
    return rollout


def started(plan: Plan) -> set[str]:
    return {step.request["role_id"] for step in plan.steps if step.what == "start"}


def test_each_host_with_frontends_gets_one_that_starts_last_with_its_tokens_and_its_extra() -> None:
    stage = with_gateway(listen={"http": "127.0.0.1:8080", "grpc": "127.0.0.1:0"})
    shown = [line for line in lines(stage.plan()).splitlines() if " environment " in line or " keys " in line]
    assert shown == [
        "PREPARE    g1   environment   tenuto[worker,gateway] 0.1.0+abc, from the wheels it has",
        "PREPARE    g1   keys          frontend.key, gateway.token_file, node-g1.key, trusted.json",
        "PREPARE    g2   environment   tenuto 0.1.0+abc, from the wheels it has",
        "PREPARE    g2   keys          node-g2.key, trusted.json",
        "PREPARE    head environment   tenuto[gateway] 0.1.0+abc, from the wheels it has",
        "PREPARE    head keys          frontend.key, gateway.token_file, scheduler.key, trusted.json",
    ]
    assert lines(stage.plan()).splitlines()[-2:] == [
        "GATEWAYS   g1   start         gateway-g1 (ports 8080, 8001) starts",
        "GATEWAYS   head start         gateway-head (ports 8080, 8001) starts",
    ]
    for step in stage.plan().steps:
        assert TOKEN.decode().strip() not in f"{step.detail} {json.dumps(step.request)}"
        for file in step.files:
            assert file.mode == 0o600 or file.path == "keys/trusted.json"
            assert (file.source == TOKEN) == (file.path == "keys/gateway.token_file")
    (script,) = [
        step.request["script"] for step in stage.plan().steps if step.detail.startswith("gateway-g1")
    ]
    assert script.endswith("/bin/tenuto gateway cluster.json --node g1\n")
    written = stage.goods.config.files["cluster.json"]
    assert isinstance(written, bytes)
    read = parse_config(json.loads(written), Path("/base/configs/name")).gateway
    assert read.token_file == Path("/base/configs/name/../../keys/gateway.token_file")
    assert read.request_bytes_max == 8 << 20
    stage.done(stage.plan())
    assert stage.plan().steps == ()


@pytest.mark.parametrize("gateway", [None, {}, {"request_mb": 8}])
def test_without_a_token_there_is_none(gateway: dict[str, Any] | None) -> None:
    cluster = CLUSTER if gateway is None else {**CLUSTER, "gateway": gateway}
    roles = [role.role_id for host in Stage(cluster=cluster).inventory.hosts for role in host.roles]
    assert not [one for one in roles if one.startswith("gateway")]


CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a limit": ({"gateway": {**GATEWAY, "request_mb": 9}}, {"gateway-g1", "gateway-head"}),
    "another host's frontend": (
        {"frontends": [{"host": "head"}, {"host": "g1"}, {"host": "g2"}]},
        {"scheduler-0", "frontend-2", "gateway-g2"},
    ),
    "a frontend beside it": (
        {"frontends": [{"host": "head"}, {"host": "g1"}, {"host": "g1"}]},
        {"scheduler-0", "frontend-1", "frontend-2", "gateway-g1"},
    ),
    "its host's address": (
        {"addresses": {"head": "10.0.0.7"}},
        {"scheduler-0", "frontend-0", "frontend-1", "node-g1", "node-g2", "gateway-head"},
    ),
    "heartbeats, which it does not read": (
        {"heartbeats": {"interval_ms": 200, "patience_ms": 2_000}},
        {"scheduler-0", "node-g1", "node-g2", "frontend-0", "frontend-1"},
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_the_file_starts_those_gateways_again_that_read_it(stage: Stage, case: str) -> None:
    changed, roles = CHANGES[case]
    cluster_with(stage, **changed)
    plan = stage.plan()
    assert started(plan) == roles
    stage.done(plan)
    assert stage.plan().steps == ()


def test_where_it_listens_concerns_gateways_alone(stage: Stage) -> None:
    stage.document = {**stage.document, "listen": {"http": "127.0.0.1:9000", "grpc": "127.0.0.1:9001"}}
    assert started(stage.plan()) == {"gateway-g1", "gateway-head"}
    stage.done(stage.plan())
    stage.document = {**stage.document, "listen": {**stage.document["listen"], "metrics": "127.0.0.1:8100"}}
    assert "gateway-g1" not in started(stage.plan()), "its page is at its own address"


def test_models_concern_a_gateway_where_they_may_be_loaded_through_it() -> None:
    for is_open in (False, True):
        stage = with_gateway(model_control=is_open)
        stage.done(stage.plan())
        stage.document = {**stage.document, "models": [{**MODEL, "slo_ms": 40}]}
        gateways = {"gateway-g1", "gateway-head"} if is_open else set[str]()
        assert started(stage.plan()) == {"scheduler-0", *gateways}


def test_other_tokens_and_certificates_are_carried_and_nothing_starts_again(stage: Stage) -> None:
    """They are read again while it runs."""
    stage.keys["gateway.token_file"] = b"another-token-of-some-length\n"
    assert lines(stage.plan()) == "".join(
        f"PREPARE    {host:4} keys          gateway.token_file\n" for host in ("g1", "head")
    )
    stage.done(stage.plan())
    cluster_with(stage, gateway={**GATEWAY, "tls_certificate": "cert.pem", "tls_key": "key.pem"})
    assert started(stage.plan()) == {"gateway-g1", "gateway-head"}
    assert [step.detail for step in stage.plan().steps if step.what == "keys"] == [
        "gateway.tls_certificate, gateway.tls_key"
    ] * 2
    stage.done(stage.plan())
    stage.keys["gateway.tls_certificate"] = b"renewed"
    assert [step.detail for step in stage.plan().steps] == ["gateway.tls_certificate"] * 2


def test_one_that_the_file_has_no_more_ends_and_its_tokens_go_with_the_next_change(stage: Stage) -> None:
    cluster_with(stage, gateway={})
    found = [line for line in lines(stage.plan()).splitlines() if " unit " not in line]
    assert [line for line in found if "configuration" not in line] == [
        "END_GATEWAYS g1   stop          gateway-g1: not in the file any more",
        "END_GATEWAYS head stop          gateway-head: not in the file any more",
    ]
    stage.done(stage.plan())
    assert stage.plan().steps == ()
    back = rollback(stage)
    assert back.warnings == {
        host: [
            f"gateway-{host} ran before and is not in the file: put the former file back and run `tenuto deploy up`"
        ]
        for host in ("head", "g1")
    }
    cluster_with(stage, gateway=GATEWAY)
    assert started(rollback(stage)) >= {"gateway-g1", "gateway-head"}
    cluster_with(stage, gateway={"request_mb": 9})
    assert [(step.host, step.detail) for step in stage.plan().steps if step.what == "keys"] == [
        ("g1", "without gateway.token_file"),
        ("head", "without gateway.token_file"),
    ]
    stage.done(stage.plan())
    assert stage.plan().steps == ()


def test_what_a_gateway_read_before_is_kept_for_a_rollback() -> None:
    stage = with_gateway(tls_certificate="cert.pem", tls_key="key.pem")
    stage.done(stage.plan())
    cluster_with(stage, gateway=GATEWAY)
    assert not [step for step in stage.plan().steps if step.what == "keys"]
    stage.done(stage.plan())
    assert stage.plan().steps == ()
    assert started(rollback(stage)) == {"gateway-g1", "gateway-head"}
    told = stage.facts["g1"]
    assert isinstance(told, HostFacts)
    stage.changed("g1", keys={name: own for name, own in told.keys.items() if "tls" not in name})
    plan = rollback(stage)
    assert plan.problems == {
        "g1": [
            "gateway.tls_certificate, gateway.tls_key, which its gateway read before, is not there any more: put the former file back and run `tenuto deploy up`"
        ]
    }
    assert "g1" not in {step.host for step in plan.steps}
    stage.facts["g1"] = told
    cluster_with(stage, gateway={**GATEWAY, "request_mb": 9})
    assert [step.detail for step in stage.plan().steps if step.what == "keys"] == [
        "without gateway.tls_certificate, gateway.tls_key"
    ] * 2


@pytest.mark.parametrize("failing", ["g2", ""])
def test_one_stays_for_as_long_as_its_frontend_does(stage: Stage, failing: str) -> None:
    cluster_with(stage, frontends=[{"host": "head"}, {"host": "g2"}])
    rollout = carried_out(stage.plan(), failing)
    done = {
        f"{step.host} {step.what} {step.request.get('role_id') or step.request['role_ids'][0]}"
        for step in rollout.done
        if step.what in ("start", "stop")
    }
    moved = {"g2 start frontend-1", "g2 start gateway-g2", "g1 stop frontend-1", "g1 stop gateway-g1"}
    assert done == {"head start scheduler-0", *(() if failing else moved)}
    phases = [step.phase for step in rollout.done if step.what == "stop"]
    assert phases == ([] if failing else [Phase.END_GATEWAYS, Phase.END_FRONTENDS])
    assert ("keys" in {step.what for step in rollout.done if step.phase is Phase.REMOVE}) == (not failing)


@pytest.mark.parametrize("is_rolling", [False, True])
def test_where_one_does_not_start_all_else_is_done(stage: Stage, *, is_rolling: bool) -> None:
    cluster_with(stage, frontends=[{"host": "head"}, {"host": "g2"}])
    rollout = carried_out(stage.plan(), "gateway-g2", is_rolling=is_rolling)
    ends = [step.request["role_ids"] for step in rollout.done if step.what == "stop"]
    assert ends == [["gateway-g1"], ["frontend-1"]], "it runs on g2 by now"
    assert (rollout.failed, rollout.left_out) == ({}, [])
    assert rollout.without_gateway == {"g2": "no room"}


def test_where_one_does_not_start_beside_the_scheduler_a_host_leaves_all_the_same(stage: Stage) -> None:
    stage.take_out("g1")
    stage.document = {**stage.document, "listen": {"http": "127.0.0.1:9000"}}
    plan = stage.plan()
    rollout = carried_out(plan, "gateway-head")
    assert not plan.has_no_scheduler(rollout.without_scheduler)
    assert (rollout.stay_drained, rollout.is_over) == ([], True)
    assert "remove" in {step.what for step in rollout.done}


def test_one_after_the_other_ends_at_one_that_does_not_start(stage: Stage) -> None:
    stage.document = {**stage.document, "listen": {"http": "127.0.0.1:9000"}}
    rollout = carried_out(stage.plan(), "gateway-g1", is_rolling=True)
    assert not any(step.phase is Phase.GATEWAYS for step in rollout.done)


def test_one_that_does_not_start_is_said_and_not_waited_for(stage: Stage) -> None:
    stage.document = {**stage.document, "listen": {"http": "127.0.0.1:9000"}}
    run_files_of_head = {"run_files": [{"role_id": "gateway-head", "addresses": {}}]}
    failing = FabricError("it ends at once")
    hosts = Hosts({"start gateway-g1": failing, "run_files": run_files_of_head})
    connections = cast("dict[str, HostConnection]", {one: HostOf(hosts, one) for one in stage.facts})
    cluster = DeployedCluster(
        stage.source.config, stage.inventory, connections, cast("MonotonicClock", Clock())
    )
    result = Deployment(stage.source, cluster).carry_out(stage.plan(), lambda *_: None)
    assert (result.failed, result.exit_code) == ({"g1": "it ends at once"}, EXIT_PARTIAL)
    assert (result.problems, hosts.asked.count("health")) == ([], 1)


@pytest.mark.parametrize("failing", ["g2", ""])
def test_one_goes_on_asking_the_frontends_that_stay(stage: Stage, failing: str) -> None:
    """One host more, first in the list, moves every frontend to the next host."""
    cluster_with(stage, frontends=[{"host": "g2"}, {"host": "head"}, {"host": "g1"}])
    rollout = carried_out(stage.plan(), failing)
    gateways = {step.request["role_id"] for step in rollout.done if step.phase is Phase.GATEWAYS}
    assert gateways == (set() if failing else {"gateway-g1", "gateway-g2", "gateway-head"})


def test_gateways_end_first_and_start_last_one_after_the_other_where_that_is_asked(stage: Stage) -> None:
    ends = [step.phase for step in plan_down(stage.inventory, stage.facts).steps]
    assert ends[:3] == [Phase.END_GATEWAYS, Phase.END_GATEWAYS, Phase.END_FRONTENDS]
    plan = plan_restart(stage.inventory, stage.facts, stage.goods, stage.source.config.deploy, ())
    rollout = Rollout(plan, is_rolling=True)
    going, begun = list(rollout.begin()), []
    while going:
        (step,) = going
        begun.append(step.request["role_id"])
        going = list(rollout.handle(Ended(step)))
    assert begun[-3:] == ["frontend-0", "gateway-g1", "gateway-head"]


def test_a_host_that_leaves_ends_its_gateway_before_its_frontend(stage: Stage) -> None:
    stage.take_out("g1")
    ends = [step.request["role_ids"][0] for step in stage.plan().steps if step.what == "stop"]
    assert ends == ["gateway-g1", "frontend-1", "node-g1"]


def rollback(stage: Stage) -> Plan:
    return plan_rollback(stage.inventory, stage.facts, stage.goods, stage.source.config.deploy)


def test_a_rollback_to_where_there_was_none_ends_it_and_the_next_one_brings_it_back() -> None:
    stage = Stage()
    stage.keys["gateway.token_file"] = TOKEN
    stage.done(stage.plan())
    stage.document = {**stage.document, "listen": LISTEN}
    cluster_with(stage, gateway=GATEWAY)
    without = stage.facts["g1"]
    assert isinstance(without, HostFacts)
    assert started(stage.plan()) == {"gateway-g1", "gateway-head"}
    restart = plan_restart(stage.inventory, stage.facts, stage.goods, stage.source.config.deploy, ())
    assert not any("gateway" in step.detail for step in restart.steps), "it has not been started yet"
    asked_for = ("gateway-head",)
    restart = plan_restart(stage.inventory, stage.facts, stage.goods, stage.source.config.deploy, asked_for)
    assert restart.problems == {"head": ["gateway-head is not on it yet: run `tenuto deploy up` first"]}
    stage.done(stage.plan())
    plan = rollback(stage)
    ended = [step for step in plan.steps if step.phase is not Phase.UNITS]
    assert [(step.host, step.what, step.detail) for step in ended] == [
        (host, "stop", f"gateway-{host}: configuration {without.now.config} has none")
        for host in ("g1", "head")
    ]
    states = [
        step.request["state"]["roles"] for step in plan.steps if step.host == "head" and step.what == "unit"
    ]
    assert states == [["scheduler-0", "frontend-0"]] * 2, "what serves without it serves whole"
    stage.done(plan)
    assert started(rollback(stage)) == {"gateway-g1", "gateway-head"}


def test_a_rollback_goes_back_to_the_port_before(stage: Stage) -> None:
    first = stage.goods.config.name
    stage.document = {**stage.document, "listen": {"http": "127.0.0.1:9000"}}
    stage.done(stage.plan())
    plan = rollback(stage)
    assert started(plan) == {"gateway-g1", "gateway-head"}
    assert all(first in step.request["script"] for step in plan.steps if step.what == "start")
    restart = plan_restart(
        stage.inventory, stage.facts, stage.goods, stage.source.config.deploy, ["gateway-g1"]
    )
    details = [step.detail for step in (*plan.steps, *restart.steps) if step.what == "start"]
    assert not any("port" in detail for detail in details), "the file has another one"


@pytest.mark.parametrize(
    ("listen", "cluster", "reason"),
    [
        ({"http": "127.0.0.1:5550"}, {}, r"listen\.http: is '10\.0\.0\.1:5550', where the port of scheduler-0 is"),
        ({"grpc": "127.0.0.1:5555"}, {}, "listen.grpc: is 'g1:5555', where the port of frontend-1 is"),
        ({"http": "127.0.0.1:0", "grpc": "127.0.0.1:8000"}, {}, "listen.grpc: is 'g1:8000', where listen.http is"),
        ({"http": "127.0.0.1:8003", "metrics": "10.0.0.1:8002"}, {}, "where the page of metrics of frontend-0 is"),
        ({"http": "127.0.0.1:8003", "metrics": "127.0.0.1:8002"}, {}, ""),
        ({"http": "127.0.0.1:8080", "control": "tcp://10.0.0.1:8080"}, {}, r"listen\.http: is '10\.0\.0\.1:8080', where listen\.control of scheduler-0 is"),
        ({"http": "127.0.0.1:5551"}, {"schedulers": [{"host": "head"}, {"host": "g2", "standby": True, "port": 5551}]}, ""),
    ],
)  # fmt: skip
def test_two_at_one_port_of_a_host_are_refused(
    listen: dict[str, str], cluster: dict[str, Any], reason: str
) -> None:
    stage = with_gateway(listen=listen)
    cluster_with(stage, **cluster)
    if not reason:
        inventory_of(stage.source.config)
        return
    with pytest.raises(ConfigError, match=reason):
        inventory_of(stage.source.config)


def test_a_port_that_somebody_else_has_stops_the_host_though_the_gateway_runs_at_another_one(
    stage: Stage,
) -> None:
    stage.document = {**stage.document, "listen": {"http": "127.0.0.1:9000"}}
    stage.changed("g1", taken={"gateway-g1": [(9000, "nginx (process 7)")]})
    plan = stage.plan()
    assert plan.problems == {
        "g1": [
            "port 9000 of gateway-g1 is taken by nginx (process 7): end that, or choose another port (listen.http, listen.grpc)"
        ]
    }
    assert "gateway-g1" not in started(plan)


def test_a_port_that_a_gateway_leaves_too_late_stops_the_host(stage: Stage) -> None:
    stage.document = {**stage.document, "listen": {"http": "127.0.0.1:9000", "client": "tcp://10.0.0.1:8080"}}
    stage.changed("head", taken={"frontend-0": [(8080, "gateway-head")]})
    assert stage.plan().problems == {
        "head": [
            "port 8080 of frontend-0 is that of gateway-head, which leaves it only after that: first run `tenuto deploy up` with another port for frontend-0, then with this one (cluster.schedulers[].port, listen.client)"
        ]
    }
    stage.changed("head", taken={"gateway-head": [(9000, "frontend-0")]})
    assert stage.plan().problems == {}, "it leaves it before that"


def test_what_no_plan_carries_is_not_asked_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no tokens here. What is carried is looked at before a host is asked."""
    stage.document = {**stage.document, "deploy": {}}
    stage.done(stage.plan())
    monkeypatch.setattr(shell, "own_wheel", lambda: OWN)
    monkeypatch.setattr(shell, "_keys", lambda *_: ({}, {}))
    monkeypatch.setattr(Deployment, "facts", lambda _: stage.facts)
    deployment = Deployment(stage.source, cluster_of(stage))
    assert deployment.plan_restart(["gateway-g1"]).problems == {}
    assert deployment.plan_rollback().steps == ()
    monkeypatch.setattr(Deployment, "facts", lambda _: pytest.fail("hosts are asked"))
    with pytest.raises(ConfigError, match="/here/tokens cannot be read"):
        deployment.plan()


def test_what_a_gateway_would_refuse_is_refused_before_it_is_carried(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    config = GatewayConfig(token_file=tokens)
    with pytest.raises(ConfigError, match="cannot be read"):
        gateway_secrets(config)
    tokens.write_bytes(TOKEN)
    tokens.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        gateway_secrets(config)
    tokens.chmod(0o600)
    assert gateway_secrets(config) == {"token_file": TOKEN}
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("none", encoding="utf-8")
    paths = {"tls_certificate": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with pytest.raises(ConfigError, match=r"cluster\.gateway: .*cert\.pem and its key"):
        gateway_secrets(GatewayConfig(**{**asdict(config), **paths}))


def health(said: str) -> dict[str, Any]:
    return {"code": 1 if said else 0, "answer": None, "said": said}


def run_files(role_id: str) -> dict[str, Any]:
    addresses = {"control": ["ipc://x"], "http": ["http://10.0.0.1:8080"]}
    return {"run_files": [{"role_id": "node-g1"}, {"role_id": role_id, "addresses": addresses}]}


def test_gateways_are_waited_for_and_where_they_serve_is_said(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed_cluster, "READY_EVERY_S", 0.0)
    unready = health("tenuto: gateway-head has no frontend that wants requests, or ends")
    others = health("tenuto: node-g1 g1/gpu0/0 is starting")
    found = cluster_of(
        stage,
        head=Told(unready, unready, health(""), run_files("gateway-head")),
        g1=Told(others, run_files("gateway-other"), {"roles": {"frontend-1": ""}}),
    )
    said: list[tuple[str, str]] = []
    endpoints, problems = found.until_gateways_serve((), lambda *line: said.append(line))
    assert (endpoints, problems) == ({"http": ["http://10.0.0.1:8080"]}, [])
    assert said == [("head", "gateway-head serves http://10.0.0.1:8080")]
    assert found.until_gateways_serve(("head", "g1"), lambda *_: None) == ({}, [])
    found = cluster_of(stage, head=Told(unready), g1=Told(FabricError("it is busy")))
    asked_at_ms = found.clock.now_ms()
    _, problems = found.until_gateways_serve((), lambda *_: None)
    assert sorted(problems) == [
        "gateway-g1: is not ready: it is busy",
        f"gateway-head: is not ready: {unready['said']}",
    ]
    assert found.clock.now_ms() - asked_at_ms >= GATEWAY_LIMIT_MS
    absent = (health(""), run_files("gateway-other"), {"roles": {"gateway-g1": "stamp"}})
    found = cluster_of(stage, g1=Told(*absent * 99))
    assert found.until_gateways_serve(("head",), lambda *_: None)[1] == [
        "gateway-g1: is not ready: it has not come up"
    ]
    found = cluster_of(stage, g1=Told(*absent, health(""), run_files("gateway-g1")))
    assert found.until_gateways_serve(("head",), lambda *_: None)[1] == []
