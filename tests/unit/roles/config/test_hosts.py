from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from roles.cli.whereabouts import Whereabouts, chosen_host, index_of_frontend, require_keys
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.runtime.host_address import address_of_interface, own_address
from roles.scheduler.surroundings import SchedulerAddresses

MODEL = {"name": "m", "slo_ms": 30, "profile": {"alpha_ms": 1, "beta_ms": 5}}
NODES = [{"host": "a"}, {"host": "b"}, {"host": "c"}]


def parsed(cluster: dict[str, Any], **sections: Any) -> ClusterConfig:
    return parse_config(
        {"models": [MODEL], "cluster": {"nodes": NODES, **cluster}, **sections}, Path("/nowhere")
    )


def refused(cluster: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(cluster, **sections)
    return str(caught.value).removeprefix("configuration: ")


def test_a_file_without_places_is_one_host_and_its_defaults_are_the_first_node() -> None:
    places = parsed({"frontends": 2}).places
    assert not places.is_written
    assert [one.host for one in places.schedulers] == ["a"]
    assert [one.host for one in places.frontends] == ["a", "a"]


def test_a_file_with_places_says_where_each_role_is_reached() -> None:
    config = parsed(
        {
            "schedulers": [{"host": "s"}, {"host": "b", "standby": True, "port": 6000}],
            "frontends": [
                {"host": "a"},
                {"host": "a"},
                {"host": "b", "listen": {"client": "tcp://eth1:7000"}},
            ],
            "addresses": {"s": "10.0.0.9"},
        }
    )
    places = config.places
    assert config.hosts == ("a", "b", "c", "s")
    assert config.frontends == 3
    assert places.is_written
    assert places.control_address(0) == "tcp://10.0.0.9:5550"
    assert places.control_address(1) == "tcp://b:6000"
    assert [places.client_address(index, "10.0.0.1") for index in range(3)] == [
        "tcp://10.0.0.1:5555",
        "tcp://10.0.0.1:5556",
        "tcp://eth1:7000",
    ]
    assert places.ports("a") == {"frontend-0": 5555, "frontend-1": 5556}
    assert places.ports("b") == {"scheduler-1": 6000, "frontend-2": 7000}


def test_what_the_file_says_of_listening_holds_for_frontends_that_say_nothing() -> None:
    config = parsed(
        {"frontends": [{"host": "a"}, {"host": "b"}]},
        listen={"client": "tcp://eth0:7000"},
        security={"keys": "keys"},
    )
    assert [config.places.client_address(index, "10.0.0.1") for index in range(2)] == ["tcp://eth0:7000"] * 2


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ({"schedulers": []}, "the length of cluster.schedulers: is 0"),
        ({"schedulers": [{"host": "a", "standby": True}]}, "the first one is the active one"),
        ({"schedulers": [{"host": "a"}, {"host": "b"}]}, "only the first one is active"),
        (
            {"schedulers": [{"host": "a"}, {"host": "a", "standby": True}]},
            "scheduler-0 are both at port 5550 of a",
        ),
        ({"schedulers": 17}, "cluster.schedulers: is 17"),
        ({"schedulers": [{"hots": "a"}]}, "cluster.schedulers[0].hots: unknown key; did you mean host"),
        ({"frontends": []}, "the number of cluster.frontends: is 0"),
        ({"frontends": [{"host": "a b"}]}, "cluster.frontends[0].host: is 'a b'"),
        ({"frontends": [{"host": "a", "listen": {"client": "tcp://0.0.0.0:1"}}]}, "name the interface's own"),
        ({"schedulers": [{"host": "a", "port": 5555}]}, "scheduler-0 are both at port 5555 of a"),
        ({"frontends": [{"host": "a", "listen": {"client": "tcp://x:65535"}}] * 2}, "would be at port 65536"),
        ({"addresses": {"a": "0.0.0.0"}}, "cluster.addresses.a: is '0.0.0.0'"),
        ({"addresses": {"a": "::1"}}, "it must be an IPv4 address"),
        ({"nodes": [{"host": "a"}, {"host": "a"}]}, "'a' is already the name"),
    ],
)
def test_places_that_cannot_be_are_refused(cluster: dict[str, Any], line: str) -> None:
    assert line in refused(cluster)


@pytest.mark.parametrize(
    ("deploy", "line"),
    [
        ({"units": "upstart"}, "deploy.units: there is no 'upstart'"),
        ({"directory": "a;b"}, "deploy.directory: is 'a;b'"),
        ({"directory": "a/../b"}, "deploy.directory"),
        ({"python": "-c"}, "deploy.python: is '-c'"),
        ({"interface": "eth0; rm"}, "deploy.interface"),
        ({"env": {"A B": "1"}}, "deploy.env: 'A B' is no name"),
        ({"env": {"A": "1\n2"}}, "deploy.env.A: has a line end"),
        ({"port": 0}, "deploy.port: is 0"),
        ({"user": "x y"}, "deploy.user: is 'x y'"),
    ],
)
def test_what_no_host_could_do_is_refused(deploy: dict[str, Any], line: str) -> None:
    assert line in refused({}, deploy=deploy)


