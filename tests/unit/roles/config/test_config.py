from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import LoaderSpec
from profiles.interference import Running
from profiles.model import ModelProfile
from roles.config.cluster import ModelConfig, PolicyChoice
from roles.config.rates import shared_rates
from roles.config.read_config import config_origins, load_config, parse_config
from roles.scheduler.settings import settings_from

HERE = Path("/nowhere")
LINE = {"alpha_ms": 1.053, "beta_ms": 5.072, "max_batch": 64}


def model(name: Any = "resnet50", **keys: Any) -> dict[str, Any]:
    return {"name": name, "slo_ms": 25, "rate_rps": 100, "profile": dict(LINE), **keys}


def profile_on(model: ModelConfig, gpu_type: str) -> ModelProfile:
    found = model.find_profile(gpu_type)
    assert found is not None
    return found


def document(*models: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"models": list(models) or [model()], "cluster": {"gpus": 2}, **keys}


def refused(written: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(written, HERE, source="f.yaml")
    text = str(caught.value)
    assert text.startswith("f.yaml: ")
    return text.removeprefix("f.yaml: ")


# ---------------------------------------------------------------- what is right


def test_the_smallest_file_has_every_default_of_the_contract() -> None:
    config = parse_config(document(), HERE)
    assert (config.seed, config.frontends, config.interference) == (1, 1, PolicyChoice("none"))
    assert config.batching.name == "tenuto"
    assert config.batching.options == {"pick": "lowest_id"}
    assert config.placement.name == "symphony"
    assert config.listen.client == "tcp://127.0.0.1:0"
    assert [node.host for node in config.nodes] == ["local"]
    assert [(g.index, g.local_index, g.gpu_type, g.device) for g in config.gpus] == [
        (0, 0, "generic", "emulated"),
        (1, 1, "generic", "emulated"),
    ]
    (only,) = config.models
    assert only.rate_steps == ((0.0, 100.0),)
    assert only.arrival.process == "poisson"
    assert only.memory_bytes is None
    assert profile_on(only, "anything").exec_ms(16) == pytest.approx(1.053 * 16 + 5.072)


def test_max_batch_of_a_line_is_512_unless_said() -> None:
    config = parse_config(document(model(profile={"alpha_ms": 1, "beta_ms": 5})), HERE)
    assert profile_on(config.models[0], "generic").batch_size_max == 512


def test_gpus_of_several_nodes_are_numbered_through() -> None:
    nodes = [
        {"host": "a", "gpus": 2, "type": "v100", "price_per_hour": 3.06},
        {"host": "b", "gpus": 0},
        {"host": "c", "gpus": 3, "type": "T4", "memory_gb": 15, "device": "cuda"},
    ]
    config = parse_config(document(cluster={"nodes": nodes}), HERE)
    assert [(g.index, g.node_id, g.local_index, g.gpu_type) for g in config.gpus] == [
        (0, "a", 0, "v100"),
        (1, "a", 1, "v100"),
        (2, "c", 0, "t4"),
        (3, "c", 1, "t4"),
        (4, "c", 2, "t4"),
    ]
    assert config.gpus[0].price_per_hour == 3.06
    assert config.gpus[4].memory_bytes == 15 * 2**30
    assert config.gpu_types == ("v100", "t4")


def test_a_profile_by_type_holds_on_its_types_only() -> None:
    by_type = {"V100": {"table": {"1": 5.9, 2: 7.1}}, "t4": {"ref": "thesis-v100/resnet50"}}
    config = parse_config(document(model(profile={"by_type": by_type})), HERE)
    only = config.models[0]
    assert profile_on(only, "v100").exec_table() == (5.9, 7.1)
    assert profile_on(only, "t4").exec_ms(8) == pytest.approx(9.65, abs=0.001)  # 8 / 829.08 s
    assert only.find_profile("generic") is None
    assert "no profile for GPU type generic" in config.place().unplaced[0].reason


def test_rate_steps_are_in_ms_and_start_at_zero() -> None:
    config = parse_config(document(model(rate_rps=[[10, 50], [20.5, 0]])), HERE)
    assert config.models[0].rate_steps == ((0.0, 0.0), (10_000.0, 50.0), (20_500.0, 0.0))
    assert config.models[0].rate_rps == 50


def test_a_total_is_shared_out_by_weights() -> None:
    models = [model("a", weight=1), model("b", weight=3)]
    for entry in models:
        del entry["rate_rps"]
    config = parse_config(document(*models, rate_rps=1000), HERE)
    assert [m.rate_rps for m in config.models] == [250, 750]
    assert config.rate_rps == 1000


def test_a_total_is_shared_out_by_popularity() -> None:
    models = [model(name) for name in "abc"]
    for entry in models:
        del entry["rate_rps"]
    config = parse_config(document(*models, rate_rps=1100, popularity={"zipf": 1}), HERE)
    assert [m.rate_rps for m in config.models] == pytest.approx([600, 300, 200])


def test_a_rate_may_be_zero_or_unknown() -> None:
    assert parse_config(document(model(rate_rps=0)), HERE).rate_rps == 0
    silent = model()
    del silent["rate_rps"]
    config = parse_config(document(silent), HERE)
    assert config.models[0].rate_steps == ()
    assert config.rate_rps is None


def test_a_loader_needs_no_profile_and_its_weights_are_relative_to_the_file() -> None:
    entry = {
        "name": "digits",
        "slo_ms": 50,
        "loader": {"python": "deploy.local.demo.digits_model:Digits", "weights": "w.safetensors"},
    }
    nodes = [{"host": "a", "gpus": 1, "device": "cpu"}]
    config = parse_config(document(entry, cluster={"nodes": nodes}), HERE)
    weights = "/nowhere/w.safetensors"
    assert config.models[0].loader == LoaderSpec(
        python="deploy.local.demo.digits_model:Digits", weights=weights
    )
    assert [m.model_id for m in config.place().slices[0].models] == ["digits"]


def test_a_loader_takes_a_configuration_and_how_the_weights_are_kept() -> None:
    loader = {
        "zoo": "transformers",
        "arch": "gpt2",
        "dtype": "bfloat16",
        "config": {"n_layer": 2, "tie": True},
    }
    read = parse_config(document(model(loader=loader)), HERE).models[0].loader
    assert read == LoaderSpec(
        zoo="transformers",
        arch="gpt2",
        dtype="bfloat16",
        sequence_length=512,
        config=(("n_layer", "2"), ("tie", "true")),
    )


def test_memory_overrides_the_profile() -> None:
    config = parse_config(document(model(memory_mb=300)), HERE)
    assert config.models[0].memory_bytes == 300 * 2**20


def test_the_limit_of_a_run_reaches_the_worker() -> None:
    config = parse_config(document(model(run_limit_ms=900), model("other")), HERE)
    settings = settings_from(config, config.place())
    limits = {one.model_id: one.run_limit_ms for _, spec in settings.slices for one in spec.models}
    assert limits == {"resnet50": 900.0, "other": None}


def test_a_trace_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("at_ms\n0\n")
    config = parse_config(document(model(arrival={"process": "trace", "path": "t.csv"})), tmp_path)
    assert config.models[0].arrival.trace_path == tmp_path / "t.csv"


def test_paths_in_what_a_file_said_are_relative_to_it_though_it_may_be_gone_by_now(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("at_ms\n0\n")
    text = json.dumps(document(model(arrival={"process": "trace", "path": "t.csv"})))
    config = load_config(tmp_path / "gone.yaml", text=text)
    assert config.models[0].arrival.trace_path == tmp_path / "t.csv"
    with pytest.raises(ConfigError, match=r"gone\.yaml: models\[0\]"):
        load_config(tmp_path / "gone.yaml", text=json.dumps(document(model(slo_ms=-1))))


@pytest.mark.parametrize(
    ("batching", "name", "options"),
    [
        ("eager", "eager", {"drop": "simple", "pick": "lowest_id"}),
        ({"deferred": {"drop": "simple"}}, "deferred", {"drop": "simple", "pick": "lowest_id"}),
        ({"tenuto": {"pick": "longest_idle"}}, "tenuto", {"pick": "longest_idle"}),
        ({"timeout": {"timeout_ms": 0}}, "timeout", {"timeout_ms": 0}),
        ({"timeout": {"slo_percent": 50}}, "timeout", {"slo_percent": 50}),
        ("fixed", "fixed", {"max_wait_ms": 100}),
        ({"fixed": {"batch": 8}}, "fixed", {"max_wait_ms": 100, "batch": 8}),
        ({"nexus": None}, "nexus", {"epoch_s": 10}),
        ("clockwork", "clockwork", {"sizes": "powers_of_two"}),
        ("shepherd", "shepherd", {"preempt_ratio": 3}),
    ],
)
def test_every_discipline_has_the_options_of_the_contract(
    batching: object, name: str, options: dict[str, Any]
) -> None:
    config = parse_config(document(batching=batching), HERE)
    assert (config.batching.name, dict(config.batching.options)) == (name, options)


def test_fixed_batching_takes_the_plans_batch_or_its_own() -> None:
    with pytest.raises(ConfigError, match="no batch size for resnet50"):
        settings_from(parse_config(document(batching="fixed"), HERE))
    assert parse_config(document(batching="fixed"), HERE).place().slices, "a plan alone needs no batch"
    assert settings_from(parse_config(document(batching={"fixed": {"batch": 8}}), HERE)).slices
    assert settings_from(parse_config(document(batching="fixed", placement="exclusive"), HERE)).slices


def test_given_slices_are_checked_with_the_cluster() -> None:
    slices = [{"gpu": 0, "share_percent": 40, "models": [{"model": "resnet50", "batch": 8}]}]
    config = parse_config(document(placement={"given": {"slices": slices}}), HERE)
    assert config.place().slices[0].share_percent == 40
    slices[0]["gpu"] = 2
    with pytest.raises(ConfigError, match="numbered 0 to 1"):
        parse_config(document(placement={"given": {"slices": slices}}), HERE)
    slices[0] = {"gpu": 0, "models": [{"model": "resnet5"}]}
    with pytest.raises(ConfigError, match="there is no model 'resnet5'; did you mean resnet50"):
        parse_config(document(placement={"given": {"slices": slices}}), HERE)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([["resnet5"]], "there is no model 'resnet5'; did you mean resnet50"),
        ([["bert"]], "model resnet50 is in no group"),
    ],
)
def test_groups_name_the_models_of_the_file(groups: list[list[str]], said: str) -> None:
    models = [dict(document()["models"][0]), {**document()["models"][0], "name": "bert"}]
    with pytest.raises(ConfigError, match=said):
        parse_config(document(models=models, placement={"usher": {"groups": groups}}), HERE)


