"""Options that the architectures share: activations by name, and checks of sizes and choices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, fx, nn

from intertwine.errors import InputError, unknown_name

if TYPE_CHECKING:
    Traced = Tensor  # a proxy has all methods of a tensor
else:
    Traced = Tensor | fx.Proxy  # the tests check annotations at run time, and torch.fx traces stacked networks

#: A name ("relu", "leaky_relu:0.1"), a module to be copied, or a function without arguments that returns a module.
Activation = str | Callable[..., object]

MODULES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid,
    "elu": nn.ELU, "silu": nn.SiLU, "identity": nn.Identity, "prelu": nn.PReLU, "relu6": nn.ReLU6, "selu": nn.SELU,
    "mish": nn.Mish, "softplus": nn.Softplus, "hardswish": nn.Hardswish,
}  # fmt: skip
#: Names that take a number after a colon: the negative slope of leaky_relu, the α of elu.
WITH_NUMBER = ("leaky_relu", "elu")


def one_of(option: str, value: object, allowed: Iterable[object]) -> None:
    """Raise unless the value is one of a few.

    >>> one_of("pool", "mean", ("token", "mean"))
    """
    known = list(allowed)
    if not any(type(value) is type(item) and value == item for item in known):  # of one type, because True == 1
        raise InputError(f"{option} must be one of {', '.join(map(repr, known))}, but is {value!r}.")


def positive(**sizes: int) -> None:
    """Raise unless all sizes are integers of at least 1.

    >>> positive(dim=64, depth=2)
    """
    for option, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{option} must be an integer of at least 1, but is {value!r}.")


def listed(option: str, value: object, example: str) -> None:
    """Raise unless the value is a list; a string would be read as the list of its letters.

    >>> listed("widths", (4, 2), "(784, 512, 10)")
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        typed = example.replace(" ", "").replace("(", "[").replace(")", "]")
        raise InputError(
            f"{option} must be a list of integers such as {example}, but is {value!r}. On the command line, write "
            f"{option}={typed}."
        )


def scaled(channels: int, width: int | float) -> int:
    """A number of channels times the width multiplier, and at least 1.

    >>> scaled(64, 0.25), scaled(16, 4)
    (16, 64)
    """
    if not isinstance(width, (int, float)) or not 0 < width < float("inf"):
        raise InputError(
            f"width must be a positive number such as 0.5 or 4, but is {width!r}. It multiplies the channels of layers."
        )
    return max(1, round(channels * width))


def maker(activation: Activation, slope: float | None = None) -> Callable[[], nn.Module]:
    """A function that returns a new activation module at every call, so that each one has a path of its own.

    Args:
        activation: a name such as `"relu"` or `"leaky_relu:0.1"`; a module, which is copied; or a function without
            arguments that returns a module, such as the class `nn.ReLU`.
        slope: the negative slope of `"leaky_relu"`.

    Raises:
        InputError: an unknown activation, or a slope for one that has none.

    >>> maker("leaky_relu", slope=0.1)()
    LeakyReLU(negative_slope=0.1)
    >>> maker("elu:0.5")()
    ELU(alpha=0.5)
    >>> maker(nn.ReLU)()
    ReLU()
    """
    if slope is not None and activation != "leaky_relu":
        raise InputError(
            f"slope={slope!r} does not apply to the activation {activation!r}. Leave it out, or pass "
            "activation='leaky_relu'."
        )
    if isinstance(activation, str):
        return _by_name(activation if slope is None else f"leaky_relu:{slope}")
    if isinstance(activation, nn.Module):
        return partial(copy.deepcopy, activation)

    def checked() -> nn.Module:
        made = activation()
        if not isinstance(made, nn.Module):
            raise InputError(
                f"The activation {activation!r} returns {type(made).__name__} instead of a module. Pass a function "
                "without arguments that returns a module, such as torch.nn.ReLU."
            )
        return made

    return checked


def _by_name(text: str) -> Callable[[], nn.Module]:
    name, colon, number = text.partition(":")
    if name not in MODULES:
        raise InputError(unknown_name("activation", name, MODULES) + " Or pass a function that returns a module.")
    if not colon:
        return MODULES[name]
    if name not in WITH_NUMBER:
        raise InputError(
            f"The activation {text!r} has a number, but {name} takes none. Write {name!r}, or use "
            f"{' or '.join(f'{known}:NUMBER' for known in WITH_NUMBER)}."
        )
    try:
        return partial(MODULES[name], float(number))
    except ValueError as error:
        raise InputError(
            f"The activation {text!r} needs a number after the colon, but has {number!r}. Write leaky_relu:0.1."
        ) from error
