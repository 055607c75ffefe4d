"""What a margin should come to, worked out from everything that happened (ADR 0120), and not step by step.

`needed_ms[i]` is what answer i took at the end of its way. Whoever plans keeps back the mean and a margin: an answer is
late by what it needed more. A constant margin is right where what it would be widened by, over all answers, is what it
would be narrowed by: a late one widens by what it was late, at most 1 ms, unless it needed more than may ever be kept
back (a quarter of the budget); one in time narrows by 1/400 ms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LATE_SHARE = 1 / 400
SHARE_MAX = 0.25

Needed = NDArray[np.float64]


def least_kept_ms(budget_ms: float) -> float:
    """A frontend keeps a tenth back of what a budget has beyond 10 ms."""
    return max(0.0, 0.1 * (budget_ms - 10.0))


def right_kept_ms(needed_ms: Needed, budget_ms: float, least_ms: float) -> float:
    """What to keep back of every budget, by bisection over the whole history."""
    low_ms, high_ms = float(needed_ms.mean()), SHARE_MAX * budget_ms
    if low_ms >= high_ms:
        return high_ms
    for _ in range(60):
        kept_ms = (low_ms + high_ms) / 2
        late_ms = needed_ms - max(kept_ms, least_ms)
        is_taught = (late_ms > 0) & (late_ms + kept_ms <= SHARE_MAX * budget_ms)
        widened_ms = np.minimum(late_ms, 1.0)[is_taught].sum()
        narrowed_ms = LATE_SHARE * (late_ms <= 0).sum()
        if widened_ms > narrowed_ms:
            low_ms = kept_ms
        else:
            high_ms = kept_ms
    return max((low_ms + high_ms) / 2, least_ms)


def late_share(needed_ms: Needed, kept_ms: float | Needed) -> float:
    """The share of answers that needed more than was kept back."""
    return float((needed_ms > kept_ms).mean())


def newest_mean_ms(took_ms: Needed, start_ms: float | None) -> float:
    """The mean that forgets: a plain one of the first ten, then each older one counts 0.9 of the next."""
    all_ms = took_ms if start_ms is None else np.concatenate([[start_ms], took_ms])
    first, later = all_ms[:10], all_ms[10:]
    weights = 0.9 ** np.arange(len(later))[::-1]
    return float(first.mean() * 0.9 ** len(later) + 0.1 * (weights * later).sum())