@pytest.mark.parametrize("name", [".", ".."])
@pytest.mark.parametrize(
    ("cluster", "sections"),
    [
        (lambda name: {"nodes": [{"host": name}]}, {}),
        (lambda name: {"schedulers": [{"host": name}]}, {}),
        (lambda name: {"frontends": [{"host": name}]}, {}),
        (lambda name: {"addresses": {name: "10.0.0.1"}}, {}),
        (lambda _: {}, {"deploy": lambda name: {"user": name}}),
        (lambda _: {}, {"models": lambda name: [MODEL | {"name": name}]}),
    ],
    ids=["node", "scheduler", "frontend", "address", "user", "model"],
)
def test_a_name_is_never_a_folder_above(name: str, cluster: Any, sections: Any) -> None:
    document = {"models": [MODEL], "cluster": {"nodes": NODES} | cluster(name)}
    with pytest.raises(ConfigError, match=r"is '\.{1,2}'; it must be 1 to 128 letters.*and not this"):
        parse_config(document | {key: of(name) for key, of in sections.items()}, Path("/nowhere"))


def test_hosts_that_others_can_reach_need_keys_and_loopback_does_not() -> None:
    placed = {"schedulers": [{"host": "a"}]}
    with pytest.raises(ConfigError, match="that needs keys"):
        require_keys(parsed(placed))
    with pytest.raises(ConfigError, match="that needs keys"):
        require_keys(parsed({**placed, "addresses": {"a": "127.0.0.1", "b": "127.0.0.2", "c": "10.0.0.1"}}))
    require_keys(parsed({**placed, "addresses": {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}}))
    require_keys(parsed(placed, security={"keys": "keys"}))


