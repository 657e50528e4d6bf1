"""Arguments of every kind: what is plainly meant is taken, what would do nothing or something else is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import intertwine
from intertwine.connect.connectivity import Connectivity
from intertwine.errors import InputError, MismatchError
from intertwine.inspect.top_images import top_images

it: Any = intertwine  # the arguments are of wrong types on purpose
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
DATA = [(X, torch.tensor([0, 1] * 4))]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval()


def normed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()


def weights(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(weights(one), weights(other), strict=True))


# -- refused -----------------------------------------------------------------------------------------------------------

NAN = float("nan")
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rotation of integers": (lambda: it.rotation(3, 0.5, 0, dtype=torch.int64), "in torch.int64, which holds no frac"),
    "rotation by a text": (lambda: it.rotation(3, "a", 0), "The power alpha='a' of a rotation"),
    "fingerprint to 0": (lambda: it.fingerprint(net(), X, precision=0), "to a precision of 0"),
    "fingerprint to -1": (lambda: it.fingerprint(net(), X, precision=-1), "to a precision of -1"),
    "fingerprint to nan": (lambda: it.fingerprint(net(), X, precision=NAN), "to a precision of nan"),
    "tolerance nan": (lambda: it.equivalent(net(), net(), X, tol=NAN), "tol=nan was asked for"),
    "tolerance -1": (lambda: it.equivalent(net(), net(), X, tol=-1), "tol=-1 was asked for. It is a relative"),
    "guided batch": (lambda: it.guided_backprop(net(), "1", 0, X, batch=-1), "batch=-1 images were to pass"),
    "top batch": (lambda: top_images(net(), "1", X, 0, batch=0), "batch=0 images were to pass"),
    "guided unit": (lambda: it.guided_backprop(net(), "1", 0.5, X), r"units=0\.5 was asked for at '1'"),
    "memory": (lambda: it.barrier(net(), net(), DATA, memory=-1), "memory=-1 was given. It is in GiB"),
    "points": (lambda: it.barrier(net(), net(), DATA, points="5"), "points must be at least 3.* found '5'"),
    "alphas": (lambda: it.connectivity(net(), net(), DATA, alphas="a"), r"alphas are the weights.* found \['a'\]"),
    "bias": (lambda: it.fold(net(), X, bias="x"), "bias='x' was asked for"),
    "beta": (lambda: it.complexity(net(), X, beta="a"), "beta='a' was asked for. It is a share"),
    "max_ratio": (lambda: it.fold(net(), X, max_ratio="a"), "max_ratio='a' was asked for"),
    "base": (lambda: it.canonicalize(net(), X, base=-2), "base=-2 was given, but the lexicographic order has none"),
    "nodesort base": (lambda: it.canonicalize(net(), X, order="nodesort", base=NAN), "a base above 1, nan was given"),
    "one network": (lambda: it.merge(net()), "A list of networks was expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_do_nothing_or_something_else_is_refused(name: str, unchecked: None) -> None:
    call, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        call()


# -- taken -------------------------------------------------------------------------------------------------------------

HALVES: list[Any] = [torch.tensor(0.5), np.float32(0.5), np.array(0.5), np.float64(0.5)]


@pytest.mark.parametrize("half", HALVES, ids=lambda half: type(half).__name__)
def test_numbers_of_torch_and_numpy_are_numbers(half: Any) -> None:
    assert same(it.interpolate(net(0), net(1), half), it.interpolate(net(0), net(1), 0.5))
    assert torch.equal(it.rotation(3, half, 0), it.rotation(3, 0.5, 0))
    assert it.connectivity(net(0), net(1), DATA, half).alphas == (0.5,)


def test_several_powers_may_be_a_tensor() -> None:
    assert torch.equal(it.rotation(3, torch.tensor([0.25, 0.5]), 0), it.rotation(3, [0.25, 0.5], 0))


@pytest.mark.parametrize("unit", [np.int64(1), torch.tensor(1), [np.int64(1)], torch.tensor([1])])
def test_units_may_be_numbers_of_torch_and_numpy(unit: Any) -> None:
    assert torch.equal(it.guided_backprop(net(), "1", unit, X).maps, it.guided_backprop(net(), "1", 1, X).maps)
    assert top_images(net(), "1", X, unit).units == (1,)


def test_one_alpha_is_a_list_of_one() -> None:
    one: Connectivity = it.connectivity(net(0), net(1), DATA, alphas=0.5)
    assert one.to_dict() == it.connectivity(net(0), net(1), DATA, alphas=[0.5]).to_dict()


def test_networks_may_come_from_a_generator() -> None:
    given = [net(seed) for seed in range(3)]
    assert same(it.merge((m for m in given), X).model, it.merge(given, X).model)
    assert it.align_many((m for m in given), X).after == it.align_many(given, X).after


def test_a_base_is_11_where_none_is_given() -> None:
    found, named = (it.canonicalize(net(), X, order="nodesort", **given).model for given in ({}, {"base": 1.1}))
    assert same(found, named)


# -- told as it is -----------------------------------------------------------------------------------------------------


def test_modes_that_differ_are_named() -> None:
    with pytest.raises(MismatchError, match=r"The second network is in training mode and the other is not.* eval\(\)"):
        it.equivalent(normed(), normed().train(), X)
    part = normed()
    part[1].train()
    with pytest.raises(MismatchError, match=r"'1' of the first network is in training mode"):
        it.equivalent(part, normed(), X)


@pytest.mark.parametrize(
    "verb", [it.fold, it.fingerprint, lambda m, x: it.align(m, m, x), lambda m, x: it.merge([m, m], x)]
)
def test_nan_weights_are_told_without_a_canonical_form(verb: Callable[..., Any]) -> None:
    broken: Any = net()
    with torch.no_grad():
        broken[0].weight[0, 0] = NAN
    with pytest.raises(InputError, match=r"'0\.weight' holds NaN.* can be neither sorted nor compared"):
        verb(broken, X)
