"""Policies of other distributions, found by their metadata on sys.path as an installed one's would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement
from policies.placement.registry import placement_options, placement_policy
from profiles.model import LinearProfile

MODULE = """
from policies.placement.common.base import Placement, PlannedModel, PlannedSlice

def last_gpu(models, gpus, profiles, current=None):
    return Placement((PlannedSlice(gpus[-1].index, None, tuple(PlannedModel(m.model_id) for m in models)),))

class Nth:
    def __init__(self, gpu=0):
        self.gpu = gpu
    def place(self, models, gpus, profiles, current=None):
        return Placement((PlannedSlice(self.gpu, 50.0, tuple(PlannedModel(m.model_id) for m in models)),))

class Dreamer:
    def place(self, models, gpus, profiles, current=None):
        return Placement((PlannedSlice(0, None, (PlannedModel("unicorn"),)),))

fifth = Nth(5)
a_number = 7

def nothing(models, gpus, profiles, current=None):
    return []

def raises(models, gpus, profiles, current=None):
    return models[0].slo_ms / (gpus[0].index - gpus[0].index)

def mixed(models, gpus, profiles, current=None):
    return Placement((1, 2))

class Refuses:
    def __init__(self, gpu=0):
        raise RuntimeError("no licence")
"""

POINTS = {
    "last": "their_policies:last_gpu",
    "nth": "their_policies:Nth",
    "fifth": "their_policies:fifth",
    "dreamer": "their_policies:Dreamer",
    "number": "their_policies:a_number",
    "nothing": "their_policies:nothing",
    "broken": "their_missing_module:Policy",
    "absent": "their_policies:Absent",
    "misspelt": "their_misspelt_module:Policy",
    "raises": "their_policies:raises",
    "mixed": "their_policies:mixed",
    "refuses": "their_policies:Refuses",
    "symphony": "their_policies:last_gpu",
}


@pytest.fixture(autouse=True)
def _distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_policies.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "their_misspelt_module.py").write_text("def Policy(:\n", encoding="utf-8")
    info = tmp_path / "their_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    points = "\n".join(f"{name} = {value}" for name, value in POINTS.items())
    (info / "entry_points.txt").write_text(f"[tenuto.placement]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def place(name: str, options: dict[str, object] | None = None) -> Placement:
    model = PlacedModelInput(ModelId("a"), slo_ms=25, rate_rps=100)
    gpus = [GpuSlot(index, "generic", 2**34, NodeId("local"), index) for index in range(3)]
    profiles = {(model.model_id, "generic"): LinearProfile(1, 5)}
    return placement_policy(name, options).place([model], gpus, profiles)


def test_a_function_is_a_policy() -> None:
    assert place("last").gpus_used == (2,)


def test_a_class_takes_the_options_of_the_configuration() -> None:
    assert place("nth").gpus_used == (0,)
    assert place("nth", {"gpu": 1}).gpus_used == (1,)
    assert placement_options("nth", {"gpu": 1}) == {"gpu": 1}


def test_our_own_name_stays_ours() -> None:
    assert place("symphony").gpus_used == (0, 1, 2)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("lats", {}, "did you mean last"),
        ("last", {"gpu": 1}, "takes no options"),
        ("nth", {"gpus": 1}, "does not take these options.*gpus"),
        ("fifth", {}, "planned for GPU 5, which is not there"),
        ("dreamer", {}, "placed 'unicorn', which is not a model here"),
        ("number", {}, "neither a policy nor a function"),
        ("nothing", {}, "returned list, not a Placement"),
        ("broken", {}, "their_missing_module:Policy of their-policies raised ModuleNotFoundError: "),
        ("absent", {}, "their_policies:Absent of their-policies raised AttributeError: "),
        ("misspelt", {}, "raised SyntaxError: "),
        ("mixed", {}, "their_policies:mixed of their-policies raised AttributeError: 'int' object"),
        ("refuses", {"gpu": 1}, r"raised RuntimeError: no licence \(their_policies.py, line 31\)"),
        ("raises", {}, r"raised ZeroDivisionError: .*\(their_policies.py, line 24\)"),
    ],
)
def test_what_cannot_be_is_said_with_whose_it_is(
    name: str, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        place(name, options)


def test_two_offers_of_one_name_are_refused(tmp_path: Path) -> None:
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tenuto.placement]\nlast = their_policies:Nth\n")
    with pytest.raises(ConfigError, match=r"'last' is offered twice, by .*rival"):
        place("last")


def test_the_policy_in_the_documentation_works(tmp_path: Path) -> None:
    document = Path(__file__).resolve().parents[4] / "docs" / "guides" / "own-policy.md"
    example = document.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "nearest.py").write_text(example, encoding="utf-8")
    info = tmp_path / "nearest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nearest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tenuto.placement]\nnearest = nearest:Nearest\n")
    placed = place("nearest", {"gpu": 1})
    assert placed.gpus_used == (1,)
    assert [model.model_id for model in placed.slices[0].models] == ["a"]
