"""Operator graphs out of torch: what runs, in which order, what it keeps alive; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from fabric.errors import ProfileError
from profiles.estimator.graph import OperatorGraph
from profiles.estimator.operators import work_of
from profiles.profilers.operator_graph import fake_tensors, operator_graph

IMAGE = {"image": torch.zeros(3, 16, 16)}
WORDS = {"words": torch.zeros(8, 32)}


def traced(
    infer: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], example: Mapping[str, Tensor], size: int = 4
) -> OperatorGraph:
    with fake_tensors():
        return operator_graph(infer, example, size)


def launched(graph: OperatorGraph) -> list[str]:
    return [graph.calls[work.call].name for work in work_of(graph.calls) if work.pieces]


def test_a_small_net_is_its_operators_in_order() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(),
        nn.Linear(8 * 16 * 16, 10),
    ).eval()  # fmt: skip
    graph = traced(lambda batch: {"out": net(batch["image"])}, IMAGE)
    assert launched(graph) == ["conv2d", "batch_norm", "relu_", "linear"]
    assert graph.calls[0].inputs[:2] == ((4, 3, 16, 16), (8, 3, 3, 3))
    assert graph.output_bytes == 4 * 4 * 10
    assert graph.inputs_bytes == [4 * 4 * 3 * 16 * 16]
    parameters = [*net.parameters(), *(one for name, one in net.named_buffers() if "batches" not in name)]
    assert sorted(graph.weights_bytes) == sorted(4 * one.numel() for one in parameters)


def test_stride_and_groups_of_a_convolution_are_seen() -> None:
    net = nn.Conv2d(3, 6, 3, stride=2, groups=3).eval()
    (call,) = traced(lambda batch: {"out": net(batch["image"])}, IMAGE).calls
    assert set(call.options["stride"]) == {2}
    assert call.options["groups"] == (3,)


def test_a_graph_grows_with_its_batch_and_its_weights_do_not() -> None:
    net = nn.Linear(32, 64).eval()
    small, large = (traced(lambda batch: {"out": net(batch["words"])}, WORDS, size) for size in (1, 100))
    assert large.calls[0].outputs == ((100, 8, 64),)
    assert small.weights_bytes == large.weights_bytes
    assert large.allocations[0].size_bytes == 100 * small.allocations[0].size_bytes


def test_tied_weights_are_there_once() -> None:
    shared = nn.Linear(32, 32, bias=False).eval()
    graph = traced(lambda batch: {"out": shared(shared(batch["words"]))}, WORDS)
    assert graph.weights_bytes == [4 * 32 * 32]


def test_a_result_lives_as_long_as_python_holds_it() -> None:
    def infer(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = batch["words"] + 1  # 0, until the sum
        passing = kept * 2  # 1, until it is replaced
        passing = passing.tanh()  # 2
        return {"out": kept + passing}  # 3, outlives the batch

    graph = traced(infer, WORDS)
    assert [(one.born, one.dies) for one in graph.allocations] == [(0, 3), (1, 2), (2, 3), (3, None)]
    assert [one.reads for one in graph.calls] == [(), (0,), (1,), (0, 2)]


def test_views_run_nothing_and_copies_do() -> None:
    def infer(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        turned = batch["words"].transpose(1, 2)
        return {"out": turned.contiguous().view(-1).relu()}

    assert launched(traced(infer, WORDS)) == ["clone", "relu"]


def test_what_torch_takes_apart_is_seen_in_parts() -> None:
    def infer(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"out": torch.einsum("bij,bkj->bik", batch["words"], batch["words"])}

    assert "bmm" in launched(traced(infer, WORDS))


def test_no_values_are_computed_however_large_the_batch() -> None:
    graph = traced(lambda batch: {"out": batch["words"].exp()}, WORDS, 1 << 30)  # 1 TiB
    assert graph.allocations[0].size_bytes == (1 << 30) * 8 * 32 * 4


@pytest.mark.parametrize(
    "infer",
    [
        lambda batch: {"out": batch["words"] if batch["words"].sum() > 0 else -batch["words"]},
        lambda batch: {"out": batch["words"][: int(batch["words"].max().item())]},
        lambda batch: {"out": batch["words"].nonzero()},
        lambda batch: {"out": torch.unique(batch["words"])},
    ],
    ids=["branch", "item", "nonzero", "unique"],
)
def test_a_path_that_depends_on_values_is_refused(
    infer: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
) -> None:
    with pytest.raises(ProfileError, match="depends on values"):
        traced(infer, WORDS)


def test_half_precision_is_refused_with_its_reason() -> None:
    net = nn.Linear(32, 8).eval().to(torch.bfloat16)
    graph = traced(lambda batch: {"out": net(batch["words"].to(torch.bfloat16))}, WORDS)
    with pytest.raises(ProfileError, match="half precision"):
        work_of(graph.calls)


def test_an_operator_of_the_users_own_without_a_rule_for_shapes_is_refused() -> None:
    @torch.library.custom_op("tenuto_tests::doubled", mutates_args=())
    def doubled(words: Tensor) -> Tensor:
        return 2 * words

    with pytest.raises(ProfileError, match=r"does not run on shapes alone .*fake impl"):
        traced(lambda batch: {"out": doubled(batch["words"])}, WORDS)

    @doubled.register_fake
    def _(words: Tensor) -> Tensor:
        return torch.empty_like(words)

    graph = traced(lambda batch: {"out": doubled(batch["words"])}, WORDS)
    (work,) = [work for work in work_of(graph.calls) if work.pieces]
    assert work.basis == "roofline"
