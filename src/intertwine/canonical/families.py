"""Families: which of many networks of one architecture are the same up to a symmetry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from intertwine.canonical.equivalence import difference, equivalent_forms
from intertwine.canonical.form import Form
from intertwine.symmetry.element import Element


@dataclass(frozen=True)
class Member:
    """One network of a family. `element` takes it to the first of the family, up to `difference`."""

    name: str
    element: Element = field(repr=False)
    difference: float
    how: str  # "identical", "moved" (bits differ by the symmetry and rounding only) or "moved, with noise"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "how": self.how, "difference": self.difference}


@dataclass(frozen=True)
class Family:
    """Networks that are one up to a symmetry; the first that was met stands for all."""

    first: str
    fingerprint: str
    copies: tuple[Member, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first, "fingerprint": self.fingerprint, "copies": [c.to_dict() for c in self.copies]}


def families(forms: Iterable[tuple[str, Form]], tol: float = 1e-6) -> tuple[Family, ...]:
    """Group networks by equivalence. Every copy was checked against the first of its family, weight by weight.

    Args:
        forms: (name, form) of networks of one architecture; read one by one, the first of each family is kept.
        tol: as for `intertwine.equivalent`.
    """
    firsts: list[tuple[str, Form, str]] = []
    copies: list[list[Member]] = []
    for name, form in forms:
        mark = form.fingerprint()
        for i, (_, first, first_mark) in enumerate(firsts):
            element = equivalent_forms(first, form, tol)
            if element is not None:
                copies[i].append(_member(name, first, form, element, mark == first_mark))
                break
        else:
            firsts.append((name, form, mark))
            copies.append([])
    return tuple(Family(n, mark, tuple(c)) for (n, _, mark), c in zip(firsts, copies, strict=True))


def _member(name: str, first: Form, form: Form, element: Element, same_mark: bool) -> Member:
    if all(bool((first.weights[n] == form.weights[n]).all()) for n in first.weights):
        return Member(name, element, 0.0, "identical")
    return Member(name, element, difference(first, form, element), "moved" if same_mark else "moved, with noise")
