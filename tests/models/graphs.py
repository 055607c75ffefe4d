"""A detector and two classifiers, small enough for a CPU; `tests/models/glue.py` goes between them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn, no_grad, randn

from tests.models.glue import BOXES, CROP, SIDE


class Detector:
    """The picture's first row says how many cars and people there are: the boxes lie along the diagonal, cars first."""

    def load(self, device: str) -> None:
        self.device = device

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        picture = batch["picture"]
        places = (picture.new_tensor(range(BOXES))).expand(picture.shape[0], BOXES)
        cars, people = picture[:, 0, 0, :1].round(), picture[:, 0, 0, 1:2].round()
        kinds = (places >= cars).float()
        kinds[places >= cars + people] = -1.0
        return {"boxes": places * 4, "kinds": kinds, "cars": cars[:, 0].int()}

    def example(self) -> Mapping[str, Tensor]:
        return {"picture": randn(1, SIDE, SIDE)}


class Classifier:
    """One convolution and a mean, with weights of its own seed."""

    def load(self, device: str) -> None:
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).to(device)

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        with no_grad():
            return {"scores": self.net(batch["crop"])}

    def example(self) -> Mapping[str, Tensor]:
        return {"crop": randn(1, CROP, CROP)}


class Mean:
    """What a classifier cannot hide: the mean of what it was given."""

    def load(self, device: str) -> None:
        self.device = device

    def infer(self, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return {"mean": batch["crop"].mean(dim=(1, 2, 3))}

    def example(self) -> Mapping[str, Tensor]:
        return {"crop": randn(1, CROP, CROP)}
