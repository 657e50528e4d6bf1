"""`check_measure`: a conformance test for similarity measures.

Each change in the declared invariances must leave the value unchanged, and every other change must move it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from intertwine.errors import IntertwineError
from intertwine.measure.measure import CHANGES, Measure, find

SAMPLES, FEATURES, OTHERS = 80, 6, 5
#: Largest change of a value that counts as none, and smallest that counts as one, in double precision.
SAME, MOVED = 1e-8, 1e-4


class MeasureError(IntertwineError, AssertionError):
    """A measure breaks a law; `law` is its name."""

    def __init__(self, measure: str, law: str, found: str, next_step: str) -> None:
        self.measure, self.law = measure, law
        super().__init__(f"The measure {measure} fails the law {law!r}: {found}. {next_step}")


@dataclass(frozen=True)
class MeasureReport:
    """The result of `check_measure`: per law the largest deviation, per change how far it moved the value."""

    measure: str
    laws: dict[str, float]
    moves: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"measure": self.measure, "laws": self.laws, "moves": self.moves}

    def __repr__(self) -> str:
        kept = [change for change, size in self.moves.items() if size <= SAME]
        return f"MeasureReport({self.measure}: {len(self.laws)} laws hold; invariant to {', '.join(kept) or 'nothing'})"


def check_measure(measure: str | Measure, seeds: tuple[int, ...] = (0, 1), **options: Any) -> MeasureReport:
    """Check all declared properties of a measure, on random representations in double precision.

    Laws: the value at identity; the range; the invariances, and that every other change moves the value; samples in
    another order; `prepare` and `compare` agree with the call; inputs are not changed; single precision.

    Args:
        measure: a name with `options`, or a `Measure` of your own. seeds: each draws its own representations.

    Raises:
        MeasureError: a law fails; the text says which, by how much, and where to look.

    Example:
        >>> check_measure("linear_cka").moves["orthogonal"] < 1e-8
        True
    """
    own = find(measure, **options) if isinstance(measure, str) else measure
    laws: dict[str, float] = {}
    moves = dict.fromkeys(CHANGES, 0.0)
    for seed in seeds:
        x, y = random_representations(seed)
        for law, size, allowed, look in _laws(own, x, y):
            laws[law] = max(laws.get(law, 0.0), size)
            if not size <= allowed:
                raise MeasureError(own.name, law, f"the error is {size:.1e}, allowed is {allowed:.0e}", look)
        for change in CHANGES:
            moves[change] = max(moves[change], _moved(own, x, y, change, seed))
    for change, size in moves.items():
        _check_change(own, change, size)
    return MeasureReport(own.name, laws, moves)


def random_representations(seed: int) -> tuple[Tensor, Tensor]:
    """Two related representations with different widths, non-zero means and different scales."""
    g = Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=g, dtype=torch.float64)
    mixing = torch.randn(FEATURES, OTHERS, generator=g, dtype=torch.float64)
    y = torch.relu(x @ mixing) + 0.5 * torch.randn(SAMPLES, OTHERS, generator=g, dtype=torch.float64)
    return x + torch.randn(FEATURES, generator=g, dtype=torch.float64), y


def _laws(measure: Measure, x: Tensor, y: Tensor) -> list[tuple[str, float, float, str]]:
    before = x.clone(), y.clone()
    value, self_value = _value(measure, x, y), _value(measure, x, x)
    order = torch.randperm(len(x), generator=Generator().manual_seed(7))
    parts = measure.compare(measure.prepare(x), measure.prepare(y)).value
    single = _value(measure, x.float(), y.float())
    low, high = measure.range
    touched = float(not (torch.equal(before[0], x) and torch.equal(before[1], y)))
    return [
        ("value at identity", abs(self_value - measure.at_identity), 1e-7, "Look at `at_identity`."),
        ("range", max(low - value, value - high, 0.0), 1e-9, "Look at `range`."),
        ("order of samples", abs(_value(measure, x[order], y[order]) - value), SAME, "A sum depends on the order."),
        ("prepare and compare", abs(parts - value), 1e-12, "What `prepare` keeps must not depend on the pair."),
        ("single precision", abs(single - value), 1e-4, "Centre before products are taken; sum in double precision."),
        ("inputs untouched", touched, 0.0, "Work on a copy."),
    ]


def _value(measure: Measure, x: Tensor, y: Tensor) -> float:
    found = measure(x, y)
    if found.degenerate:
        raise MeasureError(
            measure.name, "a value", f"it is degenerate on ordinary data: {found.degenerate}", "Look at its conditions."
        )
    return found.value


def _moved(measure: Measure, x: Tensor, y: Tensor, change: str, seed: int) -> float:
    return abs(_value(measure, x, changed(y, change, seed)) - _value(measure, x, y))


def changed(y: Tensor, change: str, seed: int = 0) -> Tensor:
    """A representation under a random change of one kind, out of `CHANGES`."""
    g = Generator().manual_seed(100 + seed)
    width = y.shape[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=y.dtype)

    made: dict[str, Callable[[], Tensor]] = {
        "permutation": lambda: y[:, torch.randperm(width, generator=g).roll(1)],
        "positive scales": lambda: y * normal(width).exp(),
        "signs": lambda: y * torch.where(torch.arange(width) % 2 == 0, -1.0, 1.0).to(y.dtype),
        "orthogonal": lambda: y @ torch.linalg.qr(normal(width, width))[0],
        "invertible": lambda: y @ (normal(width, width) + 2 * torch.eye(width, dtype=y.dtype)),
        "isotropic scale": lambda: 3.7 * y,
        "translation": lambda: y + 2 * normal(width),
    }
    return made[change]()


def _check_change(measure: Measure, change: str, size: float) -> None:
    declared = change in measure.invariances
    if declared and size > SAME:
        raise MeasureError(
            measure.name, change, f"it is declared invariant, and the value moves by {size:.1e}",
            f"Fix the measure, or remove {change!r} from its invariances.",
        )  # fmt: skip
    if not declared and size < MOVED:
        raise MeasureError(
            measure.name, change, f"it is not declared invariant, and the value moves by {size:.1e} only",
            f"Add {change!r} to its invariances, or find out why it does not move.",
        )  # fmt: skip
