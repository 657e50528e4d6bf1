"""Write the table of activations in docs/symmetry.md again, from what `activation_group` finds.

python docs/activations.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import intertwine as it

PAGE = Path(__file__).parent / "symmetry.md"
BEGIN = "<!-- activations: begin (written by docs/activations.py) -->"
END = "<!-- activations: end -->"

#: Every activation of torch.nn, some of them with several settings.
MODULES: dict[str, nn.Module] = {
    "ReLU": nn.ReLU(),
    "LeakyReLU": nn.LeakyReLU(0.01),
    "LeakyReLU(−1)": nn.LeakyReLU(-1.0),
    "LeakyReLU(1)": nn.LeakyReLU(1.0),
    "PReLU": nn.PReLU(),
    "RReLU in evaluation": nn.RReLU().eval(),
    "Threshold(0, 0)": nn.Threshold(0.0, 0.0),
    "Threshold(1, 0)": nn.Threshold(1.0, 0.0),
    "ReLU6": nn.ReLU6(),
    "ELU": nn.ELU(),
    "CELU": nn.CELU(),
    "SELU": nn.SELU(),
    "GELU": nn.GELU(),
    "GELU by tanh": nn.GELU("tanh"),
    "SiLU": nn.SiLU(),
    "Mish": nn.Mish(),
    "Softplus": nn.Softplus(),
    "Hardswish": nn.Hardswish(),
    "Hardsigmoid": nn.Hardsigmoid(),
    "Sigmoid": nn.Sigmoid(),
    "LogSigmoid": nn.LogSigmoid(),
    "Tanh": nn.Tanh(),
    "Softsign": nn.Softsign(),
    "Tanhshrink": nn.Tanhshrink(),
    "Hardtanh": nn.Hardtanh(),
    "Softshrink": nn.Softshrink(),
    "Hardshrink": nn.Hardshrink(),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": torch.sin,
    "cos": torch.cos,
    "Gaussian exp(−x²)": lambda x: torch.exp(-(x**2)),
    "abs": torch.abs,
    "square": torch.square,
    "cube": lambda x: x**3,
    "squared ReLU": lambda x: torch.relu(x) ** 2,
    "√abs": lambda x: x.abs().sqrt(),
    "sign": torch.sign,
    "step": lambda x: (x > 0).to(x.dtype),
    "identity": lambda x: x,
    "a constant": torch.ones_like,
    "x·(2 + sin(2π·log₂ abs x))": lambda x: x * (2 + torch.sin(2 * math.pi * x.abs().log2())),
}
#: Modules that torch calls activations and that are refused, because they are not elementwise.
REFUSED: dict[str, nn.Module] = {
    "GLU": nn.GLU(),
    "Softmax": nn.Softmax(-1),
    "Softmax2d": nn.Softmax2d(),
    "Softmin": nn.Softmin(-1),
    "LogSoftmax": nn.LogSoftmax(-1),
    "MultiheadAttention": nn.MultiheadAttention(4, 2),
}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: kind → (the factors a that pass, what a layer of n units may do)
KINDS = {
    "trivial": ("1", "S_n"),
    "sign": ("±1", "S_n ⋉ {±1}^n"),
    "positive": ("a > 0", "S_n ⋉ (R₊)^n"),
    "nonzero": ("a ≠ 0", "S_n ⋉ (R*)^n"),
    "all": ("any matrix", "GL(n)"),
}


def table() -> str:
    """One line per group, with all activations that have it; then what is refused."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, function in (MODULES | FUNCTIONS).items():
        rows.setdefault(described(function), []).append(name)
    order = list(KINDS)
    lines = ["| activations | `kind` | factors a | φ(a) | a layer of n units |", "|---|---|---|---|---|"]
    for (kind, factors, phi), names in sorted(rows.items(), key=lambda row: (order.index(row[0][0]), len(row[0][1]))):
        lines.append(f"| {', '.join(names)} | `{kind}` | {factors} | {phi} | {KINDS[kind][1]} |")
    refused = [name for name, module in REFUSED.items() if is_refused(module)]
    return "\n".join([*lines, "", f"Refused with a reason, because they mix units: {', '.join(refused)}."])


def described(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Kind, factors and φ of one activation, in words."""
    group = it.activation_group(function)
    factors = KINDS[group.kind][0]
    if group.discrete is not None:
        base, image = group.discrete
        return group.kind, f"{factors}, times {base:g}^k", f"{base:g}^k ↦ {'' if image > 0 else '−'}{abs(image):g}^k"
    if group.exponent is None:
        return group.kind, factors, {None: "1", 1: "1", -1: "a"}[group.parity]
    if group.exponent == 0:
        return group.kind, factors, "sign a" if group.parity == -1 else "1"
    degree = group.degree
    whole = degree is not None and degree.denominator == 1
    # a^d itself has the parity of d; elsewhere the sign is told apart
    if group.parity is None or (whole and (-1) ** int(group.exponent) == group.parity):
        return group.kind, factors, power("a", group.exponent)
    return group.kind, factors, ("sign a · " if group.parity == -1 else "") + power("abs a", group.exponent)


def power(base: str, exponent: float) -> str:
    if exponent == 1:
        return base
    raised = f"{int(exponent)}".translate(RAISED) if exponent == int(exponent) else f"^{exponent:g}"
    return f"({base}){raised}" if " " in base else f"{base}{raised}"


def is_refused(function: Callable[..., Any]) -> bool:
    try:
        it.activation_group(function)
    except it.InputError:
        return True
    return False


def rewritten(page: str) -> str:
    """The page with the block between the two markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE.name} has no block between {BEGIN!r} and {END!r}. Put both lines back.")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
