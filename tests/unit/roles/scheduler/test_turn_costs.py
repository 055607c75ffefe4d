"""What one turn of a scheduler costs grows with what there is, not with its square: counted, without a clock."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId, SliceId
from roles.scheduler.dispatch.start_times import StartTimes

FEW, MANY = 50, 200


class CountedId(str):
    """A name that counts how often it is looked at."""

    __slots__ = ()
    looked_at = 0

    def __eq__(self, other: object) -> bool:
        CountedId.looked_at += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        CountedId.looked_at += 1
        return str.__hash__(self)


@pytest.mark.parametrize("has_started", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_model_is_looked_for_among_its_own_starts_alone(*, is_shared: bool, has_started: bool) -> None:
    """Each directory asks for all models, of which one slice hosts each, or all."""

    def looked_at(count: int) -> int:
        starts = StartTimes()
        models = [ModelId(CountedId(f"m{k}")) for k in range(count)]
        hosted = [models] if is_shared else [[one] for one in models]
        for k, of_one in enumerate(hosted):
            if has_started:
                starts.begin(SliceId(f"first-{k}"), of_one, 0.0)
                starts.end(SliceId(f"first-{k}"), models, 40.0)
            starts.begin(SliceId(f"second-{k}"), of_one, 100.0)
        CountedId.looked_at = 0
        coming = [starts.coming_in_ms(one, 110.0) for one in models]
        assert coming == [30.0 if has_started else None] * count
        return CountedId.looked_at

    assert looked_at(MANY) <= looked_at(FEW) * MANY // FEW
