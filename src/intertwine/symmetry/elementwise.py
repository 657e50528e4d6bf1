"""A user's function made safe to sample: in float64, on copies, and refused with a reason if it is not an activation.

An activation is a function of one tensor that computes each entry of its result from the same entry of its input, by
one rule for all entries, and gives the same answer every time. Only such functions have a scalar intertwiner group.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError


@dataclass(frozen=True)
class Elementwise:
    """A function that acts on each entry alone: takes a float64 vector, returns float64 values.

    `limits`: the number format the function answers in; what overflows or underflows in it is no evidence.
    """

    name: str
    limits: torch.finfo
    _function: Callable[[Tensor], Any]
    _company: Tensor
    _first: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return _as_float64(_call(self._function, self.name, x))

    def check_steady(self) -> None:
        """Refuse the function if it no longer answers as at first. To be called after all other calls."""
        a, b = self(self._company), self._first
        if not bool(((a == b) | (a.isnan() & b.isnan())).all()):
            raise InputError(
                f"{self.name} gave two different answers to the same input: it is random or keeps state between calls "
                "(dropout and RReLU in training mode do). Call .eval() on a module first, or pass a function of its "
                "input alone."
            )


def elementwise(fn: Callable[..., Any]) -> Elementwise:
    """The function, checked to act on each entry alone.

    Args:
        fn: a function or module. A module is copied, moved to the CPU and to float64; yours is not touched.

    Raises:
        InputError: it needs several inputs, raises, returns something else than a tensor of the same shape, mixes
            entries, is random, or keeps state between calls.

    Example:
        >>> import torch
        >>> from intertwine.symmetry.elementwise import elementwise
        >>> elementwise(torch.relu)(torch.tensor([-1.0, 2.0], dtype=torch.float64))
        tensor([0., 2.], dtype=torch.float64)
    """
    name = getattr(fn, "__name__", type(fn).__name__).replace("<lambda>", "fn")
    _refuse_by_type(fn, name)
    function = copy.deepcopy(fn).cpu().double() if isinstance(fn, nn.Module) else fn
    with torch.random.fork_rng(devices=[]):  # a dropout that is refused must not change the random state
        return _examined(function, name)


def _examined(function: Callable[..., Any], name: str) -> Elementwise:
    """Call the function on some numbers among large ones, and on the same numbers alone and in another order."""
    own = torch.linspace(-0.97, 9.1, 24, dtype=torch.float64)
    large = torch.logspace(3, 6, 24, dtype=torch.float64) * torch.where(torch.arange(24) % 3 == 0, -1, 1)
    company = torch.cat([own, large])
    raw = _call(function, name, company)
    limits = torch.finfo(_format(raw))
    found = Elementwise(name, limits, function, company, _as_float64(raw))
    if not _near(found(own.flip(0)).flip(0), found._first[: len(own)], limits):
        found.check_steady()
        raise InputError(
            f"{name} is not elementwise: its value at one entry changes with the entries beside it (like a softmax, a "
            "norm, a gate or a shift). Only elementwise functions have a scalar group; pass the whole network to "
            "intertwine.symmetry, which has rules for the others."
        )
    return found


def _format(y: Tensor) -> torch.dtype:
    """The number format a function computes in: that of its answer, or float32 if a float64 answer fits into that."""
    if not (y.is_floating_point() or y.is_complex()):
        return torch.float64  # booleans and integers are exact
    if y.dtype != torch.float64:
        return y.dtype
    known = y[torch.isfinite(y)]
    # whole numbers and powers of two fit into any format and say nothing
    simple = torch.equal(known.round(), known) or torch.equal(known.bfloat16().double(), known)
    return torch.float32 if not simple and torch.equal(known.float().double(), known) else torch.float64


def _refuse_by_type(fn: Callable[..., Any], name: str) -> None:
    """Modules that are known to be something else, before torch complains about the shape of the samples."""
    if isinstance(fn, nn.PReLU) and fn.num_parameters > 1:
        raise InputError(
            f"A PReLU with {fn.num_parameters} slopes is {fn.num_parameters} activations, one per channel. Pass each: "
            "[intertwine.activation_group(torch.nn.LeakyReLU(s)) for s in prelu.weight.tolist()]."
        )
    recurrent = isinstance(fn, (nn.RNNBase, nn.RNNCellBase))
    if recurrent or (isinstance(fn, nn.Module) and any("running_" in key for key, _ in fn.named_buffers())):
        what = "a state from step to step" if recurrent else "running statistics of its inputs"
        raise InputError(
            f"{name} keeps {what}, so it is not a fixed elementwise function. Pass the activation alone, or the whole "
            "network to intertwine.symmetry."
        )


def _as_float64(y: Tensor) -> Tensor:
    # a real factor passes a complex function if it passes both parts, which one generic mixture of them shows
    return y.real.double() + 0.7390851332151607 * y.imag.double() if y.is_complex() else y.double()


def _call(function: Callable[..., Any], name: str, x: Tensor) -> Tensor:
    """One call in float64 on a copy of the samples; every failure is named."""
    try:
        with torch.no_grad():
            y = function(x.clone())  # an activation may write in place
    except Exception as error:
        raise InputError(_why_it_raised(function, name, x, error)) from error
    if not isinstance(y, Tensor):
        raise InputError(
            f"{name} was called with one tensor and returned a {type(y).__name__}, not a tensor. An activation takes "
            f"one tensor and returns one; if it returns several things, pick one: lambda x: {name}(x)[0]."
        )
    if y.shape != x.shape:
        raise InputError(
            f"{name} was called with a tensor of shape {tuple(x.shape)} and returned one of shape {tuple(y.shape)}. "
            f"An activation keeps the shape; a gate or a reduction is not elementwise. Pass a function that is."
        )
    return y


def _why_it_raised(function: Callable[..., Any], name: str, x: Tensor, error: Exception) -> str:
    needed = _required_inputs(function)
    if len(needed) > 1:
        return (
            f"{name} needs {len(needed)} inputs ({', '.join(needed)}); an activation takes one tensor. "
            f"Fix the others first, for example: lambda x: {name}(x, {', '.join(needed[1:])})."
        )
    said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    return (
        f"{name} was called with one float64 tensor of shape {tuple(x.shape)} on the CPU and raised {said}. "
        f"An activation takes one tensor of any shape; pass such a function, or a lambda around yours."
    )


def _required_inputs(function: Callable[..., Any]) -> list[str]:
    """Names of the inputs without a default, as far as Python can tell."""
    try:
        known = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    except (TypeError, ValueError):  # built-in functions do not say
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in known.values() if p.default is p.empty and p.kind in positional]


def _near(a: Tensor, b: Tensor, limits: torch.finfo) -> bool:
    """Equal up to the rounding of a vectorised loop; a function that mixes entries differs by far more."""
    tolerance = max(1e-6, 64 * limits.eps)
    close = (a - b).abs() <= tolerance * (a.abs() + b.abs()) + limits.tiny
    return bool((close | (a == b) | (a.isnan() & b.isnan())).all())
