"""Run times of operators, learned from kernel records: three ways that are always compared.

`Roofline`: the roofline times one constant for each class, at least the class's floor. `Stacked`: Usher's stack (section 3.2) of lasso,
kernel ridge, gradient boosting and boosted trees under a ridge on their out-of-fold predictions, of the logarithm of the time.
`Bounded`: boosted trees of the time over (roofline + floor), so that sizes and GPUs never seen continue
along the roofline instead of along nothing; never faster than the roofline.

scikit-learn is imported only here and only when something is trained; it trains in seconds, so no trained
model is stored.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fabric.errors import ProfileError
from profiles.estimator.features import Array, paper_features, ratio_features
from profiles.estimator.gpus import GpuSpec
from profiles.estimator.records import KernelRecord
from profiles.estimator.work import ELEMENTWISE_OPS, ROW_OPS, Work

SEED: Final = 1
FLOOR_QUANTILE: Final = 0.002
KERNEL_RIDGE_ROWS: Final = 1_500  # its cost grows with the cube
FOLDS: Final = 3
CONV_BOUND: Final = 0.25  # Winograd's F(4 x 4, 3 x 3) needs a quarter of the products
RATIO_MAX: Final = 1e3
ROUNDS: Final = 300


@dataclass(frozen=True, slots=True)
class Sample:
    """A record with the GPU it was measured on."""

    record: KernelRecord
    gpu: GpuSpec


def one_thread() -> AbstractContextManager[object]:
    """Inside, training and predicting use one thread: a server's other cores are not the estimator's."""
    from threadpoolctl import threadpool_limits  # noqa: PLC0415  comes with scikit-learn

    limited: AbstractContextManager[object] = threadpool_limits(limits=1)
    return limited


def group_of(op: str) -> str:
    """Classes that one regressor learns together."""
    if op in ELEMENTWISE_OPS:
        return "elementwise"
    return "rows" if op in ROW_OPS else op


class Floors:
    """What the smallest operators of a class take: the launch, not the arithmetic. In ms, by GPU and class."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        seen: dict[tuple[str, str], list[float]] = {}
        for sample in samples:
            seen.setdefault((sample.gpu.records or "", sample.record.work.op), []).append(
                sample.record.latency_ms
            )
        self._known = {key: float(np.quantile(values, FLOOR_QUANTILE)) for key, values in seen.items()}

    def of(self, op: str, gpu: GpuSpec) -> float:
        """Of another GPU, the mean of those that are known; of an unknown class, the mean of the elementwise ones."""
        exact = self._known.get((gpu.records or "", op))
        if exact is not None:
            return exact
        same = [value for (_, known), value in self._known.items() if known == op]
        alike = same or [value for (_, known), value in self._known.items() if known in ELEMENTWISE_OPS]
        if not alike:
            raise ProfileError(f"no record says what launching {op} takes")
        return sum(alike) / len(alike)


