"""Random transforms of features: rotations, members of G_ReLU, elements of a network's own group."""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor, nn

from intertwine.argument_types import Float
from intertwine.errors import InputError, unknown_name
from intertwine.inspect.rotation import haar_orthogonal
from intertwine.stitch.resize import FeatureForm, from_rows, to_rows
from intertwine.symmetry.symmetry import Symmetry

#: Kind of transform → its description.
KINDS = {
    "identity": "no transform: the effect of fine-tuning alone",
    "relu": "a member of G_ReLU: a permutation, and log-normal scales of mean 1",
    "orthogonal": "an orthogonal matrix, uniform over all of them",
    "element": "an element of the network's own group at the layer, undone exactly by the later layers",
}


def check_kind(kind: str) -> None:
    """Refuse an unknown kind of transform."""
    if kind not in KINDS:
        raise InputError(unknown_name("kind of transform", kind, KINDS))


def relu_member(n: int, seed: int = 0, spread: float | int = 1.0) -> Float[Tensor, "n n"]:
    """A member of G_ReLU: P·D, a uniform permutation and scales exp(spread·z − spread²/2), z normal, of mean 1.

    >>> a, x = relu_member(4), torch.randn(4, dtype=torch.float64)
    >>> torch.allclose((a @ x).relu(), a @ x.relu())
    True
    """
    if n < 1:
        raise InputError(f"The number of features must be at least 1, but is {n}.")
    generator = torch.Generator().manual_seed(seed)
    scales = (spread * torch.randn(n, generator=generator, dtype=torch.float64)).exp() / exp(spread**2 / 2)
    return torch.diag(scales)[torch.randperm(n, generator=generator)]


def random_transform(kind: str, n: int, seed: int = 0) -> Float[Tensor, "n n"]:
    """A transform of n features, of a kind in `KINDS` that needs no network.

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
            return torch.eye(n, dtype=torch.float64)
    raise InputError(f"The kind {kind!r} depends on a network. Use random_element.")


def random_element(
    sym: Symmetry, model: nn.Module, at: str, layout: str, channels: int, seed: int = 0, spread: float | int = 1.0
) -> tuple[Float[Tensor, "channels channels"], nn.Module]:
    """The matrix by which a random element of a network's group moves the features at a module, and the moved network.

    Only wires that act there are used. The later layers of the moved network undo the matrix.

    Args:
        sym: of the model. at: the path of a module, for its output. layout, channels: of its features.
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
    form = FeatureForm(layout, tuple(sizes.get(letter, 1) for letter in layout))
    units = torch.eye(channels, dtype=torch.float64)

    def matrix(*wires: str) -> Tensor:
        features = from_rows(units[:, None], form)
        return to_rows(sym.act_on_features(g.only(*wires), at, features), layout)[:, 0].T

    acting = [wire.name for wire in sym.wires if not torch.equal(matrix(wire.name), units)]
    if not acting:
        raise InputError(
            f"Only the identity of the network's group acts at {at!r}; .frozen of intertwine.symmetry(model, ...) "
            "says why. Use the kinds relu or orthogonal, or another layer."
        )
    return matrix(*acting), sym.act(g.only(*acting), model)