def test_each_role_gets_its_hosts_address_and_the_nearest_way_to_the_scheduler(tmp_path: Path) -> None:
    config = parsed(
        {
            "schedulers": [{"host": "a"}],
            "frontends": [{"host": "a"}, {"host": "b"}],
            "addresses": {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"},
        }
    )
    where = Whereabouts(config, tmp_path, is_here=False)
    assert where.scheduler(0) == SchedulerAddresses(("tcp://127.0.0.1:5550",))
    beside, far = where.frontend(0), where.frontend(1)
    assert beside.scheduler_addresses == [(f"ipc://{tmp_path}/scheduler-0.control",)]
    assert (far.host, far.scheduler_addresses) == ("127.0.0.2", [("tcp://127.0.0.1:5550",)])
    assert far.client_addresses == ("tcp://127.0.0.2:5555",)
    assert where.node("a").scheduler_addresses == {}  # by its run file
    assert (where.node("c").address, where.node("c").scheduler_addresses) == (
        "127.0.0.3",
        {"scheduler-0": ("tcp://127.0.0.1:5550",)},
    )
    here = Whereabouts(config, tmp_path, is_here=True)
    assert here.scheduler(0) == SchedulerAddresses()
    assert here.node("c").scheduler_addresses == {}


def test_a_client_on_a_host_reaches_its_own_frontends_by_ipc_and_others_only_where_it_may(
    tmp_path: Path,
) -> None:
    config = parsed(
        {
            "nodes": [{"host": "a"}],
            "frontends": [{"host": "a"}, {"host": "b"}, {"host": "b"}],
            "addresses": {"a": "127.0.0.1", "b": "127.0.0.2"},
        }
    )
    where = Whereabouts(config, tmp_path, is_here=False)
    own = f"ipc://{tmp_path}/frontend-0.client"
    there = ["tcp://127.0.0.2:5555", "tcp://127.0.0.2:5556"]
    assert where.clients("a", is_everywhere=True) == [own, *there]
    assert where.clients("a", is_everywhere=False) == [own]
    assert where.clients(None, is_everywhere=False) == []
    here = Whereabouts(config, tmp_path, is_here=True)
    assert here.clients(None, is_everywhere=False) == [
        f"ipc://{tmp_path}/frontend-{at}.client" for at in range(3)
    ]


@pytest.mark.parametrize(
    ("listen", "http", "grpc"),
    [
        ({}, "10.0.0.2:8000", "10.0.0.2:8001"),
        ({"http": "127.0.0.1:0"}, "10.0.0.2:8000", None),
        ({"grpc": "10.0.0.1:9001"}, None, "10.0.0.2:9001"),
    ],
)
def test_a_hosts_gateway_listens_at_its_address_with_the_files_ports(
    tmp_path: Path, listen: dict[str, str], http: str | None, grpc: str | None
) -> None:
    placed = {"frontends": [{"host": "a"}, {"host": "b"}], "addresses": {"a": "127.0.0.1", "b": "10.0.0.2"}}
    keys = {"keys": "keys"}
    config = parsed({**placed, "gateway": {"token_file": "tokens"}}, listen=listen, security=keys)
    where = Whereabouts(config, tmp_path, is_here=False)
    found = where.gateway("b", {})
    assert (found.http, found.grpc) == (http, grpc)
    assert found.token_file == config.gateway.token_file
    with pytest.raises(ConfigError, match=r"--node: the file has no frontend on 'c'; it has some on a, b"):
        where.gateway("c", {})


@pytest.mark.parametrize("is_one_given", [False, True])
def test_a_hosts_gateway_that_others_reach_needs_tokens(tmp_path: Path, *, is_one_given: bool) -> None:
    placed = {"frontends": [{"host": "a"}, {"host": "b"}], "addresses": {"a": "127.0.0.1", "b": "10.0.0.2"}}
    where = Whereabouts(parsed({**placed, "gateway": {}}, security={"keys": "keys"}), tmp_path, is_here=False)
    assert where.gateway("a", {}).http == "127.0.0.1:8000"
    with pytest.raises(
        ConfigError, match=r"--node: is .10\.0\.0\.2:800[01]., which others can reach: that needs"
    ):
        where.gateway("b", {"http": "127.0.0.1:8000"} if is_one_given else {})
    given = {"http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
    found = where.gateway("b", given)
    assert {"http": found.http, "grpc": found.grpc} == given


def test_schedulers_of_several_hosts_know_each_other_and_everybody_knows_all(tmp_path: Path) -> None:
    config = parsed(
        {
            "schedulers": [
                {"host": "a"},
                {"host": "b", "standby": True},
                {"host": "a", "standby": True, "port": 7},
            ],
            "frontends": [{"host": "c"}],
            "addresses": {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"},
        }
    )
    where = Whereabouts(config, tmp_path, is_here=False)
    at_a, at_b, also_at_a = (("tcp://127.0.0.1:5550",), ("tcp://127.0.0.2:5550",), ("tcp://127.0.0.1:7",))
    assert where.scheduler(0) == SchedulerAddresses(at_a, {"scheduler-1": at_b})  # 2 by its run file
    assert where.scheduler(1) == SchedulerAddresses(at_b, {"scheduler-0": at_a, "scheduler-2": also_at_a})
    assert where.scheduler(2) == SchedulerAddresses(also_at_a, {"scheduler-1": at_b})
    assert where.frontend(0).scheduler_addresses == [at_a, at_b, also_at_a]
    assert where.node("b").scheduler_addresses == {"scheduler-0": at_a, "scheduler-2": also_at_a}


def test_which_host_this_is_follows_from_its_name_or_is_asked() -> None:
    own = socket.gethostname()
    assert chosen_host(None, ["only"], "--host") == "only"
    assert chosen_host(None, ["other", own], "--host") == own
    assert chosen_host("x", ["a", "b"], "--host") == "x"
    with pytest.raises(ConfigError, match="Give --host: one of a1, b1"):
        chosen_host(None, ["a1", "b1"], "--host")
    config = parsed({"frontends": [{"host": own}, {"host": "other"}, {"host": "other"}]})
    assert index_of_frontend(config, None, is_here=False) == 0
    assert index_of_frontend(config, None, is_here=True) == 0
    with pytest.raises(ConfigError, match="there is no frontend 7"):
        index_of_frontend(config, 7, is_here=False)
    twice = parsed({"frontends": [{"host": own}, {"host": own}]})
    with pytest.raises(ConfigError, match="give --index, one of 0, 1"):
        index_of_frontend(twice, None, is_here=False)


def test_an_address_that_only_this_host_reaches_is_not_told_to_others() -> None:
    assert own_address("a", "10.0.0.1", None) == "10.0.0.1"
    assert own_address("a", None, "lo") == address_of_interface("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"cluster\.addresses"):
        own_address("localhost", None, None)
    with pytest.raises(ConfigError, match="has no address here"):
        own_address("no-such-host.invalid", None, None)
    for host in ("gpu..1", "n" * 64):  # which no resolver is even asked for
        with pytest.raises(ConfigError, match=rf"the host name {host} has no address here: say which one"):
            own_address(host, None, None)
    with pytest.raises(ConfigError, match="there is lo"):
        address_of_interface("nosuch0")
