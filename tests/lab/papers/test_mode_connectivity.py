"""Principal angles between the weights of two networks."""

import numpy as np
import pytest
import torch
from mode_connectivity import principal_angles
from scipy.linalg import subspace_angles
from torch import nn

from intertwine.errors import InputError


def test_004_L19_angles_between_the_main_directions_of_weights() -> None:
    a, b = (
        nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4))
        for _ in range(2)
    )
    found = {one.weight: one for one in principal_angles(a, b, k=3)}
    assert list(found) == ["0.weight", "3.weight", "5.weight"]
    for name, one in found.items():
        u, v = [], []
        for model in (a, b):
            left, _, right = np.linalg.svd(model.get_parameter(name).detach().double().numpy())
            u.append(left[:, :3])
            v.append(right[:3].T)
        for got, spaces in ((one.left, u), (one.right, v)):
            assert got == pytest.approx(np.degrees(subspace_angles(*spaces)), abs=1e-6)
    assert all(one.left == pytest.approx([0] * 3, abs=1e-6) for one in principal_angles(a, a, k=3))


def test_004_L19_directions_that_are_not_determined_are_named() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        b.weight.copy_(torch.eye(4))
    (one,) = principal_angles(a, b, k=2)
    assert (one.left, one.right) == (None, None)
    assert one.reason == (
        "in the second network singular value 2 is 1 and the next 1, so the first 2 directions are not determined"
    )
    assert one.to_dict()["reason"] == one.reason
    assert principal_angles(b, b, k=9)[0].k == 4  # all four directions: both spaces are the whole space
    with torch.no_grad():
        a.weight.fill_(torch.inf)
    assert principal_angles(a, b)[0].reason == "the weight of the first network is not finite"
    with pytest.raises(InputError, match="k=0 main directions were asked for; give 1 or more"):
        principal_angles(a, b, 0)


def test_five_directions_are_compared_by_default() -> None:
    a, b = nn.Linear(9, 9), nn.Linear(9, 9)
    assert {one.k for one in principal_angles(a, b)} == {5}
