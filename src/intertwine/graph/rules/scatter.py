"""Rules for ops that add or write rows at places given by a table: index_add, scatter and its reductions.

What graph networks do with messages. The axis that is written by position keeps its order; features pass.
"""

from __future__ import annotations

from typing import Any

from intertwine.graph.registry import rule
from intertwine.graph.rules.indexing import pin_table
from intertwine.graph.tape import PINNED, Label, Law, Tape, Value


@rule("aten.index_add")
def index_add(t: Tape, x: Value, dim: int, index: Value, source: Value, **_: Any) -> Value:
    pin_table(t, index)
    labels = [PINNED if d == dim % x.ndim else label for d, label in enumerate(t.labels(x))]
    return t.multilinear([[(x, labels)], [(source, labels)]], labels)


@rule("aten.scatter.src", "aten.scatter_.src", "aten.scatter_add")
def scatter(t: Tape, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter(t, x, dim, index, source, positive=False)


@rule("aten.scatter_reduce.two", "aten.scatter_reduce_.two")
def scatter_reduce(t: Tape, x: Value, dim: int, index: Value, source: Value, reduce: str, **_: Any) -> Value:
    if reduce == "prod":
        raise ValueError("products of a number of rows that differs from place to place")
    return _scatter(t, x, dim, index, source, positive=reduce in ("amax", "amin"))


def _scatter(t: Tape, x: Value, dim: int, index: Value, source: Value, positive: bool) -> Value:
    """Old and new entries carry the same scale; extrema pass positive ones only."""
    whole = [len({v.shape[d] for v in (x, index, source)}) == 1 and d != dim % x.ndim for d in range(x.ndim)]
    labels: list[Label] = [label if whole[d] else PINNED for d, label in enumerate(t.labels(x))]
    real = ({0: 1, 3: -1}, {2: 1, 3: -1}, {1: 1})
    law = Law(real, ({0: 1}, {1: 1}, {2: 1}, {3: 1}) if positive else real)
    operands = [(v, labels) for v in (x, index, source)]
    return t.joint(operands, labels, laws={label: law for label in labels if label is not PINNED})
