"""Interference factors by hand, from the numbers of the papers and of their authors' measurements."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId
from profiles.device_model import DeviceModel
from profiles.interference import Interference, Running, interference_named
from profiles.model import TableProfile
from profiles.store import shipped_data, shipped_profile


def of_family(name: str, family: str, *models: str, **options: float) -> Interference:
    profiles = {ModelId(model): shipped_profile(f"{family}/{model}") for model in models}
    return interference_named(name, profiles, family, options)


def running(model: str, batch_size: int, share_percent: float | None = None) -> Running:
    return Running(ModelId(model), batch_size, share_percent)


# ---------------------------------------------------------------- gpulet, section 4.2


def test_gpulet_on_the_2080ti_by_hand() -> None:
    """UTIL.CSV, each utilisation times its own share: resnet50/8 at 40 % beside vgg16/16 at 60 %.

    Own L2 0.2580461 · 0.4 = 0.1032184, DRAM 0.5132453 · 0.4 = 0.2052981;
    the other's L2 0.3052081 · 0.6 = 0.1831249, DRAM 0.6083938 · 0.6 = 0.3650363.
    0.1129084 · 0.1032184 + 0.7159599 · 0.1831249 + 0.3548659 · 0.2052981 + 0.0882038 · 0.3650363 + 0.8953694
    = 0.0116542 + 0.1311101 + 0.0728533 + 0.0321976 + 0.8953694 = 1.1431846.
    """
    model = of_family("gpulet", "gpulet-2080ti", "resnet50", "vgg16", "lenet1")
    factor = model.slowdown(running("resnet50", 8, 40), [running("vgg16", 16, 60)])
    assert factor == pytest.approx(1.1431846, abs=1e-6)


def test_gpulet_on_the_v100_by_hand() -> None:
    """The fit over the 750 pairs, in percent as measured at the share: alexnet/2 at 20 % beside resnet50/2 at 80 %.

    -2.67297e-5 · 5.01612 - 5.24785e-5 · 14.09419 - 3.84216e-4 · 6.87782 + 1.221933e-3 · 9.17727 + 0.0817750
    = -0.0001341 - 0.0007396 - 0.0026426 + 0.0112140 + 0.0817750 = 0.0894727.
    """
    model = of_family("gpulet", "gpulet-v100", "alexnet", "resnet50")
    factor = model.slowdown(running("alexnet", 2, 20), [running("resnet50", 2, 80)])
    assert factor == pytest.approx(1.0894727, abs=1e-6)


def test_gpulet_takes_the_worst_of_several_models_and_never_less_than_1() -> None:
    model = of_family("gpulet", "gpulet-2080ti", "resnet50", "vgg16", "lenet1")
    small, large = running("lenet1", 1, 20), running("vgg16", 16, 60)
    own = running("resnet50", 8, 40)
    assert model.slowdown(own, [small, large]) == model.slowdown(own, [large])
    # lenet/1 beside lenet/1: utilisations of at most a few percent cannot lift c5 = 0.8954 to 1.
    assert model.slowdown(small, [small]) == 1.0


# ---------------------------------------------------------------- sm, thesis sections 6.2.1 and 6.2.2

ALL = ("resnet50", "alexnet", "bert", "densenet121", "efficientnet_b7", "vgg19")


def test_sm_a_cap_below_what_a_batch_needs_by_hand() -> None:
    """resnet50/4 needs 36.26 %; at 17.55 % the thesis saw about 4 times 6.8 ms, mostly from the cap.

    1 + 2.4 (36.26 / 17.55 - 1) = 1 + 2.4 · 1.066097 = 3.558632, 24.1987 ms.
    bert/4 needs 96.82 %; alone at 31.83 % it took about 180 ms instead of 34.1.
    1 + 2.4 (96.82 / 31.83 - 1) = 1 + 2.4 · 2.041784 = 5.900283, 201.2 ms.
    """
    model = of_family("sm", "thesis-v100", *ALL)
    assert model.slowdown(running("resnet50", 4, 17.55), []) == pytest.approx(3.558632, abs=1e-6)
    assert model.slowdown(running("bert", 4, 31.83), []) == pytest.approx(5.900283, abs=1e-6)
    assert model.slowdown(running("resnet50", 4, 36.26), []) == 1.0


def test_sm_a_share_that_the_profile_was_measured_at_costs_nothing_besides() -> None:
    """At 25 % of 36.26 % the table says 20 ms for 6.78: a cap's own factor would count that again, to 41.6 ms.

    What a neighbour costs stays: beside alexnet/4 (47.07 %) at 50 % 1 + 0.25 · 0.4707 = 1.117675.
    """
    profiles = {ModelId(name): shipped_profile(f"thesis-v100/{name}") for name in ("resnet50", "alexnet")}
    whole = profiles[ModelId("resnet50")]
    columns = {25.0: {1: 20.0, 4: 20.0}, 100.0: {1: 6.78, 4: 6.78}}
    profiles[ModelId("resnet50")] = TableProfile(columns, usage=whole.usage)
    device = DeviceModel(profiles, interference_named("sm", profiles, "v100"))
    assert device.exec_ms(running("resnet50", 4, 25)) == 20.0
    assert device.exec_table(ModelId("resnet50"), 25)[3] == 20.0
    beside_ms = device.exec_ms(running("resnet50", 4, 25), [running("alexnet", 4, 50)])
    assert beside_ms == pytest.approx(20.0 * 1.117675, abs=1e-6)


def test_sm_neighbours_without_a_cap_by_hand() -> None:
    """resnet50/4 (36.26 %) beside alexnet/4 (47.07 %): together below 100, so only chance meetings count.

    1 + 0.3626 · 0.4707 = 1.170676, 7.96 ms; the thesis saw about 8 (section 6.2.1, observation 4).
    bert/4 (96.82 %) beside it too: 0.3626 + 0.4707 + 0.9682 = 1.8015 > 1 + 0.3626 · 1.4389 = 1.521745.
    """
    model = of_family("sm", "thesis-v100", *ALL)
    own, alexnet, bert = running("resnet50", 4), running("alexnet", 4), running("bert", 4)
    assert model.slowdown(own, [alexnet]) == pytest.approx(1.170676, abs=1e-6)
    assert model.slowdown(own, [alexnet, bert]) == pytest.approx(1.8015, abs=1e-9)


def test_sm_densenet_bears_600_requests_a_second_beside_efficientnet_but_not_800() -> None:
    """Thesis section 6.3, observation 1: 832.59 requests a second alone; 54.10 % beside 43.55 %.

    1 + 0.541 · 0.4355 = 1.235606: 673.8 requests a second.
    """
    profiles = {ModelId(model): shipped_profile(f"thesis-v100/{model}") for model in ALL}
    device = DeviceModel(profiles, interference_named("sm", profiles, "v100"))
    beside_ms = device.exec_ms(running("densenet121", 16), [running("efficientnet_b7", 8)])
    rps = 1000 * 16 / beside_ms
    assert rps == pytest.approx(832.59 / 1.235606, abs=1e-3)
    assert 600 < rps < 800


def test_sm_a_capped_neighbour_takes_no_more_than_its_share() -> None:
    """resnet50/4 at 20 % beside bert/4 (96.82 %) at 30 %.

    Its own cap: 1 + 2.4 (36.26 / 20 - 1) = 2.9512; the neighbour: 1 + 0.2 · 0.3 = 1.06; together 3.128272.
    """
    model = of_family("sm", "thesis-v100", *ALL)
    factor = model.slowdown(running("resnet50", 4, 20), [running("bert", 4, 30)])
    assert factor == pytest.approx(3.128272, abs=1e-6)


def test_sm_utilisation_between_batches_and_where_the_table_dips() -> None:
    """alexnet: 83.79 % at batch 8, 63.49 at 16, 96.24 at 32: at 16 it keeps 83.79, at 24 it is halfway, 90.015.

    Beside bert/4 (96.82 %): 1 + 0.8379 · 0.9682 = 1.811255 and 1 + 0.90015 · 0.9682 = 1.871525. A batch of 1 needs
    the 47.07 % of batch 4: 1 + 0.4707 · 0.9682 = 1.455732.
    """
    model = of_family("sm", "thesis-v100", *ALL)
    bert = [running("bert", 4)]
    assert model.slowdown(running("alexnet", 16), bert) == pytest.approx(1.811255, abs=1e-6)
    assert model.slowdown(running("alexnet", 24), bert) == pytest.approx(1.871525, abs=1e-6)
    assert model.slowdown(running("alexnet", 1), bert) == pytest.approx(1.455732, abs=1e-6)


@pytest.mark.parametrize(("strength", "factor"), [(0.0, 1.0), (0.5, 1.085338), (1.5, 1.256014)])
def test_sm_strength_scales_what_a_slowdown_has_over_1(strength: float, factor: float) -> None:
    """0.170676 of resnet50/4 beside alexnet/4, times the strength."""
    model = of_family("sm", "thesis-v100", *ALL, strength=strength)
    assert model.slowdown(running("resnet50", 4), [running("alexnet", 4)]) == pytest.approx(factor, abs=1e-6)


def test_the_schedulers_table_and_the_device_agree_on_a_share() -> None:
    profiles = {ModelId("resnet50"): shipped_profile("thesis-v100/resnet50")}
    device = DeviceModel(profiles, interference_named("sm", profiles, "v100"))
    table = device.exec_table(ModelId("resnet50"), 17.55)
    assert table[3] == pytest.approx(4000 / 589.78 * 3.558632, abs=1e-4)
    assert [device.exec_ms(running("resnet50", b, 17.55)) for b in (1, 4, 100)] == [
        table[0],
        table[3],
        table[99],
    ]
    assert list(table) == sorted(table)
    assert device.exec_table(ModelId("resnet50")) is profiles[ModelId("resnet50")].exec_table()


# ---------------------------------------------------------------- iGniter, section 3.1


def test_igniter_by_hand() -> None:
    """ResNet-50 (batch 8, 30 %) beside AlexNet (batch 4, 10 %), coefficients as fitted by the authors' code.

    Alone, ResNet-50 is active (-0.0175147·64 + 58.264481·8 - 0.0118622) / 30.344858 + 1.9095017 = 17.233 ms and
    AlexNet (0.0041535·16 + 8.7115844·4 + 23.7360689) / 10.0555205 + 0.346011 = 6.178 ms, 647.4 requests a second.
    AlexNet's L2 use is 0.00309205·647.4 + 2.0295711 = 4.0314 %. Two workloads delay each of 80 launches by
    0.00475065·2 - 0.00902243 = 0.00047888 ms more. Power is far below 300 W. PCIe: 8·606112 B at 1e7 B/ms.
    """
    active_ms = (-0.01751465847840498 * 64 + 58.26448107536653 * 8 - 0.01186224173116413) / (
        30 + 0.3448578170739411
    ) + 1.9095016556382816
    other_ms = (0.0041535110364039765 * 16 + 8.711584427319755 * 4 + 23.736068893391828) / (
        10 + 0.05552046527586755
    ) + 0.3460109946044254
    cache = 0.0030920459222511304 * (4000 / other_ms) + 2.0295711449248537
    pcie_ms, sched_ms = 8 * 606112 / 1e7, 0.07381620007640247
    alone_ms = sched_ms + active_ms + pcie_ms
    beside_ms = sched_ms + 80 * 0.0004788811 + active_ms * (1 + 0.0021630605425848664 * cache) + pcie_ms
    model = of_family("igniter", "igniter-v100", "resnet50", "alexnet")
    factor = model.slowdown(running("resnet50", 8, 30), [running("alexnet", 4, 10)])
    assert factor == pytest.approx(beside_ms / alone_ms, rel=1e-7)
    assert 1.005 < factor < 1.02


def test_igniter_predicts_the_750_measured_pairs_within_4_percent_on_average() -> None:
    """Measured by its authors on a V100; the paper's own claim is 1.5 to 5.9 % on its test pairs."""
    models = ("alexnet", "resnet50", "vgg19", "ssd")
    profiles = {ModelId(model): shipped_profile(f"igniter-v100/{model}") for model in models}
    device = DeviceModel(profiles, interference_named("igniter", profiles, "v100"))
    errors = []
    for row in shipped_data("igniter_gpulet_profiles_v100")["colocated_pairs"]:
        name_a, name_b, batch_a, batch_b, share_a, measured_a, measured_b = row
        a, b = running(name_a, batch_a, share_a), running(name_b, batch_b, 100 - share_a)
        errors += [abs(device.exec_ms(a, [b]) / measured_a - 1), abs(device.exec_ms(b, [a]) / measured_b - 1)]
    assert len(errors) == 1500
    assert sum(errors) / len(errors) <= 0.04
