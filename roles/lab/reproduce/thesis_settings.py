"""The settings of the thesis' placement experiments, as data: models, rates, SLO and number of V100s.

Source of all: Elvinger, 'Towards resource and interference-aware scheduling of ML workloads', master thesis
505, ETH Zurich, 2024. Every experiment has one SLO for all its models; clients send with exponential gaps
(listing 4.4), and the machines are V100s of 16 GB, profiled in table A.1 (`thesis-v100/…`).

Figures 5.6 and 5.9 say alexnet in their captions where the text of section 5.4.1 says mobilenet_v2; only
the text agrees with the goodput the thesis states. Figure 5.8's caption repeats that of 5.10; its text
revisits figure 5.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric.ids import ModelId
from policies.batching.registry import discipline_options
from policies.placement.common.base import GpuSlot, PlacedModelInput, Profiles
from policies.placement.registry import placement_options
from profiles.gpu import gpu_profile
from profiles.store import shipped_profile
from roles.config.cluster import ClusterConfig, ModelConfig, NodeConfig, PolicyChoice, placed_models

GPU_TYPE = "v100"
PROFILE_FAMILY = "thesis-v100"
MAX_WAIT_MS = 100.0
"""The thesis router sends a batch that is not full after this long (section 4.3.3)."""

AO_GROUPS = (("densenet121", "efficientnet_b7", "vgg19"), ("alexnet", "resnet50"))
"""Usher's groups of the vision models under which figure 6.2 comes out: one of three pairings of least weight."""

WAO_GROUPS = (("alexnet", "resnet50", "vgg19"), ("densenet121", "efficientnet_b7"))
"""WAO-Usher's, under which figure 6.3 comes out."""


@dataclass(frozen=True, slots=True)
class FigureSetting:
    """One bar of a figure. `loads` is (model, requests per second) in the thesis' order.

    `source` names figure and section; `requests_per_model` is how many each client sends, None where the
    thesis does not say.
    """

    name: str
    source: str
    loads: tuple[tuple[str, float], ...]
    slo_ms: float
    gpu_count: int
    requests_per_model: int | None = None

    @property
    def rates_rps(self) -> Mapping[str, float]:
        """The target submission rate by model."""
        return dict(self.loads)

    @property
    def ideal_rps(self) -> float:
        """What arrives in total: the figures' bar `ideal`."""
        return sum(rate_rps for _, rate_rps in self.loads)

    def config(
        self,
        placement: str = "symphony",
        options: Mapping[str, Any] | None = None,
        batching: str = "fixed",
        strength: float = 1.0,
        family: str = PROFILE_FAMILY,
    ) -> ClusterConfig:
        """The setting as a cluster of emulated V100s with interference `sm` of that strength.

        `family` is where the profiles come from. Raises ConfigError where the options are wrong.
        """
        models = tuple(
            ModelConfig(
                ModelId(model),
                self.slo_ms,
                rate_steps=((0.0, rate_rps),),
                profile=shipped_profile(f"{family}/{model}"),
            )
            for model, rate_rps in self.loads
        )
        return ClusterConfig(
            models,
            (NodeConfig("node0", self.gpu_count, GPU_TYPE, gpu_profile(GPU_TYPE).memory_bytes),),
            batching=PolicyChoice(batching, discipline_options(batching, {})),
            placement=PolicyChoice(placement, placement_options(placement, options or {})),
            interference=PolicyChoice("sm", {"strength": strength}),
        )

    def inputs(self) -> tuple[PlacedModelInput, ...]:
        """The models as a placement policy takes them."""
        return placed_models(self.config().models)

    def gpus(self) -> tuple[GpuSlot, ...]:
        """The V100s, all on one node (the thesis uses a single VM with up to eight)."""
        return self.config().gpus

    def profiles(self) -> Profiles:
        """Table A.1 of the setting's models."""
        return self.config().profiles()


def _equal(models: tuple[str, ...], rate_rps: float) -> tuple[tuple[str, float], ...]:
    return tuple((model, rate_rps) for model in models)


FIGURE_5_5 = FigureSetting(
    "5.5", "figure 5.5, section 5.4.1", _equal(("alexnet", "gpt2", "resnet50", "t5"), 400), 200, 4
)
"""Usher's order within a group; figure 5.8 has the same setting with AO-MILP."""

FIGURE_5_6 = FigureSetting(
    "5.6",
    "figure 5.6, section 5.4.1 (text)",
    _equal(("resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"), 400),
    300,
    4,
)
"""Usher's order across groups; figure 5.9 has the same setting with AO-MILP."""

FIGURE_5_7 = FigureSetting(
    "5.7",
    "figure 5.7, section 5.4.2",
    _equal(("resnet50", "alexnet", "mobilenet_v2", "bert"), 500),
    200,
    4,
)
"""Usher's replication factor; figure 5.10 has the same setting with AO-MILP."""

VISION_MODELS = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")

FIGURE_6_1 = tuple(
    FigureSetting(
        f"6.1/{gpu_count}-gpus", "figure 6.1, section 6.2.1", _equal(VISION_MODELS, 500), 200, gpu_count, 4000
    )
    for gpu_count in range(1, 7)
)
"""Five vision models on one to six GPUs."""

FIGURE_6_10 = tuple(
    FigureSetting(
        f"6.10/{gpu_count}-gpus",
        "figure 6.10, section 6.2.2",
        _equal(("resnet50", "mobilenet_v2", "bert", "gpt2"), 300),
        300,
        gpu_count,
        2400,
    )
    for gpu_count in range(1, 9)
)
"""Two vision and two language models on one to eight GPUs."""

FIGURE_6_15 = tuple(
    FigureSetting(
        f"6.15/{slo_ms}-ms/{total_rps}-rps",
        "figure 6.15, section 6.3",
        _equal(VISION_MODELS, total_rps / len(VISION_MODELS)),
        slo_ms,
        4,
    )
    for slo_ms in (150, 250, 350)
    for total_rps in (1000, 2000, 3000, 4000, 5000)
)
"""Total rate by SLO, five vision models on four GPUs, the rate shared equally."""

JUDGED = (*FIGURE_6_1, *FIGURE_6_10, *FIGURE_6_15)
"""The settings on which placement policies are compared with each other."""