@pytest.mark.parametrize("cut", ["stages", "ranks"])
def test_groups_need_no_model_that_has_gpus_of_its_own(cut: str) -> None:
    loader = {"python": "serving:Large", cut: 2}
    models = [model(), model("large", loader=loader)]
    placement = {"usher": {"groups": [["resnet50"]]}}
    assert parse_config(document(*models, placement=placement), HERE).placement.name == "usher"


def test_another_placement_can_be_asked_for() -> None:
    assert len(parse_config(document(), HERE).place("exclusive").slices) == 1


def test_the_device_model_is_that_of_the_gpu_type() -> None:
    device = parse_config(document(), HERE).device_model("generic")
    assert device.exec_ms(Running(ModelId("resnet50"), 1)) == pytest.approx(6.125)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("igniter", "iGniter coefficients"), ("gpulet", "L2 and DRAM bandwidths"), ("sm", "SM utilisation")],
)
def test_a_profile_that_lacks_what_interference_needs_is_refused_by_name(name: str, missing: str) -> None:
    config = parse_config(document(cluster={"gpus": 1, "interference": name}), HERE)
    with pytest.raises(ConfigError, match=f"^cluster.interference: .*model resnet50 has no {missing}"):
        config.device_model("generic")


def test_interference_is_a_name_or_a_name_with_options() -> None:
    plain = parse_config(document(cluster={"gpus": 1, "interference": "sm"}), HERE)
    assert plain.interference == PolicyChoice("sm", {"strength": 1.0})
    half = document(cluster={"gpus": 1, "interference": {"sm": {"strength": 0.5}}})
    config = parse_config(half, HERE, source="a.yaml")
    assert config.interference == PolicyChoice("sm", {"strength": 0.5})
    assert ("cluster.interference.sm.strength", 0.5, "a.yaml") in config_origins(config)
    assert ("cluster.interference", "none", "default") in config_origins(parse_config(document(), HERE))


