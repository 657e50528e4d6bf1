"""What random blocks are made with: choices read off one number, modules written as functions, the list of hazards.

A block is written as a function of `pick` (its choices, 0 being the plainest of each), of the tensor `x` that arrives
and of the networks inside it; it returns a module that fits `x`. `@hazard` enters it in `HAZARDS`, from plain to
intricate, so that a failing network shrinks towards plain ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Widths with and without common factors, so that axes of one size by accident and accidental factors both occur.
WIDTHS = (6, 4, 8, 12, 9, 10, 5, 7, 6, 8, 2, 1)


class Pick:
    """Choices read off one whole number, digit by digit: 0 takes the first option everywhere."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *options: Any) -> Any:
        self.number, index = divmod(self.number, len(options))
        return options[index]

    def width(self) -> int:
        return self(*WIDTHS)

    def divisor(self, n: int, proper: bool = True) -> int:
        """A divisor of n above 1 (and below n, if there is one)."""
        found = [d for d in range(2, n + 1) if n % d == 0 and (d < n or not proper)]
        return self(*(found or [n]))


class Fn(nn.Module):
    """A module made of a function of (itself, x) and the modules, parameters and buffers it uses."""

    def __init__(self, fn: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.fn(self, x)


Grow = Callable[[Tensor], tuple[nn.Module, Tensor]]


Build = Callable[[Pick, Tensor, Sequence[Grow]], nn.Module]


@dataclass(frozen=True)
class Hazard:
    """A kind of block: what it takes, "image" (B, C, H, W), "tokens" (B, N, C) or "any", and its inner lists."""

    name: str
    takes: str
    nests: int
    build: Build


HAZARDS: dict[str, Hazard] = {}


def hazard(takes: str, nests: int = 0) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    def register(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        name = build.__name__.strip("_")
        made: Build = build if nests else lambda pick, x, _: build(pick, x)
        HAZARDS[name] = Hazard(name, takes, nests, made)
        return build

    return register


def axis_of(x: Tensor) -> int:
    """The channel axis: 1 of an image, the last of tokens."""
    return 1 if x.ndim == 4 else x.ndim - 1


def width_of(x: Tensor) -> int:
    return x.shape[axis_of(x)]


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def mix(x: Tensor, out: int, bias: bool = True, width: int | None = None) -> nn.Module:
    """A linear map of the channels, position by position."""
    width = width_of(x) if width is None else width
    return nn.Conv2d(width, out, 1, bias=bias) if x.ndim == 4 else nn.Linear(width, out, bias=bias)


def per_channel(x: Tensor) -> tuple[int, ...]:
    """The shape of a parameter with one entry per channel that broadcasts against x."""
    return (width_of(x), 1, 1) if x.ndim == 4 else (width_of(x),)


def fitted(x: Tensor, width: int, rest: nn.Module) -> nn.Module:
    """A block that needs a certain width, behind a map to that width where x has another."""
    return rest if width_of(x) == width else nn.Sequential(mix(x, width), rest)


def same_size(shortcut: Tensor, y: Tensor) -> nn.Module:
    """A projection that brings the shortcut of a residual block to the size of its body."""
    if shortcut.ndim == 4:
        pool = nn.Identity() if shortcut.shape[2:] == y.shape[2:] else nn.AdaptiveAvgPool2d(tuple(y.shape[2:]))
        return nn.Sequential(pool, nn.Conv2d(shortcut.shape[1], y.shape[1], 1))
    tokens = nn.Identity()
    if shortcut.shape[1] != y.shape[1]:
        tokens = Fn(
            lambda m, x: m.along(x.transpose(1, 2)).transpose(1, 2), along=nn.Linear(shortcut.shape[1], y.shape[1])
        )
    return nn.Sequential(tokens, nn.Linear(shortcut.shape[2], y.shape[2]))


def like(x: Tensor, y: Tensor) -> nn.Module:
    """A module after which y is of the same kind (image or tokens) as x was."""
    if x.ndim == y.ndim:
        return nn.Identity()
    return to_tokens() if x.ndim == 3 else to_image(y)


def to_tokens() -> nn.Module:
    return Fn(lambda m, x: x.flatten(2).transpose(1, 2))


def to_image(x: Tensor) -> nn.Module:
    count = x.shape[1]
    rows = max(d for d in range(1, math.isqrt(count) + 1) if count % d == 0)
    return Fn(lambda m, x: x.transpose(1, 2).reshape(x.shape[0], x.shape[2], rows, count // rows))


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.tanh,
    F.gelu,
    F.silu,
    F.leaky_relu,
    torch.abs,
    torch.square,
    torch.sin,
    F.hardtanh,
    lambda x: x * torch.sigmoid(x),
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: F.relu(x) ** 2,
    F.softplus,
    F.elu,
    F.relu6,
    F.hardswish,
    lambda x: x.clamp(min=0),
    lambda x: x.sign() * x.abs().sqrt(),
    lambda x: torch.maximum(x, -0.5 * x),
    lambda x: x / (1 + x.abs()),
    lambda x: x + x.sin() ** 2,
    lambda x: x.pow(3) - x,
    lambda x: torch.exp(-x * x),
    lambda x: 2.0 * x - 1.0,
    F.softsign,
    F.tanhshrink,
    lambda x: x.masked_fill(x < 0, 0.0),
    lambda x: F.softshrink(x, 0.1),
    lambda x: (x > 0).to(x.dtype) * x,
    torch.erf,
    torch.neg,
)


def head(pick: Pick, x: Tensor) -> nn.Module:
    """From the last tensor to the output."""
    classes = pick(3, 5)
    if x.ndim == 3:
        part, read = pick(
            ("last", lambda m, x: m.last(x.mean(1))),
            ("last", lambda m, x: m.last(x[:, 0])),
            ("last", lambda m, x: m.last(x.amax(1))),
            ("last", lambda m, x: m.last(x)),
            ("flat", lambda m, x: m.flat(x.flatten(1))),
            ("last", lambda m, x: m.last(x).softmax(-1)),
        )
    else:
        part, read = pick(
            ("last", lambda m, x: m.last(x.mean((2, 3)))),
            ("last", lambda m, x: m.last(F.adaptive_avg_pool2d(x, 1).flatten(1))),
            ("flat", lambda m, x: m.flat(x.flatten(1))),
            ("last", lambda m, x: m.last(x.amax((-2, -1)))),
            ("map", lambda m, x: m.map(x)),
            ("last", lambda m, x: m.last(F.relu(x).flatten(2).sum(2))),
        )
    layers = {
        "last": lambda: nn.Linear(width_of(x), classes),
        "flat": lambda: nn.Linear(x[0].numel(), classes),
        "map": lambda: nn.Conv2d(width_of(x), classes, 1),
    }
    return Fn(read, **{part: layers[part]()})
