"""Activations by name: every place of a network gets a module of its own, so that it has a path of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

from torch import nn

from intertwine.errors import InputError, did_you_mean

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
