"""Transforms of features drawn at random: rotations, members of G_ReLU, elements of a network's own group (000-G40)."""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float
from intertwine.errors import InputError, did_you_mean
from intertwine.stitch.resize import FeatureForm, from_rows, to_rows
from intertwine.symmetry.symmetry import Symmetry

#: Kind of transform → what it is.
KINDS = {
    "identity": "nothing is transformed: what fine-tuning alone does",
    "relu": "a member of G_ReLU: a permutation, and log-normal scales of mean 1",
    "orthogonal": "an orthogonal matrix, uniform over all of them",
    "element": "an element of the network's own group at the layer, undone exactly by the layers behind",
}


def check_kind(kind: str) -> None:
    """Refuse a kind of transform that there is not."""
    if kind not in KINDS:
        raise InputError(
            f"A transform of the kind {kind!r} was asked for. {did_you_mean(kind, KINDS)}The kinds are "
            f"{', '.join(KINDS)}."
        )


def haar_orthogonal(n: int, seed: int = 0) -> Float[Tensor, "n n"]:
    """An orthogonal matrix drawn uniformly (Haar measure): Q of the QR decomposition of a normal matrix.

    LAPACK's Q alone is not uniform; with the signs of R's diagonal put into it, it is (Mezzadri 2007). Reflections are
    drawn too, as in paper 0; `intertwine.inspect.rotation` has rotations alone.

    >>> q = haar_orthogonal(5)
    >>> torch.allclose(q @ q.T, torch.eye(5, dtype=torch.float64))
    True
    """
    _check_size(n)
    q, r = torch.linalg.qr(_normal(n, n, seed=seed))
    return q * r.diagonal().sign()


def relu_member(n: int, seed: int = 0, spread: float | int = 1.0) -> Float[Tensor, "n n"]:
    """A member of G_ReLU: P·D, a uniform permutation and scales exp(spread·z − spread²/2), z normal, of mean 1.

    >>> a, x = relu_member(4), torch.randn(4, dtype=torch.float64)
    >>> torch.allclose((a @ x).relu(), a @ x.relu())
    True
    """
    _check_size(n)
    generator = torch.Generator().manual_seed(seed)
    scales = (spread * torch.randn(n, generator=generator, dtype=torch.float64)).exp() / exp(spread**2 / 2)
    return torch.diag(scales)[torch.randperm(n, generator=generator)]


def random_transform(kind: str, n: int, seed: int = 0) -> Float[Tensor, "n n"]:
    """A transform of n features, of a kind of `KINDS` that needs no network.

    >>> random_transform("identity", 2)
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    check_kind(kind)
    match kind:
        case "orthogonal":
            return haar_orthogonal(n, seed)
        case "relu":
            return relu_member(n, seed)
        case "identity":
            _check_size(n)
            return torch.eye(n, dtype=torch.float64)
    raise InputError(f"A transform of the kind {kind!r} depends on a network. Draw it with random_element.")


def random_element(
    sym: Symmetry, model: nn.Module, at: str, layout: str, channels: int, seed: int = 0, spread: float | int = 1.0
) -> tuple[Float[Tensor, "channels channels"], nn.Module]:
    """How a random element of a network's group moves the features at a module, and the network moved by it.

    Only the wires that act there take part. The moved network's layers behind the module undo the matrix.

    Args:
        sym: of the model. at: the path of a module; its output is meant. layout, channels: of its features.
        seed, spread: of the element; scales are log-normal with this spread.

    Raises:
        InputError: no wire acts there.

    Example:
        >>> import torch, intertwine
        >>> from intertwine.inspect.transforms import random_element
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
        >>> x = torch.randn(4, 3)
        >>> matrix, moved = random_element(intertwine.symmetry(model, x), model, "0", "nc", 5)
        >>> torch.allclose(model[0](x) @ matrix.float().T, moved[0](x), atol=1e-5)
        True
        >>> torch.allclose(model(x), moved(x), atol=1e-5)
        True
    """
    g = sym.random(seed, spread)
    sizes = {"n": channels, "c": channels}  # one unit vector per sample, at one position
    spot = FeatureForm(layout, tuple(sizes.get(letter, 1) for letter in layout))
    units = torch.eye(channels, dtype=torch.float64)

    def matrix(*wires: str) -> Tensor:
        features = from_rows(units[:, None], spot)
        return to_rows(sym.act_on_features(g.only(*wires), at, features), layout)[:, 0].T

    acting = [wire.name for wire in sym.wires if not torch.equal(matrix(wire.name), units)]
    if not acting:
        raise InputError(
            f"An element of the network's group was asked for at {at!r}, but only the identity acts there; .frozen of "
            "intertwine.symmetry(model, ...) says why. Use the kinds relu or orthogonal, or another layer."
        )
    return matrix(*acting), sym.act(g.only(*acting), model)


def _normal(*sizes: int, seed: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _check_size(n: int) -> None:
    if n < 1:
        raise InputError(f"A transform of {n} features was asked for. Ask for at least one.")
