"""The 1,797 handwritten digits of 8 × 8 pixels that scikit-learn carries with it."""

from __future__ import annotations

import numpy as np
import torch

from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.extra import extra

TEST_SIZE = 360


def read_digits() -> Dataset:
    """The digits, shuffled once and for all; pixels are 0 to 16."""
    bunch = extra("sklearn.datasets", "scikit-learn", "the data set digits").load_digits()
    images, labels = bunch.images.astype(np.uint8)[..., None], bunch.target
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    # The largest pixel is 16, so a network sees numbers between 0 and 1.
    return Dataset.of(
        "digits", (images[train], labels[train]), (images[test], labels[test]), [0], [16], tuple("0123456789")
    )
