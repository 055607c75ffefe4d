"""What a host has told of itself, as values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.ssh.wheels import Wheel
from fabric.errors import FabricError


@dataclass(frozen=True, slots=True)
class Running:
    """What roles of a host are started with: a version and a configuration, by their names."""

    version: str = ""
    config: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One host. `is_there`: something of ours is on it. `roles`: of each unit that is there the stamp its process was started with, empty where none runs.

    `serving`: of these roles the ones whose process has come up. `scripts`: a hash of what starts each role. `versions`: of each environment, the extras that it was installed with. `views`: of each configuration, what tells what a role reads of it. `keys`: a hash of each key file. `taken`: ports that are wanted and who else has each (another role by its id), by role id. `clock_off_ms`: how far its
    clock is ahead of ours, as far as that can be told. `addresses`: of all hosts, as it was last told. `now`: what it was last told to run; `served`: with what all its roles
    served last; `before`: what served before `now`. `drained`: what of its node a rolling change has taken out of use and not yet back: it, or GPUs of it.
    """

    python: str
    machine: str
    base: str
    run_dir: str
    manager: str
    address: str | None
    free_bytes: int
    open_files: int
    cores: int
    clock_off_ms: float = 0.0
    is_there: bool = True
    has_venv: bool = True
    is_writable: bool = True
    has_manager: bool = True
    has_cron: bool = True
    has_driver: bool = False
    has_mps: bool = False
    wheels: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    configs: Sequence[str] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    serving: Sequence[str] = ()
    scripts: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    taken: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    now: Running = Running()
    served: Running = Running()
    before: Running = Running()
    addresses: Mapping[str, str] = field(default_factory=dict)
    drained: Sequence[str] = ()

    def has_installed(self, version: str, extras: Collection[str]) -> bool:
        """Whether a version's environment is there, with these extras."""
        return version in self.versions and set(extras) <= set(self.versions[version])

    def lacks(self, wheel: Wheel) -> bool:
        """Whether a wheel is not there, or not all of it."""
        return self.wheels.get(wheel.name) != wheel.size


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A host that could not be asked, and why. `is_silent`: not even ssh's end of it answers."""

    reason: str
    is_silent: bool = True


def facts_from(told: Mapping[str, Any], asked_at_ms: float, answered_at_ms: float) -> HostFacts:
    """Raises FabricError for an answer that is none."""
    try:
        state, told_at_ms = told["state"], float(told["time_ms"])
        early_ms, late_ms = asked_at_ms - told_at_ms, told_at_ms - answered_at_ms
        return HostFacts(
            **{
                name: told[name]
                for name in (
                    *(
                        "python",
                        "machine",
                        "base",
                        "run_dir",
                        "manager",
                        "address",
                        "free_bytes",
                        "open_files",
                        "cores",
                    ),
                    *(
                        "is_there",
                        "has_venv",
                        "is_writable",
                        "has_manager",
                        "has_cron",
                        "has_driver",
                        "has_mps",
                    ),
                    *(
                        "wheels",
                        "versions",
                        "configs",
                        "keys",
                        "roles",
                        "serving",
                        "scripts",
                        "views",
                        "taken",
                    ),
                )
            },
            clock_off_ms=late_ms if late_ms > 0 else -early_ms if early_ms > 0 else 0.0,
            now=Running(str(state.get("version", "")), str(state.get("config", ""))),
            served=Running(**told["served"]),
            before=Running(**state.get("before", {})),
            addresses=dict(state.get("addresses", {})),
            drained=tuple(state.get("drained", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FabricError(f"its answer cannot be understood: {error!r}") from error