class Regressor(ABC):
    """Of one group of classes."""

    @abstractmethod
    def fit(self, samples: Sequence[Sample], floors: Floors) -> None:
        """Learn."""

    @abstractmethod
    def predict_ms(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        """[works]."""


class Roofline(Regressor):
    """The baseline: a constant, the median of the logarithm of time over roofline where the launch does not hide it."""

    def __init__(self) -> None:
        self._floors: Floors | None = None
        self._factors: dict[str, float] = {}

    def fit(self, samples: Sequence[Sample], floors: Floors) -> None:
        """A constant for each class."""
        self._floors = floors
        ratios: dict[str, list[float]] = {}
        for sample in samples:
            work = sample.record.work
            ratio = sample.record.latency_ms / sample.gpu.roofline_ms(work)
            is_hidden = sample.record.latency_ms < 2 * floors.of(work.op, sample.gpu)
            ratios.setdefault(work.op, []).append(-ratio if is_hidden else ratio)
        self._factors = {
            op: float(np.median([one for one in values if one > 0] or [abs(one) for one in values]))
            for op, values in ratios.items()
        }

    @property
    def known(self) -> frozenset[str]:
        """Classes with records."""
        return frozenset(self._factors)

    def factor(self, op: str) -> float:
        """Time over roofline of a class. Raises ProfileError for one without records."""
        if op not in self._factors:
            raise ProfileError(f"there are no records of {op}")
        return self._factors[op]

    def predict_ms(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        """At least the floor of its class."""
        assert self._floors is not None, "fitted first"
        return np.array(
            [
                max(self._floors.of(work.op, gpu), self.factor(work.op) * gpu.roofline_ms(work))
                for work in works
            ]
        )


class Bounded(Regressor):
    """Boosted trees of log(time / (roofline + floor))."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self._rounds = rounds
        self._floors: Floors | None = None
        self._trees: Any = None

    def fit(self, samples: Sequence[Sample], floors: Floors) -> None:
        """One fit over the samples of all GPUs given."""
        from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415  an extra, and slow to import

        self._floors = floors
        features, base_ms = self._seen(samples)
        latency_ms = np.array([sample.record.latency_ms for sample in samples])
        self._trees = HistGradientBoostingRegressor(
            loss="absolute_error",
            max_iter=self._rounds,
            learning_rate=0.1,
            max_leaf_nodes=31,
            min_samples_leaf=8,
            random_state=SEED,
        )
        self._trees.fit(features, np.log(latency_ms / base_ms))

    def predict_ms(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        """Never under the roofline, which for 3 x 3 convolutions is Winograd's."""
        floors = self._floors_ms(works, gpu)
        roofline_ms = np.array([gpu.roofline_ms(work) for work in works])
        features = ratio_features(works, gpu, floors)
        ratio = np.clip(np.exp(self._trees.predict(features)), 1 / RATIO_MAX, RATIO_MAX)
        bound = roofline_ms * np.array([CONV_BOUND if work.op == "conv" else 1.0 for work in works])
        return np.maximum(ratio * (roofline_ms + floors), bound)

    def _seen(self, samples: Sequence[Sample]) -> tuple[Array, Array]:
        parts, bases = [], []
        for gpu in dict.fromkeys(sample.gpu for sample in samples):
            works = [sample.record.work for sample in samples if sample.gpu == gpu]
            floors = self._floors_ms(works, gpu)
            parts.append(ratio_features(works, gpu, floors))
            bases.append(np.array([gpu.roofline_ms(work) for work in works]) + floors)
        return np.concatenate(parts), np.concatenate(bases)

    def _floors_ms(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        assert self._floors is not None, "fitted first"
        of = {op: self._floors.of(op, gpu) for op in {work.op for work in works}}
        return np.array([of[work.op] for work in works])


class Stacked(Regressor):
    """Usher's stack on Usher's features and the GPU's type, of the logarithm of the time."""

    def __init__(self) -> None:
        self._members: list[Any] = []
        self._top: Any = None
        self._ops: list[str] = []
        self._gpus: list[str] = []

    def fit(self, samples: Sequence[Sample], floors: Floors) -> None:  # noqa: ARG002  it has no notion of a floor
        """Members on all samples; the ridge on what members said of samples they had not seen."""
        from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415  an extra
        from sklearn.linear_model import RidgeCV  # noqa: PLC0415
        from sklearn.model_selection import KFold  # noqa: PLC0415

        self._ops = sorted({sample.record.work.op for sample in samples})
        self._gpus = sorted({sample.gpu.gpu_type for sample in samples})
        features = np.concatenate([self._features([sample.record.work], sample.gpu) for sample in samples])
        target = np.log([sample.record.latency_ms for sample in samples])
        out_of_fold = np.zeros((len(samples), len(_members())))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            for known, unseen in KFold(FOLDS, shuffle=True, random_state=SEED).split(features):
                for column, member in enumerate(_members()):
                    fitted = _fit(member, features[known], target[known])
                    out_of_fold[unseen, column] = fitted.predict(features[unseen])
            self._members = [_fit(member, features, target) for member in _members()]
        self._top = RidgeCV(alphas=(1e-3, 1e-1, 10.0)).fit(out_of_fold, target)

    def predict_ms(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        """What the ridge makes of its members."""
        features = self._features(works, gpu)
        said = np.column_stack([member.predict(features) for member in self._members])
        return np.exp(np.clip(self._top.predict(said), -20.0, 20.0))

    def _features(self, works: Sequence[Work], gpu: GpuSpec) -> Array:
        of_op = np.array([[float(work.op == op) for op in self._ops] for work in works])
        of_gpu = np.array([[float(gpu.gpu_type == one) for one in self._gpus]] * len(works))
        return np.column_stack([paper_features(works), of_op, of_gpu])


def _members() -> list[Any]:
    from sklearn.ensemble import (  # noqa: PLC0415  an extra
        GradientBoostingRegressor,
        HistGradientBoostingRegressor,
    )
    from sklearn.kernel_ridge import KernelRidge  # noqa: PLC0415
    from sklearn.linear_model import LassoCV  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler  # noqa: PLC0415

    return [
        make_pipeline(StandardScaler(), PolynomialFeatures(2), LassoCV(cv=3, random_state=SEED)),
        make_pipeline(StandardScaler(), KernelRidge(kernel="rbf", alpha=1e-2, gamma=0.2)),
        GradientBoostingRegressor(n_estimators=150, max_depth=5, subsample=0.5, random_state=SEED),
        HistGradientBoostingRegressor(max_iter=300, min_samples_leaf=8, random_state=SEED),
    ]


def _fit(member: Any, features: Array, target: Array) -> Any:
    is_cubic = hasattr(member, "steps") and type(member.steps[-1][1]).__name__ == "KernelRidge"
    if is_cubic and len(target) > KERNEL_RIDGE_ROWS:
        drawn = np.random.default_rng(SEED).choice(len(target), KERNEL_RIDGE_ROWS, replace=False)
        features, target = features[drawn], target[drawn]
    return member.fit(features, target)


VARIANTS: Final[Mapping[str, type[Regressor]]] = {
    "roofline": Roofline,
    "stacked": Stacked,
    "bounded": Bounded,
}


class TimeRegressor:
    """A regressor of one variant for every group of classes, trained on records of one or more GPUs."""

    def __init__(self, samples: Sequence[Sample], variant: str = "bounded", rounds: int = ROUNDS) -> None:
        make = (lambda: Bounded(rounds)) if variant == "bounded" else VARIANTS[variant]
        self.floors = Floors(samples)
        by_group: dict[str, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(group_of(sample.record.work.op), []).append(sample)
        self._by_group: dict[str, Regressor] = {}
        for group, members in sorted(by_group.items()):
            self._by_group[group] = make()
            self._by_group[group].fit(members, self.floors)

    def predict_ms(self, works: Sequence[Work], gpu: GpuSpec) -> list[float]:
        """In the order of the works. Raises ProfileError for a class without a single record."""
        found = [0.0] * len(works)
        places: dict[str, list[int]] = {}
        for place, work in enumerate(works):
            places.setdefault(group_of(work.op), []).append(place)
        for group, of_group in places.items():
            regressor = self._by_group.get(group)
            if regressor is None:
                raise ProfileError(f"there are no records of {group}")
            said = regressor.predict_ms([works[place] for place in of_group], gpu)
            for place, value in zip(of_group, said, strict=True):
                found[place] = float(value)
        return found
