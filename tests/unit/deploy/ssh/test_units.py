"""Units of several clusters of one user on one host, whose folder of units is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.ssh.on_host.folders import Place
from deploy.ssh.on_host.managers import Systemd, machine_id, systemd_unit
from deploy.ssh.on_host.requests import remove

PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$*" in *Linger*) cat {lingers};; *is-active*) echo active;; *show-environment*) echo A=b;; esac
"""


class Host:
    """A home, with systemctl and loginctl that write down what they are told."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home / "log"
        self.lingers = home / "lingers"
        self.log.touch()
        self.lingers.write_text("Linger=no\n")
        for name in ("systemctl", "loginctl"):
            program = home / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(PROGRAM.format(log=self.log, lingers=self.lingers))
            program.chmod(0o700)

    def cluster(self, directory: str, host: str = "gpu1") -> Systemd:
        place = Place({"host": host, "directory": directory, "units": "systemd"})
        for folder in (place.base / "roles", place.run_dir):
            folder.mkdir(parents=True)
        (place.base / ".lock").touch()
        return Systemd(place)

    def units(self) -> set[str]:
        return {path.name for path in Systemd.folder.glob("*.service")}


@pytest.fixture
def host(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("HOME", str(short_path))
    monkeypatch.setenv("PATH", f"{short_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(Systemd, "folder", short_path / ".config/systemd/user")
    Systemd.folder.mkdir(parents=True)
    return Host(short_path)


def prepared(host: Host, cluster: Systemd, *role_ids: str) -> None:
    """As by `loginctl enable-linger`, which takes."""
    before = host.lingers.read_text()
    if "no" in before:
        (cluster.place.base / "lingering").touch()
        host.lingers.write_text("Linger=yes\n")
    cluster.prepare()
    for role_id in role_ids:
        cluster.write(role_id)


def test_a_cluster_knows_writes_and_removes_its_own_units_only(host: Host) -> None:
    roles = {"node-gpu1", "frontend-0"}
    first, second = host.cluster(".tenuto"), host.cluster("a%b")
    other_host = host.cluster(".tenuto", "gpu1.x")
    clusters = (first, second, other_host)
    for cluster in clusters:
        prepared(host, cluster, *roles)
    for cluster in clusters:
        assert cluster.known() == roles
        for role_id in roles:
            text = (Systemd.folder / cluster._unit(role_id)).read_text()
            assert str(cluster.place.script(role_id)).replace("%", "%%") in text
    units = host.units()
    assert len(units) == 9, "two roles each, and who looks after the logs"
    first.stop("frontend-0")
    assert first.known() == {"node-gpu1"}
    remove(second.place, {})
    assert (first.known(), second.known(), other_host.known()) == ({"node-gpu1"}, set(), roles)
    assert len(units - host.units()) == 4


def test_units_by_the_names_of_former_versions_are_the_clusters_whose_scripts_they_start(host: Host) -> None:
    first, second = host.cluster(".tenuto"), host.cluster("srv")
    place = first.place
    for name, role_id in (("tenuto-gpu1.node-gpu1", "node-gpu1"), ("tenuto-gpu1-logs", "logs")):
        script = place.script(role_id) if role_id != "logs" else place.base / "log_limit.sh"
        text = systemd_unit(place, role_id, script, machine_id())
        (Systemd.folder / f"{name}.service").write_text(text)
    former = host.units()
    assert (first.known(), second.known()) == ({"node-gpu1"}, set())
    prepared(host, first, "node-gpu1")
    assert host.units() == former, "they are written over, not beside"
    prepared(host, second, "node-gpu1")
    remove(first.place, {})
    assert not former & host.units()
    assert second.known() == {"node-gpu1"}


def test_lingering_ends_with_the_last_cluster_if_one_of_them_began_it(host: Host) -> None:
    first, second = host.cluster(".tenuto"), host.cluster("srv")
    elsewhere = host.cluster(".tenuto", "gpu2")
    text = systemd_unit(elsewhere.place, "logs", elsewhere.place.base / "log_limit.sh", "another machine's")
    (Systemd.folder / "tenuto-gpu2-logs.service").write_text(text)  # of a host that shares the home
    prepared(host, first, "node-gpu1")
    prepared(host, second, "node-gpu1")
    remove(first.place, {})
    assert "disable-linger" not in host.log.read_text()
    remove(second.place, {})
    assert "disable-linger" in host.log.read_text()