# ---------------------------------------------------------------- what is wrong


def without(entry: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in keys}


A_NODE = {"host": "a", "gpus": 1}


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({}, "models: is missing"),
        (without(document(), "cluster"), "cluster: is missing"),
        (document() | {"models": []}, "models: is empty"),
        (document() | {"model": []}, "model: unknown key; did you mean models?"),
        (document(model(slo=3)), "models[0].slo: unknown key; did you mean slo_ms?"),
        (document(without(model(), "slo_ms")), "models[0].slo_ms: is missing"),
        (document(model(slo_ms="fast")), "models[0].slo_ms: is 'fast'; it must be a number"),
        (document(model(slo_ms=0)), "models[0].slo_ms: is 0; it must be a number, over 0 and at most"),
        (document(model(slo_ms=math.inf)), "models[0].slo_ms: is inf"),
        (document(model(slo_ms=math.nan)), "models[0].slo_ms: is nan"),
        (document(model(slo_ms=True)), "models[0].slo_ms: is True; it must be a number"),
        (document(model("a b")), "models[0].name: is 'a b'; it must be 1 to 128 letters"),
        (document(model(name=5)), "models[0].name: is 5; it must be text: write it in quotes"),
        (document(model("a"), model("a")), "models[1].name: 'a' is already the name at models[0].name"),
        (document(model(rate_rps=-1)), "models[0].rate_rps: is -1"),
        (document(model(rate_rps=[])), "models[0].rate_rps: has no steps"),
        (document(model(rate_rps=[[0, 1], [0, 2]])), "models[0].rate_rps[1]: starts at 0 s"),
        (document(model(rate_rps=[[5, 1], [3, 2]])), "models[0].rate_rps[1]: starts at 3 s"),
        (document(model(rate_rps=[[0, 1, 2]])), "models[0].rate_rps[0]: "),
        (
            document(model(rate_rps=5), rate_rps=9, popularity={"zipf": 1}),
            "models[0].rate_rps: the file has a",
        ),
        (
            document(without(model(), "rate_rps"), rate_rps=9),
            "rate_rps: a total must be shared out: of one model",
        ),
        (document(model(weight=1)), "models[0].weight: this model has its own rate_rps"),
        (
            document(model(weight=1), popularity={"zipf": 1}),
            "models[0].weight: popularity is given too",
        ),
        (document(popularity={"zipf": 1}), "models[0].rate_rps: popularity is given too; use one of the two"),
        (
            document(cluster={"gpus": 1, "frontends": [{"host": "a", "listen": {"page": "127.0.0.1:1"}}]}),
            "cluster.frontends[0].listen.page: unknown key; there is client, http, metrics",
        ),
        (document(listen={"pages": "127.0.0.1:1"}), "listen.pages: unknown key; did you mean page?"),
        (document(popularity={"zipf": -1}), "popularity.zipf: is -1"),
        (document(popularity={"zip": 1}), "popularity.zip: unknown key; did you mean zipf?"),
        (document(model(arrival={"process": "poison"})), "did you mean poisson?"),
        (document(model(arrival={"process": "gamma"})), "models[0].arrival.shape: is missing"),
        (document(model(arrival={"process": "gamma", "shape": 0})), "models[0].arrival.shape: is 0"),
        (document(model(arrival={"shape": 2})), "models[0].arrival.shape: belongs to process: gamma"),
        (document(model(arrival={"process": "trace"})), "models[0].arrival.path: is missing"),
        (
            document(model(arrival={"process": "trace", "path": "x.csv"})),
            "models[0].arrival.path: there is no file /nowhere/x.csv",
        ),
        (document(without(model(), "profile")), "models[0]: has neither profile nor loader"),
        (document(model(profile={})), "models[0].profile: is empty; it must be exactly one of"),
        (document(model(profile=LINE | {"ref": "x"})), "models[0].profile: has alpha_ms, beta_ms and"),
        (document(model(profile={"alpha_ms": 1})), "models[0].profile.beta_ms: is missing"),
        (document(model(profile={"alfa_ms": 1})), "profile.alfa_ms: unknown key; did you mean alpha_ms?"),
        (document(model(profile={"alpha_ms": 1, "beta_ms": 5, "max_batch": 0})), "max_batch: is 0"),
        (document(model(profile={"table": {}})), "models[0].profile: the table is empty"),
        (document(model(profile={"table": {2: 5}})), "the table has a hole"),
        (document(model(profile={"table": {1: None}})), "it must be a number"),
        (document(model(profile={"table": {1: 5, 2: 4}})), "batch 2 takes 4 ms, less than batch 1"),
        (document(model(profile={"ref": "thesis-v100/resnet"})), "did you mean thesis-v100/resnet50"),
        (document(model(profile={"ref": "absent.json"})), "absent.json cannot be read"),
        (document(model(profile={"by_type": {}})), "by_type: is empty"),
        (
            document(model(profile={"by_type": {"v100": LINE, "t4": {"tabel": {}}}})),
            "models[0].profile.by_type.t4.tabel: unknown key; did you mean table?",
        ),
        (
            document(model(profile={"table": {1: 2.0, 2: "x", 4: "y"}})),
            "models[0].profile.table[2]: is 'x'; it must be a number",
        ),
        (
            document(model(profile={"by_type": {"v100": {"by_type": {"t4": LINE}}}})),
            "models[0].profile.by_type.v100: by_type cannot be inside by_type",
        ),
        (document(model(loader={})), "models[0].loader: must have exactly one of zoo and python"),
        (document(model(loader={"zoo": "torchvison", "arch": "x"})), "did you mean torchvision?"),
        (document(model(loader={"zoo": "torchvision"})), "models[0].loader.arch: is missing"),
        (
            document(model(loader={"zoo": "transformers"})),
            "models[0].loader: must have exactly one of arch",
        ),
        (
            document(model(loader={"zoo": "torchvision", "arch": "x", "config": {"a": 1}})),
            "models[0].loader.config: belongs to zoo: transformers, not to torchvision",
        ),
        (
            document(model(loader={"python": "x:Y", "channels_last": True})),
            "models[0].loader.channels_last: belongs to zoo: torchvision, not to python",
        ),
        (
            document(model(loader={"zoo": "torchvision", "arch": "x", "dtype": "fp16"})),
            "models[0].loader.dtype: there is no 'fp16'",
        ),
        (
            document(model(loader={"zoo": "transformers", "weights": "w", "config": {"a": 1}})),
            "models[0].loader.config: goes with arch",
        ),
        (
            document(model(loader={"zoo": "transformers", "arch": "bert", "sequence_length": 0})),
            "models[0].loader.sequence_length: is 0",
        ),
        (document(model(loader={"python": "x"})), 'must be like "package.module:Class"'),
        (document(model(loader={"python": "x:Y", "top_k": 0})), "models[0].loader.top_k: is 0"),
        (document(model(memory_mb=-1)), "models[0].memory_mb: is -1"),
        (
            document(model(run_limit_ms=0)),
            "models[0].run_limit_ms: is 0; it must be a number, over 0 and at most",
        ),
        (document(model(run_limit_ms=2e9)), "models[0].run_limit_ms: is 2,000,000,000; it must be"),
        (document(model(priority=10)), "models[0].priority: is 10; it must be from 0 to 9"),
        (document(model(priority=-1)), "models[0].priority: is -1; it must be from 0 to 9"),
        (document(model(priority=1.5)), "models[0].priority: is 1.5; it must be a whole number"),
        (document(cluster={}), "cluster: must have exactly one of gpus"),
        (document(cluster={"gpus": 1, "nodes": [A_NODE]}), "cluster: must have exactly one of gpus"),
        (document(cluster={"gpus": 0}), "cluster: has no GPU"),
        (document(cluster={"gpus": -1}), "cluster.gpus: is -1"),
        (document(cluster={"nodes": []}), "cluster: has no GPU"),
        (document(cluster={"nodes": [A_NODE, A_NODE]}), "cluster.nodes[1].host: 'a' is already"),
        (document(cluster={"nodes": [A_NODE], "gpu_type": "t4"}), "cluster.gpu_type: goes with gpus"),
        (document(cluster={"nodes": [A_NODE | {"device": "tpu"}]}), "cluster.nodes[0].device: there is no"),
        (document(cluster={"nodes": [A_NODE | {"memory_gb": 0}]}), "cluster.nodes[0].memory_gb: is 0"),
        (document(cluster={"gpus": 1, "frontends": 0}), "cluster.frontends: is 0"),
        (document(cluster={"gpus": 1, "network": {"control_ms": -1}}), "cluster.network.control_ms: is -1"),
        (document(cluster={"gpus": 1, "network": {"jitter_ms": math.inf}}), "cluster.network.jitter_ms: is"),
        (document(cluster={"gpus": 1, "interference": "igniterr"}), "did you mean igniter?"),
        (document(cluster={"gpus": 1, "interference": {"sm": {"strength": -1}}}), "sm.strength is -1"),
        (document(cluster={"gpus": 1, "interference": {"igniter": {"strength": 1}}}), "unknown option"),
        (document(batching="defered"), "batching: there is no discipline 'defered'; did you mean deferred?"),
        (document(batching={"deferred": {"drop": "maybe"}}), "batching.deferred.drop is 'maybe'"),
        (document(batching={"deferred": {"dorp": "simple"}}), "did you mean drop?"),
        (document(batching={"eager": {}, "deferred": {}}), "batching: must be one name"),
        (document(batching="timeout"), "batching.timeout: must have exactly one of"),
        (document(batching={"timeout": {"timeout_ms": 1, "slo_percent": 1}}), "must have exactly one of"),
        (document(batching={"fixed": {"batch": 0}}), "batching.fixed.batch is 0"),
        (document(batching={"fixed": {"batch": 2.5}}), "batching.fixed.batch is 2.5; it must be a whole"),
        (document(batching={"nexus": {"epoch_s": 0}}), "batching.nexus.epoch_s is 0"),
        (document(batching={"clockwork": {"x": 0}}), "batching.clockwork.x: unknown option; there is sizes"),
        (document(batching={"clockwork": {"sizes": "any"}}), "must be one of powers_of_two, all"),
        (document(placement={"exclusive": {"x": 0}}), "unknown option; there are none here"),
        (document(batching=3), "batching: is 3; it must be text or a mapping"),
        (document(placement="symfony"), "did you mean symphony?"),
        (document(placement={"given": {}}), "placement.given.slices must list the slices"),
        (
            document(listen={"client": "127.0.0.1:1"}),
            "it must be like tcp://127.0.0.1:8000 or ipc:///run/tenuto/clients",
        ),
        (document(listen={"client": "tcp://127.0.0.1"}), "it must end in :PORT"),
        (document(listen={"client": "tcp://0.0.0.0:1"}), "name the interface's own address"),
        (document(listen={"client": "tcp://0x0:1"}), "name the interface's own address"),
        (document(listen={"page": "0.0:8004"}), "name the interface's own address"),
        (document(listen={"metrics": "127.1:1"}), "name the interface's own address, or 127.0.0.1"),
        (document(listen={"client": "tcp://a..b:1"}), "each part of a host's name has 1 to 63 characters"),
        (document(listen={"metrics": f"{'x' * 64}.org:1"}), "each part of a host's name has 1 to 63"),
        (
            document(listen={"client": "tcp://10.0.0.1:1"}),
            "others can reach: that needs keys (tenuto keys create",
        ),
        (document(security={"keys": 5}), "security.keys"),
        (document(security={"key": "x"}), "security.key: unknown key; did you mean keys?"),
        (document(listen={"http": "127.0.0.1:70000"}), "listen.http: is '127.0.0.1:70000'"),
        (
            document(listen={"http": "127.0.0.1:1", "grpc": "127.0.0.1:1"}),
            "listen.grpc: is '127.0.0.1:1', where",
        ),
        (
            document(listen={"http": "10.0.0.1:8000"}),
            "others can reach: that needs cluster.gateway.token_file",
        ),
        (
            {**document(), "cluster": {"gpus": 1, "gateway": {"tls_key": "k"}}},
            "both of tls_certificate and tls_key",
        ),
        ({**document(), "cluster": {"gpus": 1, "gateway": {"tokens": "t"}}}, "gateway.tokens: unknown key"),
        (document(seed=-1), "seed: is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_mistake_is_refused_with_its_place_and_what_would_be_right(
    written: dict[str, Any], reason: str
) -> None:
    assert reason in refused(written)


