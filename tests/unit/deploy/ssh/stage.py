"""A file, its goods and what hosts tell, for plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.ssh.config_bundle import Source, carried_config
from deploy.ssh.facts import HostFacts, Running, Unreachable
from deploy.ssh.inventory import Inventory, inventory_of
from deploy.ssh.on_host.system import sha256
from deploy.ssh.plan import addresses_of, plan_up
from deploy.ssh.steps import Goods, Plan, Step
from deploy.ssh.wheels import OwnWheel, Wheel
from fabric.keys import TRUSTED_FILE
from roles.config.read_config import parse_config

MODEL = {"name": "m", "slo_ms": 30, "profile": {"alpha_ms": 1, "beta_ms": 5}}
CLUSTER: dict[str, Any] = {
    "nodes": [{"host": "g1", "gpus": 2, "type": "v100", "device": "cuda"}, {"host": "g2", "gpus": 1}],
    "schedulers": [{"host": "head"}],
    "frontends": [{"host": "head"}, {"host": "g1"}],
    "addresses": {"head": "10.0.0.1"},
}
DOCUMENT = {
    "models": [MODEL],
    "cluster": CLUSTER,
    "security": {"keys": "keys"},
    "deploy": {"wheelhouse": "wheels", "env": {"HTTP_PROXY": "http://it's:1"}},
}
VERSION = "0.1.0+abc"
OWN = OwnWheel(Wheel(f"tenuto-{VERSION}-py3-none-any.whl", 900_000, "5" * 64, content=b""), VERSION)
NUMPY = Wheel("numpy-2.0-cp311-x.whl", 15_000_000, "6" * 64, Path("/wheels/numpy"))


class Stage:
    """What a plan is made from; change `facts` and `document`, and plan."""

    def __init__(self, **sections: Any) -> None:
        self.document: dict[str, Any] = {**DOCUMENT, **sections}
        self.facts: dict[str, HostFacts | Unreachable] = {
            name: HostFacts(
                python="3.11.2",
                machine="Linux x86_64",
                base=f"/home/u/.tenuto/{name}",
                run_dir=f"/home/u/.tenuto/{name}/run",
                manager="supervisor",
                address=address,
                free_bytes=50_000_000_000,
                open_files=524_288,
                cores=8,
                has_cron=True,
                has_manager=False,
                has_driver=name == "g1",
                has_mps=name == "g1",
            )
            for name, address in (("head", "172.16.0.9"), ("g1", "10.0.0.2"), ("g2", "10.0.0.3"))
        }
        self.version = VERSION
        self.left: dict[str, HostFacts | Unreachable] = {}
        """Hosts that the file does not have any more."""
        self.keys = {name: name.encode() for name in self.key_names()}

    @property
    def inventory(self) -> Inventory:
        return inventory_of(self.source.config)

    @property
    def source(self) -> Source:
        return Source(Path("/here/c.yaml"), self.document, parse_config(self.document, Path("/here")))

    def key_names(self) -> list[str]:
        return [TRUSTED_FILE, "scheduler.key", "frontend.key", "node-g1.key", "node-g2.key"]

    def changed(self, host: str, **facts: Any) -> None:
        told = self.facts[host]
        assert isinstance(told, HostFacts)
        self.facts[host] = replace(told, **facts)

    @property
    def goods(self) -> Goods:
        addresses = addresses_of(self.inventory, self.source.config.places.addresses, self.facts)
        return Goods(
            OwnWheel(OWN.wheel, self.version),
            {one.host: [OWN.wheel, NUMPY] for one in self.inventory.hosts},
            carried_config(self.source, addresses),
            self.keys,
            addresses,
            {*self.left, *(host for host, told in self.facts.items() if isinstance(told, HostFacts))},
        )

    def plan(self) -> Plan:
        facts = {name: told for name, told in self.facts.items() if name in self.inventory.names}
        return plan_up(self.inventory, facts, self.goods, self.source.config.deploy, {}, self.left)

    def take_out(self, host: str) -> None:
        """The file does not have it any more."""
        cluster = self.document["cluster"]
        nodes = [one for one in cluster["nodes"] if one["host"] != host]
        frontends = [one for one in cluster["frontends"] if one["host"] != host]
        self.document = {**self.document, "cluster": {**cluster, "nodes": nodes, "frontends": frontends}}
        self.left[host] = self.facts.pop(host)

    def done(self, plan: Plan) -> None:
        """As if all steps had been done."""
        for step in plan.steps:
            self.do(step)

    def do(self, step: Step) -> None:
        if step.host in self.left:
            told = self.left[step.host]
            assert isinstance(told, HostFacts)
            if step.what == "remove":
                self.left[step.host] = replace(told, is_there=False, roles={})
            elif step.what == "drain":
                self.left[step.host] = replace(told, drained=(step.host,))
            return
        told, request = self.facts[step.host], step.request
        assert isinstance(told, HostFacts)
        match step.what:
            case "wheels":
                wheels = {file.path.removeprefix("wheels/"): file.size for file in step.files}
                self.changed(step.host, wheels={**told.wheels, **wheels})
            case "environment":
                version = request["version"]
                extras = {*told.versions.get(version, ()), *request["extras"]}
                versions = {**told.versions, version: sorted(extras)}
                self.changed(step.host, versions=versions, has_manager=True)
            case "drain":
                self.changed(step.host, drained=(step.host,))
            case "configuration":
                name = request["complete"].removeprefix("configs/")
                (views,) = [file.source for file in step.files if file.path.endswith("/views.json")]
                assert isinstance(views, bytes)
                self.changed(
                    step.host,
                    configs=[*told.configs, name],
                    views={**told.views, name: json.loads(views)},
                )
            case "forget":
                self.changed(step.host, **request["state"])
            case "back":
                self.changed(step.host, drained=())
            case "keys":
                sent = {file.path.removeprefix("keys/"): file.sha256 for file in step.files}
                removed = request.get("removed", ())
                kept = {name: own for name, own in told.keys.items() if f"keys/{name}" not in removed}
                self.changed(step.host, keys={**kept, **sent})
            case "stop":
                left = {name: own for name, own in told.roles.items() if name not in request["role_ids"]}
                self.changed(step.host, roles=left)
            case "start" | "unit":
                state, role_id = request["state"], request["role_id"]
                assert step.what == "start" or told.roles[role_id] == request["stamp"]
                self.changed(
                    step.host,
                    roles={**told.roles, role_id: request["stamp"]},
                    scripts={**told.scripts, role_id: sha256(request["script"].encode())},
                    now=Running(state["version"], state["config"]),
                    served=Running(state["version"], state["config"]),
                    before=Running(**state["before"]),
                    addresses=state["addresses"],
                )
            case other:
                raise AssertionError(other)


def lines(plan: Plan) -> str:
    return "".join(
        f"{step.phase.name:10} {step.host:4} {step.what:13} {step.detail}\n" for step in plan.steps
    )
