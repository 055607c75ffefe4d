"""`tenuto deploy k8s`: what it writes where, and what it says of a file that is not for Kubernetes."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fabric.errors import ConfigError
from tests.unit.deploy.k8s.stage import DOCUMENT, IMAGE, MODEL, NODES, Stage

ROOT = Path(__file__).parents[4]
CLUSTER: dict[str, Any] = DOCUMENT["cluster"]
MANY = "x" * 40

BAD_FILES: list[tuple[dict[str, Any], str]] = [
    ({"schedulers": [{"host": "a"}]}, "cluster.schedulers: lists hosts"),
    ({"frontends": [{"host": "a"}, {"host": "b"}]}, "cluster.frontends: lists hosts"),
    ({"addresses": {"gpu-a": "10.0.0.1"}}, "cluster.addresses: has hosts' addresses"),
    ({"nodes": None, "gpus": 2}, "cluster.gpus: says not where they are"),
    ({"nodes": [{"host": "GPU_1", "gpus": 1}]}, "cluster.nodes[0].host: is 'GPU_1'"),
    ({"nodes": [{"host": "-a", "gpus": 1}]}, "cluster.nodes[0].host: is '-a'"),
    ({"nodes": [{"host": "a", "device": "cuda"}]}, "cluster.nodes[0].gpus: is missing or 0"),
    (
        {"nodes": [{"host": "b", "gpus": 1}, {"host": "a", "gpus": 0, "device": "cuda"}]},
        "cluster.nodes[1].gpus: is missing or 0",
    ),
    ({"nodes": [{"host": MANY * 3, "gpus": 1}]}, "cluster.nodes[0].host: has 120 letters"),
]


@pytest.mark.parametrize(("change", "words"), BAD_FILES, ids=[words for _, words in BAD_FILES])
def test_a_file_that_is_not_for_kubernetes_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    stage = Stage(tmp_path)
    stage.write()  # with keys
    cluster = {**CLUSTER, **change}
    stage.document["cluster"] = {key: value for key, value in cluster.items() if value is not None}
    stage.write()
    done = stage.run()
    assert isinstance(done.exception, ConfigError), done.output  # exit code 3
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)
    assert len(str(done.exception)) < 250
    assert done.stdout == ""


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    del stage.document["security"]
    stage.file.write_text(yaml.safe_dump(stage.document))
    done = stage.run()
    assert isinstance(done.exception, ConfigError)
    assert f"write security: {{keys: keys}} into {stage.file}" in str(done.exception)
    assert f"`tenuto keys create {tmp_path / 'keys'} --config {stage.file}`" in str(done.exception)


def test_keys_that_are_not_made_yet_are_refused_with_the_command_that_makes_them(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.file.write_text(yaml.safe_dump(stage.document))
    done = stage.run()
    assert isinstance(done.exception, ConfigError)
    assert f"`tenuto keys create {tmp_path / 'keys'} --config FILE`" in str(done.exception)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write()
    (tmp_path / "keys" / "node-gpu-c.key").unlink()
    done = stage.run()
    assert isinstance(done.exception, ConfigError)
    assert "node-gpu-c.key" in str(done.exception)
    assert f"tenuto keys rotate {tmp_path / 'keys'} node/gpu-c" in str(done.exception)


@pytest.mark.parametrize("size", [(1 << 20) + 1, 600_000])
def test_what_no_configmap_holds_is_to_go_into_the_image(tmp_path: Path, size: int) -> None:
    """One file too large, or two together."""
    stage = Stage(tmp_path)
    models = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.pt").write_bytes(b"w" * size)
        loader = {"zoo": "torchvision", "arch": "resnet18", "weights": f"{name}.pt"}
        models.append({**MODEL, "name": name, "loader": loader})
    stage.document["models"] = models
    stage.write()
    done = stage.run()
    assert isinstance(done.exception, ConfigError)
    assert "into the image" in str(done.exception)
    assert re.search(r"[ab]\.pt", str(done.exception))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "Missing option '--image'"),
        (("--image", ""), "--image: is ''"),
        (("--image", "a b"), "--image: is 'a b'"),
        (("--image", "Registry/Tenuto"), "--image: is 'Registry/Tenuto'"),
        (("--image", IMAGE, "--namespace", "My_Space"), "--namespace: is 'My_Space'"),
        (("--image", IMAGE, "--namespace", "n" * 64), "--namespace: is"),
    ],
)
def test_a_wrong_option_is_a_usage_error(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    stage = Stage(tmp_path)
    stage.write()
    done = stage.run("--output", "-", *options)
    assert done.exit_code == 2
    assert words in done.output.splitlines()[-1]


@pytest.mark.parametrize(
    "image",
    [
        "tenuto:1",
        "localhost:5000/a/b-c/tenuto:1.0-rc1",
        "ghcr.example/x/tenuto@sha256:" + "0" * 64,
        "r.example:443/tenuto:v1@sha256:" + "f" * 64,
    ],
)
def test_every_kind_of_reference_to_an_image_is_taken(tmp_path: Path, image: str) -> None:
    stage = Stage(tmp_path)
    stage.write()
    done = stage.run("--image", image)
    assert done.exit_code == 0
    assert done.stderr == ""
    images = [line.split()[-1] for line in done.stdout.splitlines() if line.strip().startswith("image: ")]
    assert set(images) == {image}


def test_what_is_otherwise_than_asked_is_said(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    node = {"host": "a", "gpus": 1, "workers_outlive_agent": True}
    stage.document["cluster"] = {**CLUSTER, "nodes": [node]}
    stage.document["listen"] = {"http": "127.0.0.1:8000"}
    stage.write()
    done = stage.run("--image", "r.example:5000/tenuto")
    assert "has no tag" in done.stderr
    assert "workers_outlive_agent" in done.stderr
    assert "listen.http" in done.stderr
    assert "workers_outlive_agent" not in done.stdout


def test_a_folder_gets_files_of_which_one_is_secret_and_a_second_time_the_same(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write()
    folder = tmp_path / "deep" / "out"
    kept = os.umask(0)
    try:
        done = stage.run("--image", IMAGE, "--output", str(folder), "--json")
    finally:
        os.umask(kept)
    told = json.loads(done.stdout)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    assert sorted(map(str, files)) == sorted(told["files"])
    for path, content in files.items():
        holds_secret = any(one["kind"] == "Secret" for one in yaml.safe_load_all(content) if one is not None)
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if holds_secret else 0o644)
    listed = [(one["kind"], one["name"]) for one in told["objects"]]
    assert set(listed) == set(stage.objects())
    again = stage.run("--image", IMAGE, "--output", str(folder))
    assert again.exit_code == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == files


def test_agents_of_nodes_that_are_so_no_more_are_deleted_by_the_command_that_is_said(tmp_path: Path) -> None:
    """No apply deletes what is in no file any more: the former DaemonSet would keep its nodes' GPUs."""
    stage = Stage(tmp_path)
    before = stage.objects("--namespace", "serving")
    nodes = [{**node, "gpus": 8} if node["host"] == "gpu-c" else node for node in NODES]
    stage.document["cluster"] = {**CLUSTER, "nodes": [node for node in nodes if node["host"] != "cpu-d"]}
    after = stage.objects("--namespace", "serving")
    folder = tmp_path / "out"
    said = stage.run("--image", IMAGE, "--namespace", "serving", "--output", str(folder)).stderr
    (command,) = re.findall(r"kubectl -n serving delete .*", said)
    assert command in (folder / "node-agents.yaml").read_text()
    found = re.fullmatch(r"kubectl -n serving delete (\S+) -l '(.*),(\S+) notin \((.*)\)'", command)
    assert found is not None
    kinds, labels, label, names = found.groups()

    def is_deleted(one: dict[str, Any]) -> bool:
        its = one["metadata"]["labels"]
        is_of_us = dict(pair.split("=") for pair in labels.split(",")).items() <= its.items()
        return one["kind"].lower() in kinds.split(",") and is_of_us and its.get(label) not in names.split(",")

    gone = {key for key in before if key not in after}
    assert {name for _, name in gone} == {"tenuto-node-agent-cuda-4", "tenuto-node-agent-cpu"}
    assert {key for key, one in before.items() if is_deleted(one)} == gone
    assert not any(map(is_deleted, after.values()))


