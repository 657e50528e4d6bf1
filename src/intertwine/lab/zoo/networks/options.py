"""Options that the architectures share: activations by name, checks of sizes and choices, and the tensor type that
torch.fx accepts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, fx, nn

from intertwine.errors import InputError, did_you_mean

# ----------------------------------------------------------------------------------------------------
# Checks of the options of an architecture: an error names the option, its value and what it may be.


def one_of(option: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a value that is not among a few.

    >>> one_of("pool", "mean", ("token", "mean"))
    """
    known = list(allowed)
    # `True == 1` must not let a number pass for a switch, nor the other way round.
    if not any(type(value) is type(item) and value == item for item in known):
        words = ", ".join(map(repr, known))
        raise InputError(
            f"The option {option}={value!r} was asked for, but {option} is one of {words}. Pick one of them."
        )


def positive(**sizes: int) -> None:
    """Refuse sizes below 1, and sizes that are no whole numbers.

    >>> positive(dim=64, depth=2)
    """
    for option, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"The option {option}={value!r} was asked for, but {option} counts something: give a whole number of 1 "
                "or more."
            )


def listed(option: str, value: object, example: str) -> None:
    """Refuse what is no list: a word would be taken for the list of its letters.

    >>> listed("widths", (4, 2), "(784, 512, 10)")
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InputError(
            f"The option {option}={value!r} was asked for, but {option} is a list of whole numbers. Give one such as "
            f"{example}; on the command line {option}={example.replace(' ', '').replace('(', '[').replace(')', ']')}."
        )


def scaled(channels: int, width: int | float) -> int:
    """A number of channels times the width multiplier, and at least one.

    >>> scaled(64, 0.25), scaled(16, 4)
    (16, 64)
    """
    if not isinstance(width, (int, float)) or not 0 < width < float("inf"):
        raise InputError(
            f"The option width={width!r} was asked for, but width multiplies the channels of every layer: give a "
            "positive number such as 0.5 or 4."
        )
    return max(1, round(channels * width))


# ----------------------------------------------------------------------------------------------------
# Activations by name: every place of a network gets a module of its own, so that it has a path of its own.


#: A name ("relu", "leaky_relu:0.1"), a module to be copied, or a function of no arguments that returns a module.
Activation = str | Callable[..., object]

MODULES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "identity": nn.Identity,
    "prelu": nn.PReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
}
#: Names that take a number after a colon: the negative slope of leaky_relu, the α of elu.
WITH_NUMBER = ("leaky_relu", "elu")


def maker(activation: Activation, slope: float | None = None) -> Callable[[], nn.Module]:
    """A function that returns a fresh activation at every call.

    Args:
        activation: a name such as `"relu"` or `"leaky_relu:0.1"`; a module, which is copied for every place; or a
            function of no arguments that returns a module, such as the class `nn.ReLU`.
        slope: the negative slope, where the activation is `"leaky_relu"`.

    Raises:
        InputError: there is no such activation, or it has no slope.

    >>> maker("leaky_relu", slope=0.1)()
    LeakyReLU(negative_slope=0.1)
    >>> maker("elu:0.5")()
    ELU(alpha=0.5)
    >>> maker(nn.ReLU)()
    ReLU()
    """
    if slope is not None and activation != "leaky_relu":
        raise InputError(
            f"slope={slope!r} was asked for with the activation {activation!r}, but only leaky_relu has a slope. Leave "
            "slope out, or pass activation='leaky_relu'."
        )
    if isinstance(activation, str):
        return _by_name(activation if slope is None else f"leaky_relu:{slope}")
    if isinstance(activation, nn.Module):
        return partial(copy.deepcopy, activation)
    return partial(_checked, activation)


def _by_name(text: str) -> Callable[[], nn.Module]:
    name, colon, number = text.partition(":")
    if name not in MODULES:
        raise InputError(
            f"The activation {text!r} was asked for, but there is none of that name. {did_you_mean(name, MODULES)}The "
            f"names are {', '.join(MODULES)}; or pass a function that returns a module."
        )
    if not colon:
        return MODULES[name]
    if name not in WITH_NUMBER:
        raise InputError(
            f"The activation {text!r} was asked for, but {name} takes no number. Write {name!r}, or use one of "
            f"{', '.join(f'{known}:NUMBER' for known in WITH_NUMBER)}."
        )
    return partial(MODULES[name], _number(text, number))


def _number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError as error:
        raise InputError(
            f"The activation {text!r} was asked for, but {number!r} is no number. Write it as in leaky_relu:0.1."
        ) from error


def _checked(function: Callable[..., object]) -> nn.Module:
    made = function()
    if not isinstance(made, nn.Module):
        raise InputError(
            f"The activation {function!r} was asked for, but calling it gave {type(made).__name__} and no module. "
            "Pass a function of no arguments that returns a module, such as torch.nn.ReLU."
        )
    return made


# ----------------------------------------------------------------------------------------------------
# The type of what passes through a network: a tensor, or its stand-in while `torch.fx` traces the network.


if TYPE_CHECKING:
    Traced = Tensor  # a stand-in answers to everything that a tensor does
else:
    Traced = Tensor | fx.Proxy  # annotations are enforced while the tests run, and the trainer traces what it trains
