"""Groups of models whose compute and memory requirements balance (thesis section 5.2.2).

Each round pairs the groups by a minimum-weight matching of maximum cardinality and merges the pairs, until no
two groups together have at most four models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from fabric.errors import ConfigError
from fabric.ids import ModelId

GROUP_SIZE_MAX = 4  # the Usher paper's
Group = tuple[ModelId, ...]


def balanced_groups(compute_less_memory: Mapping[ModelId, int]) -> list[Group]:
    """The groups of all models; their order says nothing. A model's value is its mean Creq - Mreq in units.

    Groups and their members are sorted by name. Raises ConfigError where networkx is not installed.
    """
    groups: list[Group] = [(model_id,) for model_id in sorted(compute_less_memory)]
    while pairs := _matching(groups, compute_less_memory):
        merged = {place for pair in pairs for place in pair}
        kept = [group for place, group in enumerate(groups) if place not in merged]
        groups = sorted([*kept, *(tuple(sorted(groups[i] + groups[j])) for i, j in pairs)])
    return groups


def _matching(groups: Sequence[Group], compute_less_memory: Mapping[ModelId, int]) -> list[tuple[int, int]]:
    """The pairs of places to merge, empty when nothing can be.

    Where all models lie on one side of Creq = Mreq every pairing of the same models weighs the same, so ties
    are the rule. They are settled by names: the first group gets the first partner it can, then the next. Each
    group is a digit of one long number below the weight; networkx computes exactly on whole numbers.
    """
    if len(groups) < 2:
        return []
    try:
        import networkx as nx  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ConfigError(
            "placement: Usher's grouping needs networkx (the extra `plan`); give the groups instead"
        ) from error
    count = len(groups)
    balance = [sum(compute_less_memory[model_id] for model_id in group) for group in groups]
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(count))
    base = count + 1
    for i, j in combinations(range(count), 2):
        if len(groups[i]) + len(groups[j]) <= GROUP_SIZE_MAX:
            # Digits: the earlier group's is its partner's place, the later one's 0, that of a group left out
            # is `count`; less `count` each, as a matching adds up only the edges it has.
            tie = (j - count) * base ** (count - 1 - i) - count * base ** (count - 1 - j)
            graph.add_edge(i, j, weight=abs(balance[i] + balance[j]) * base ** (count + 1) + tie)
    return sorted((min(pair), max(pair)) for pair in nx.min_weight_matching(graph))


def given_groups(value: Any, where: str) -> tuple[Group, ...]:
    """Groups that a user wrote, as lists of names; ConfigError with `where` for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{where} must list the groups: [[bert, gpt2], [resnet50]]")
    groups = []
    for place, group in enumerate(value):
        if not isinstance(group, Sequence) or isinstance(group, str) or not group:
            raise ConfigError(f"{where}[{place}] is {group!r}; it must list the names of its models")
        if not all(isinstance(name, str) for name in group):
            raise ConfigError(f"{where}[{place}] is {group!r}; it must list the names of its models")
        if len(group) > GROUP_SIZE_MAX:
            raise ConfigError(
                f"{where}[{place}] has {len(group)} models; Usher's groups have at most {GROUP_SIZE_MAX}"
            )
        groups.append(tuple(ModelId(name) for name in group))
    named = [model_id for group in groups for model_id in group]
    for model_id in named:
        if named.count(model_id) > 1:
            raise ConfigError(f"{where}: model {model_id} is listed twice; it belongs to one group")
    return tuple(groups)
