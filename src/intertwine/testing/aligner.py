"""`check_aligner`: a conformance test for methods of `align`.

A method may minimise any quantity. It must keep the function, report the correct distance, align networks of one orbit,
be deterministic, leave its inputs and the global random state unchanged, and handle dead and equal units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.align.align import SOLVERS, Alignment, align
from intertwine.align.solver import permutations_of
from intertwine.errors import InputError, IntertwineError
from intertwine.graph.model import copy_module
from intertwine.symmetry.symmetry import Symmetry, symmetry

#: Largest relative error that counts as rounding, in double precision.
ROUNDING = 1e-9

Data = list[tuple[Tensor, Tensor]]


class AlignerError(IntertwineError, AssertionError):
    """A method breaks a law; `law` is its name."""

    def __init__(self, method: str, law: str, network: str, found: str) -> None:
        self.method, self.law = method, law
        super().__init__(
            f"The method {method!r} fails the law {law!r} on {network}: {found}. Look at how the solver makes its "
            "element; `MatchingState` keeps element, weights and objective together."
        )


@dataclass(frozen=True)
class AlignerReport:
    """The result of `check_aligner`: per law the largest deviation on any network."""

    method: str
    laws: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"method": self.method, "laws": self.laws}

    def __repr__(self) -> str:
        return f"AlignerReport({self.method}: {len(self.laws)} laws hold)"


@dataclass(frozen=True)
class AlignerCase:
    """Two networks of one architecture, in double precision, and data on which they can be run."""

    name: str
    a: nn.Module
    b: nn.Module
    data: Data
    symmetry: Symmetry

    @property
    def example(self) -> Tensor:
        return self.data[0][0]


def check_aligner(
    method: str, options: Mapping[str, Any] | None = None, seeds: tuple[int, ...] = (0,)
) -> AlignerReport:
    """Check all laws of a method of `align`, on small networks in double precision.

    Laws: "function" (b moved computes what b computes), "element" (and is b moved by the element that is returned),
    "objective" (before and after are the squared distances, computed here from the weights alone), "history" (finite,
    and the same objective), "planted" (a network moved by a permutation is brought back), "repeated" (the same seed
    gives the same element), "inputs" (both networks and the global random numbers are left alone), "partial" (only
    the wires that were named move), "degenerate" (dead and equal units are matched to something).

    Args:
        method: a name in `intertwine.align.align.SOLVERS`; put a solver of your own there first.
        options: settings of the method. seeds: each draws its own networks.

    Raises:
        AlignerError: a law fails; the text says which, where and by how much.

    Example:
        >>> from intertwine.testing.aligner import check_aligner
        >>> check_aligner("weights")
        AlignerReport(weights: 9 laws hold)
    """
    if method not in SOLVERS:
        raise InputError(f"Unknown method {method!r}. Put the solver into intertwine.align.align.SOLVERS.")
    laws: dict[str, float] = {}
    for seed in seeds:
        for case in _cases(seed):
            for law, size in _laws(case, method, options):
                laws[law] = max(laws.get(law, 0.0), size)
                if not size <= ROUNDING:
                    raise AlignerError(method, law, case.name, f"the error is {size:.1e}, allowed is {ROUNDING:.0e}")
    return AlignerReport(method, laws)


def _laws(case: AlignerCase, method: str, options: Mapping[str, Any] | None) -> Iterator[tuple[str, float]]:
    def run(a: nn.Module, b: nn.Module, **more: Any) -> Alignment:
        return align(
            a, b, case.example, method=method, data=case.data, symmetry=case.symmetry, options=options, **more
        )  # fmt: skip

    state, random = [_copied(m) for m in (case.a, case.b)], torch.random.get_rng_state()
    found = run(case.a, case.b)
    untouched = torch.equal(random, torch.random.get_rng_state())
    yield (
        "inputs",
        max(float(not untouched), *(_apart(x, _copied(m)) for x, m in zip(state, (case.a, case.b), strict=True))),
    )
    yield "function", _relative(found.model(case.example), case.b(case.example))
    yield "element", _apart(_copied(case.symmetry.act(found.element, case.b)), _copied(found.model))
    yield (
        "objective",
        max(
            _off(found.before, _distance(case, case.a, case.b)), _off(found.after, _distance(case, case.a, found.model))
        ),
    )
    yield "history", _history(found)
    yield "repeated", run(case.a, case.b).element.distance(found.element)
    twin = case.symmetry.act(permutations_of(case.symmetry.random(seed=5)), case.a)
    planted = run(case.a, twin)
    yield "planted", planted.after / max(planted.before, 1e-300)
    yield "partial", _partial(case, run)
    yield "degenerate", _degenerate(case, run)


def _partial(case: AlignerCase, run: Callable[..., Alignment]) -> float:
    """How far wires that were not named have moved."""
    first = next(w.name for w in case.symmetry.wires if w.group.permutes)
    element = run(case.a, case.b, wires=[first]).element
    return element.distance(element.only(first))


def _degenerate(case: AlignerCase, run: Callable[..., Alignment]) -> float:
    """Units that are zero, and units that are equal: the function must still be kept."""
    a, b = (copy_module(m) for m in (case.a, case.b))
    with torch.no_grad():
        for model, unit in ((a, 0), (b, 1)):
            layer = next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
            layer.weight[unit] = 0
            layer.weight[3] = layer.weight[2]
            if layer.bias is not None:
                layer.bias[unit] = 0
                layer.bias[3] = layer.bias[2]
    return _relative(run(a, b).model(case.example), b(case.example))


def _history(found: Alignment) -> float:
    """0 if every step reports a finite objective, and one of them the final objective."""
    objectives = torch.tensor([step.objective for step in found.history], dtype=torch.float64)
    if not len(objectives) or not bool(objectives.isfinite().all()):
        return float("inf")
    return min(_off(found.after, float(x)) for x in objectives)


def _distance(case: AlignerCase, a: nn.Module, b: nn.Module) -> float:
    """Σ ‖A − B‖² over the parameters that wires act on, by their names."""
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    moving = [n for n in left if n in case.symmetry.layouts and case.symmetry.layouts[n].moves]
    return float(sum((left[n] - right[n]).detach().square().sum() for n in moving))


def _off(x: float, y: float) -> float:
    return abs(x - y) / max(abs(x), abs(y), 1e-12)


def _relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).detach().norm() / y.detach().norm())


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def _apart(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> float:
    return max(float((x[n].double() - y[n].double()).abs().max()) for n in x)


# -- networks ----------------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """A small residual network with BatchNorm: one wire runs through the addition, one inside the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.inner, self.outer = nn.Conv2d(6, 5, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.outer(torch.relu(self.inner(x))))
        return self.head(x.mean((2, 3)))


def _perceptron(act: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), act(), nn.Linear(7, 6), act(), nn.Linear(6, 3))


def _cases(seed: int) -> Iterator[AlignerCase]:
    kinds: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "a perceptron with ReLU": (lambda: _perceptron(nn.ReLU), (4,)),
        "a perceptron with tanh": (lambda: _perceptron(nn.Tanh), (4,)),
        "a residual network with BatchNorm": (_Residual, (2, 5, 5)),
    }
    for number, (name, (make, shape)) in enumerate(kinds.items()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * seed + number)
            a, b = (make().double().eval() for _ in range(2))
            data = [(torch.randn(16, *shape, dtype=torch.float64), torch.randint(3, (16,))) for _ in range(2)]
        yield AlignerCase(name, a, b, data, symmetry(a, data[0][0]))