def test_there_is_a_gateway_where_the_file_says_so() -> None:
    assert not parse_config(document(), HERE).gateway.is_wanted
    only_http = parse_config(document(listen={"http": "127.0.0.1:0"}), HERE).gateway
    assert (only_http.http, only_http.grpc, only_http.request_bytes_max) == ("127.0.0.1:0", None, 64 << 20)
    settings = {"token_file": "t", "model_control": True, "request_mb": 1}
    both = parse_config({**document(), "cluster": {"gpus": 1, "gateway": settings}}, HERE).gateway
    assert (both.http, both.grpc) == ("127.0.0.1:8000", "127.0.0.1:8001")
    assert (both.token_file, both.is_model_control, both.request_bytes_max) == (HERE / "t", True, 1 << 20)
    reachable = {**document(listen={"http": "10.0.0.1:8000"}), "cluster": {"gpus": 1, "gateway": settings}}
    assert parse_config(reachable, HERE).gateway.http == "10.0.0.1:8000"


# ---------------------------------------------------------------- files


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    written = document(model(rate_rps=[[0, 10], [5, 20]]), batching={"deferred": {"drop": "simple"}})
    for name in ("c.json", "c.yaml"):
        (tmp_path / name).write_text(json.dumps(written))
    assert (
        load_config(tmp_path / "c.json").models[0].rate_steps
        == load_config(tmp_path / "c.yaml").models[0].rate_steps
    )


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.yaml", "", "is empty"),
        ("c.yaml", "- 1", "holds list"),
        ("c.yaml", "a: [1", "cannot be parsed"),
        ("c.yaml", "seed: 1\nseed: 2\n", "key 'seed' is there twice"),
        ("c.yaml", "x: !!python/object/apply:os.getcwd []", "cannot be parsed"),
        ("c.yaml", "? [1]\n: 2\n", "unknown key|cannot be parsed|missing"),
        ("c.json", '{"seed": 1, "seed": 2}', "key 'seed' is there twice"),
        ("c.json", "[" * 100_000, "nested too deeply|cannot be parsed"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    name: str, text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_config(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(tmp_path / "c.yaml")


def test_yaml_reads_an_exponent_without_a_dot_as_a_number(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps(document()).replace('"rate_rps": 100', '"rate_rps": 1e4'))
    assert load_config(tmp_path / "c.yaml").rate_rps == 10_000


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(document(batching={"deferred": {"drop": "simple"}})))
    origins = {place: (value, origin) for place, value, origin in config_origins(load_config(path))}
    assert origins["models[0].slo_ms"] == (25.0, str(path))
    assert origins["models[0].profile.alpha_ms"] == (1.053, str(path))
    assert origins["models[0].priority"] == (0, "default")
    assert origins["cluster.network.control_ms"] == (0.0, "default")
    assert origins["batching"] == ("deferred", str(path))
    assert origins["batching.deferred.drop"] == ("simple", str(path))
    assert origins["batching.deferred.pick"] == ("lowest_id", "default")
    assert origins["placement"] == ("symphony", "default")


# ---------------------------------------------------------------- properties


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACES: tuple[tuple[str | int, ...], ...] = (
    ("models",), ("models", 0), ("models", 0, "slo_ms"), ("models", 0, "rate_rps"), ("models", 0, "profile"),
    ("models", 0, "profile", "max_batch"), ("models", 0, "arrival"), ("models", 0, "loader"), ("cluster",),
    ("cluster", "gpus"), ("cluster", "nodes"), ("cluster", "network"), ("batching",), ("placement",), ("listen",),
    ("popularity",), ("rate_rps",), ("seed",), ("models", 0, "extra"), ("extra",),
)  # fmt: skip


@given(st.sampled_from(PLACES), JUNK)
def test_junk_anywhere_is_a_config_error_or_a_configuration(place: tuple[str | int, ...], junk: Any) -> None:
    written: Any = copy.deepcopy(document())
    inner = written
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = junk
    try:
        config = parse_config(written, HERE)
    except ConfigError:
        return
    if len(config.gpus) <= 64:
        config.place()


@given(
    st.floats(0, 1e6),
    st.lists(st.floats(0.001, 100), min_size=1, max_size=20),
    st.one_of(st.none(), st.floats(0, 3)),
)
def test_a_shared_total_is_kept(total: float, weights: list[float], zipf: float | None) -> None:
    written = [(None, None if zipf is not None else weight) for weight in weights]
    rates = shared_rates(total, zipf, written)
    assert math.fsum(steps[0][1] for steps, _ in rates) == pytest.approx(total, rel=1e-9, abs=1e-9)
    if zipf is not None:
        assert [steps[0][1] for steps, _ in rates] == sorted((s[0][1] for s, _ in rates), reverse=True)


# ---------------------------------------------------------------- schedulers


@pytest.mark.parametrize(
    ("given", "count"),
    [(1, 1), (3, 3), ([{"host": "a"}], 1), ([{"host": "a"}, {"host": "b", "standby": True}], 2)],
)
def test_schedulers_are_a_number_or_a_list(given: object, count: int) -> None:
    cluster = {"gpus": 1, "schedulers": given}
    assert parse_config(document(cluster=cluster), HERE, source="f.yaml").schedulers == count


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (0, "from 1 to 16"),
        (17, "from 1 to 16"),
        ([], "from 1 to 16"),
        ([{"host": "a", "standby": True}], "the first one is the active one"),
        ([{"host": "a"}, {"host": "b"}], "only the first one is active"),
        ([{"host": "a", "stand_by": True}], "standby"),
    ],
)
def test_wrong_schedulers_are_refused_with_what_would_be_right(given: object, what: str) -> None:
    assert what in refused(document(cluster={"gpus": 1, "schedulers": given}))
