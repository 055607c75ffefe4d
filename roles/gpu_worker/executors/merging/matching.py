"""Which operators of several traced nets become super-operators (Usher section 3.4).

Two that are merged need the inputs of both, so pairs must not cross: were the first of one net merged with the last of another one, and the
other way round, each would wait for the other. The paper matches first and leaves pairs out afterwards. Here the heaviest set of pairs
in the order of both nets is found at once, as two texts are aligned; a pair weighs as many entries as it has in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from roles.gpu_worker.executors.merging.blocks import Block, Weight, common_block
from roles.gpu_worker.executors.merging.tracing import Operator

APART_MAX: Final = 2
"""How far apart in their nets two merged operators are, counted in operators: the paper merges what starts at about the same time."""


@dataclass(frozen=True, slots=True)
class Use:
    """An operator of a net that a step runs, its number there, and where the step's block is in its weight."""

    operator: Operator
    position: int
    row: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What runs together: an operator of each of these nets, by the nets' numbers. One that is alone has its whole weight as the block."""

    uses: dict[int, Use]
    block: Weight


def matched(nets: Sequence[Sequence[Operator]]) -> list[Step]:
    """The operators of all nets as steps, in an order that every net has them in."""
    steps = [_alone(0, position, operator) for position, operator in enumerate(nets[0])]
    for number, operators in enumerate(nets[1:], 1):
        steps = _joined(steps, number, operators)
    return steps


def _alone(number: int, position: int, operator: Operator) -> Step:
    return Step({number: Use(operator, position)}, operator.weight)


def _joined(steps: Sequence[Step], number: int, operators: Sequence[Operator]) -> list[Step]:
    found = {
        (place, position): block
        for place, step in enumerate(steps)
        for position, operator in enumerate(operators)
        if min(abs(use.position - position) for use in step.uses.values()) <= APART_MAX
        and (block := _block(step, operator)) is not None
    }
    after: list[Step] = []
    place = position = 0
    for pair in [*_aligned(len(steps), len(operators), found), (len(steps), len(operators))]:
        after += steps[place : pair[0]]
        after += (_alone(number, at, operators[at]) for at in range(position, pair[1]))
        if pair in found:
            after.append(_merged(steps[pair[0]], number, Use(operators[pair[1]], pair[1]), found[pair]))
        place, position = pair[0] + 1, pair[1] + 1
    return after


def _block(step: Step, operator: Operator) -> Block | None:
    """What the step and the operator have in common; what several share already, they share wholly with another one or not at all."""
    first = next(iter(step.uses.values())).operator
    if first.kind != operator.kind:
        return None
    block = common_block(step.block, operator.weight)
    if block is None:
        return None
    is_whole = block.size == step.block.bits.size
    if operator.is_grouped and not (is_whole and block.size == operator.weight.bits.size):
        return None
    return block if is_whole or len(step.uses) == 1 else None


def _merged(step: Step, number: int, use: Use, block: Block) -> Step:
    row, column = block.first
    entries = step.block.tensor
    if block.size < step.block.bits.size:
        entries = entries[row : row + block.height]
        if use.operator.is_linear:
            entries = entries[:, column : column + block.width]
    uses = {
        other: Use(one.operator, one.position, one.row + row, one.column + column)
        for other, one in step.uses.items()
    }
    uses[number] = Use(use.operator, use.position, *block.second)
    return Step(uses, Weight(entries, step.block.is_by_rows))


def _aligned(steps: int, operators: int, found: dict[tuple[int, int], Block]) -> list[tuple[int, int]]:
    """The heaviest of the pairs found of which none cross, in order."""
    best = [[0] * (operators + 1) for _ in range(steps + 1)]
    for place in reversed(range(steps)):
        for position in reversed(range(operators)):
            without = max(best[place + 1][position], best[place][position + 1])
            block = found.get((place, position))
            best[place][position] = max(without, block.size + best[place + 1][position + 1] if block else 0)
    chosen: list[tuple[int, int]] = []
    place = position = 0
    while place < steps and position < operators:
        if best[place][position] == best[place + 1][position]:
            place += 1
        elif best[place][position] == best[place][position + 1]:
            position += 1
        else:
            chosen.append((place, position))
            place, position = place + 1, position + 1
    return chosen
