"""Rules for matrix products: linear layers, matmul in all its spellings, einsum."""

from __future__ import annotations

from collections.abc import Sequence

from intertwine.graph.registry import rule
from intertwine.graph.tape import Factor, Label, Tape, Value


@rule("aten.linear")
def linear(t: Tape, x: Value, weight: Value, bias: Value | None = None) -> Value:
    lead = t.labels(x, 1)
    if weight.ndim == 1:
        return t.multilinear([[(x, [*lead, "in"]), (weight, ["in"])], [(bias, [])]], lead)
    return t.multilinear([[(x, [*lead, "in"]), (weight, ["out", "in"])], [(bias, ["out"])]], [*lead, "out"])


@rule("aten.bilinear")
def bilinear(t: Tape, a: Value, b: Value, weight: Value, bias: Value | None = None) -> Value:
    lead = t.labels(a, 1)
    terms = [[(a, [*lead, "left"]), (b, [*lead, "right"]), (weight, ["out", "left", "right"])], [(bias, ["out"])]]
    return t.multilinear(terms, [*lead, "out"])


@rule("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot", "aten.vdot", "aten.__matmul__")
def matmul(t: Tape, a: Value, b: Value, **_: object) -> Value:
    labels_a, labels_b, out = matmul_labels(a.shape, b.shape)
    return t.multilinear([[(a, labels_a), (b, labels_b)]], out)


@rule("aten.addmm", "aten.baddbmm", "aten.addmv")
def addmm(t: Tape, bias: Value, a: Value, b: Value, beta: int | float = 1, alpha: int | float = 1) -> Value:
    labels_a, labels_b, out = matmul_labels(a.shape, b.shape)
    return _with_bias(t, bias if beta != 0 else None, [(a, labels_a), (b, labels_b)], out)


@rule("aten.addbmm")
def addbmm(t: Tape, bias: Value, a: Value, b: Value, beta: int | float = 1, alpha: int | float = 1) -> Value:
    """The products of a whole batch, added up."""
    product: list[Factor] = [(a, ["batch", "row", "inner"]), (b, ["batch", "inner", "column"])]
    return _with_bias(t, bias if beta != 0 else None, product, ["row", "column"])


@rule("aten.addr")
def addr(t: Tape, bias: Value, a: Value, b: Value, beta: int | float = 1, alpha: int | float = 1) -> Value:
    return _with_bias(t, bias if beta != 0 else None, [(a, ["row"]), (b, ["column"])], ["row", "column"])


def _with_bias(t: Tape, bias: Value | None, product: Sequence[Factor], out: Sequence[Label]) -> Value:
    """A product and a bias that broadcasts; with beta = 0 these ops ignore the bias, whatever its values are."""
    if bias is None:
        return t.multilinear([product], out)
    last = out[len(out) - bias.ndim :]
    own = [
        label if n == t.shape[i - bias.ndim] else None
        for i, (label, n) in enumerate(zip(last, bias.shape, strict=True))
    ]
    return t.multilinear([product, [(bias, own)]], out)


@rule("aten.outer", "aten.ger")
def outer(t: Tape, a: Value, b: Value) -> Value:
    return t.multilinear([[(a, ["row"]), (b, ["column"])]], ["row", "column"])


@rule("aten.tensordot")
def tensordot(t: Tape, a: Value, b: Value, dims_a: Sequence[int], dims_b: Sequence[int]) -> Value:
    over_a, over_b = [d % a.ndim for d in dims_a], [d % b.ndim for d in dims_b]
    labels_a = [("sum", over_a.index(d)) if d in over_a else ("a", d) for d in range(a.ndim)]
    labels_b = [("sum", over_b.index(d)) if d in over_b else ("b", d) for d in range(b.ndim)]
    kept = [label for label in (*labels_a, *labels_b) if label[0] != "sum"]
    return t.multilinear([[(a, labels_a), (b, labels_b)]], kept)


@rule("aten.einsum")
def einsum(t: Tape, equation: str, operands: Sequence[Value], **_: object) -> Value:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    wild = max(
        (v.ndim - len(term.replace("...", "")) for v, term in zip(operands, terms, strict=True) if "..." in term),
        default=0,
    )
    labels = [_spell(term, v.ndim, wild) for v, term in zip(operands, terms, strict=True)]
    letters = [x for term in terms for x in term.replace("...", "")]
    implicit = "..." * ("..." in inputs) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    out = _spell(output if arrow else implicit, len(t.shape), wild)
    size: dict[Label, int] = {}
    for v, own in zip(operands, labels, strict=True):
        size |= {label: max(n, size.get(label, 1)) for label, n in zip(own, v.shape, strict=True)}
    # a letter of size 1 is spread over the entries it has elsewhere
    spread = [
        (v, [label if n == size[label] else None for label, n in zip(own, v.shape, strict=True)])
        for v, own in zip(operands, labels, strict=True)
    ]
    return t.multilinear([spread], out)


def _spell(term: str, ndim: int, wild: int) -> list[Label]:
    before, dots, after = term.partition("...")
    hidden = ndim - len(before) - len(after) if dots else 0
    return [*before, *(("...", wild - hidden + i) for i in range(hidden)), *after]


def matmul_labels(a: Sequence[int], b: Sequence[int]) -> tuple[list[Label | None], list[Label | None], list[Label]]:
    """Labels of a, b and the result of a matrix product with broadcast batch axes."""
    batch_a, batch_b = list(a[:-2]), list(b[:-2])
    depth = max(len(batch_a), len(batch_b))
    out: list[Label] = [("batch", i) for i in range(depth)]

    def lead(batch: list[int], other: list[int]) -> list[Label | None]:
        full = [1] * (depth - len(other)) + other
        shift = depth - len(batch)
        return [None if n == 1 and full[shift + i] != 1 else ("batch", shift + i) for i, n in enumerate(batch)]

    labels_a = [*lead(batch_a, batch_b), *(["row"] if len(a) > 1 else []), "inner"]
    labels_b = [*lead(batch_b, batch_a), "inner", *(["column"] if len(b) > 1 else [])]
    out += (["row"] if len(a) > 1 else []) + (["column"] if len(b) > 1 else [])
    return labels_a, labels_b, out