def test_the_page_tells_it_as_it_is(tmp_path: Path) -> None:
    """Its file is taken, and its table names the files that come of it."""
    page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    stage = Stage(tmp_path, yaml.safe_load(example[1]))
    stage.write()
    done = stage.run("--image", IMAGE, "--output", str(tmp_path / "manifests"))
    assert done.exit_code == 0, done.exception
    written = {path.name for path in (tmp_path / "manifests").iterdir()}
    assert set(re.findall(r"^\| `([\w-]+\.yaml)` \|", page, re.MULTILINE)) == written


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write()
    (tmp_path / "taken").write_text("")
    done = stage.run("--image", IMAGE, "--output", str(tmp_path / "taken"))
    assert isinstance(done.exception, ConfigError)
    assert str(tmp_path / "taken") in str(done.exception)


def test_json_is_one_list_that_kubectl_takes(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    objects = stage.objects()
    told = json.loads(stage.run("--image", IMAGE, "--json").stdout)
    assert (told["apiVersion"], told["kind"]) == ("v1", "List")
    assert told["items"] == list(objects.values())


def test_secrets_are_not_printed_to_a_terminal(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write()
    reader, terminal = os.openpty()
    command = [sys.executable, "-m", "roles.cli", "deploy", "k8s", str(stage.file), "--image", IMAGE]
    done = subprocess.run(
        command, stdout=terminal, stderr=subprocess.PIPE, cwd=ROOT, timeout=60, check=False, text=True
    )
    os.close(terminal)
    assert done.returncode == 2
    assert "this is a terminal" in done.stderr
    try:
        with pytest.raises(OSError, match="Input/output"):  # nothing came, and nobody is there any more
            os.read(reader, 1)
    finally:
        os.close(reader)
