"""Rules for linear maps: linear layers, matrix products, einsum, convolutions, complex numbers, Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intertwine.graph.builder import PINNED, Factor, GraphBuilder, rule, spread_labels
from intertwine.graph.constraints import Label, Value

# -- Matrix products: linear layers, matmul in all its spellings, einsum -----------------------------------------------


@rule("aten.linear")
def linear(t: GraphBuilder, x: Value, weight: Value, bias: Value | None = None) -> Value:
    lead = t.labels(x, 1)
    if weight.ndim == 1:
        return t.multilinear([[(x, [*lead, "in"]), (weight, ["in"])], [(bias, [])]], lead)
    return t.multilinear([[(x, [*lead, "in"]), (weight, ["out", "in"])], [(bias, ["out"])]], [*lead, "out"])


@rule("aten.bilinear")
def bilinear(t: GraphBuilder, a: Value, b: Value, weight: Value, bias: Value | None = None) -> Value:
    lead = t.labels(a, 1)
    terms = [[(a, [*lead, "left"]), (b, [*lead, "right"]), (weight, ["out", "left", "right"])], [(bias, ["out"])]]
    return t.multilinear(terms, [*lead, "out"])


@rule("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot", "aten.vdot", "aten.__matmul__")
def matmul(t: GraphBuilder, a: Value, b: Value, **_: object) -> Value:
    labels_a, labels_b, out = matmul_labels(a.shape, b.shape)
    return t.multilinear([[(a, labels_a), (b, labels_b)]], out)


@rule("aten.addmm", "aten.baddbmm", "aten.addmv")
def addmm(t: GraphBuilder, bias: Value, a: Value, b: Value, beta: int | float = 1, alpha: int | float = 1) -> Value:
    labels_a, labels_b, out = matmul_labels(a.shape, b.shape)
    return _with_bias(t, bias if beta != 0 else None, [(a, labels_a), (b, labels_b)], out)


@rule("aten.addbmm")
def addbmm(t: GraphBuilder, bias: Value, a: Value, b: Value, beta: int | float = 1, alpha: int | float = 1) -> Value:
    """The products of a whole batch, added up."""
    product: list[Factor] = [(a, ["batch", "row", "inner"]), (b, ["batch", "inner", "column"])]
    return _with_bias(t, bias if beta != 0 else None, product, ["row", "column"])


@rule("aten.addr")
def addr(t: GraphBuilder, bias: Value, a: Value, b: Value, beta: int | float = 1, alpha: int | float = 1) -> Value:
    return _with_bias(t, bias if beta != 0 else None, [(a, ["row"]), (b, ["column"])], ["row", "column"])


def _with_bias(t: GraphBuilder, bias: Value | None, product: Sequence[Factor], out: Sequence[Label]) -> Value:
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
def outer(t: GraphBuilder, a: Value, b: Value) -> Value:
    return t.multilinear([[(a, ["row"]), (b, ["column"])]], ["row", "column"])


@rule("aten.tensordot")
def tensordot(t: GraphBuilder, a: Value, b: Value, dims_a: Sequence[int], dims_b: Sequence[int]) -> Value:
    sides = []
    for side, x, dims in (("a", a, dims_a), ("b", b, dims_b)):
        over = [d % x.ndim for d in dims]
        sides.append([("sum", over.index(d)) if d in over else (side, d) for d in range(x.ndim)])
    kept = [label for label in (*sides[0], *sides[1]) if label[0] != "sum"]
    return t.multilinear([[(a, sides[0]), (b, sides[1])]], kept)


@rule("aten.einsum")
def einsum(t: GraphBuilder, equation: str, operands: Sequence[Value], **_: object) -> Value:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    pairs = list(zip(operands, terms, strict=True))
    wild = max((v.ndim - len(term.replace("...", "")) for v, term in pairs if "..." in term), default=0)
    labels = [_spell(term, v.ndim, wild) for v, term in pairs]
    letters = [x for term in terms for x in term.replace("...", "")]
    implicit = "..." * ("..." in inputs) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    out = _spell(output if arrow else implicit, len(t.shape), wild)
    size: dict[Label, int] = {}
    for v, own in zip(operands, labels, strict=True):
        size |= {label: max(n, size.get(label, 1)) for label, n in zip(own, v.shape, strict=True)}
    # a letter of size 1 is spread over the entries it has elsewhere
    own_labels = [
        [label if n == size[label] else None for label, n in zip(own, v.shape, strict=True)]
        for v, own in zip(operands, labels, strict=True)
    ]
    return t.multilinear([list(zip(operands, own_labels, strict=True))], out)


def _spell(term: str, ndim: int, wild: int) -> list[Label]:
    before, dots, after = term.partition("...")
    hidden = ndim - len(before) - len(after) if dots else 0
    return [*before, *(("...", wild - hidden + i) for i in range(hidden)), *after]


def matmul_labels(a: Sequence[int], b: Sequence[int]) -> tuple[list[Label | None], list[Label | None], list[Label]]:
    """Labels of a, b and the result of a matrix product with broadcast batch axes."""
    batch = torch.broadcast_shapes(a[:-2], b[:-2])
    rows, columns = ["row"] * (len(a) > 1), ["column"] * (len(b) > 1)
    lead_a, lead_b = spread_labels(a[:-2], batch), spread_labels(b[:-2], batch)
    return [*lead_a, *rows, "inner"], [*lead_b, "inner", *columns], [*spread_labels(batch, batch), *rows, *columns]


# -- Convolutions: channels of a grouped one are read as (group, channel within the group) -----------------------------


@rule(
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose1d", "aten.conv_transpose2d",
    "aten.conv_transpose3d",
)  # fmt: skip
def conv(t: GraphBuilder, x: Value, weight: Value, bias: Value | None = None, *options: Any, **named: Any) -> Value:
    """`options`: stride, padding, dilation, groups; transposed: stride, padding, output padding, groups, dilation."""
    groups = options[3] if len(options) > 3 else named.get("groups", 1)
    return _convolve(t, x, weight, bias, groups, "transpose" in t.op)


@rule("aten.convolution", "aten._convolution")
def convolution(t: GraphBuilder, x: Value, weight: Value, bias: Value | None, *options: Any) -> Value:
    _stride, _padding, _dilation, transposed, _output_padding, groups = options[:6]
    return _convolve(t, x, weight, bias, groups, transposed)


def _convolve(t: GraphBuilder, x: Value, weight: Value, bias: Value | None, groups: int, transposed: bool) -> Value:
    lead = x.ndim - weight.ndim + 1  # 0 for an image without a batch
    batch: list[Label] = ["batch"] * lead
    space = [PINNED] * (weight.ndim - 2)
    channels: list[Label] = ["in", "out"] if transposed else ["out", "in"]
    if groups == 1:
        terms = [[(x, [*batch, "in", *space]), (weight, [*channels, *space])], [(bias, ["out"])]]
        return t.multilinear(terms, [*batch, "out", *space])
    out = t.shape[lead]
    x = t.reshape(x, (*x.shape[:lead], groups, x.shape[lead] // groups, *x.shape[lead + 1 :]))
    weight = t.reshape(weight, (groups, weight.shape[0] // groups, *weight.shape[1:]))
    bias = t.reshape(bias, (groups, out // groups)) if bias is not None else None
    product = [(x, [*batch, "group", "in", *space]), (weight, ["group", *channels, *space])]
    shape = (*t.shape[:lead], groups, out // groups, *t.shape[lead + 1 :])
    terms = [product, [(bias, ["group", "out"])]]
    return t.reshape(t.multilinear(terms, [*batch, "group", "out", *space], shape), t.shape)


# -- Complex numbers and Fourier transforms: linear over the reals along every axis but the transformed one ------------


@rule("aten.view_as_complex", "aten.view_as_complex_copy")
def view_as_complex(t: GraphBuilder, x: Value) -> Value:
    return t.linear(x, [*t.labels(x, 1), PINNED], t.labels(x, 1))


@rule("aten.view_as_real", "aten.view_as_real_copy")
def view_as_real(t: GraphBuilder, x: Value) -> Value:
    return t.linear(x, t.labels(x), [*t.labels(x), PINNED])


@rule("aten.complex")
def from_parts(t: GraphBuilder, real: Value, imaginary: Value) -> Value:
    return t.multilinear([[(real, t.spread(real))], [(imaginary, t.spread(imaginary))]], t.out)


@rule("aten.polar")
def polar(t: GraphBuilder, length: Value, angle: Value) -> Value:
    if not angle.live and angle.shape == t.shape:  # a rotary table: positions along all of it matter
        why = f"it meets a constant in {t.here}"
        t.boundary(length, why)
        return t.fixed(t.shape, why, floating=False)
    return t.joint([(length, t.spread(length)), (angle, t.spread(angle))], t.out)


@rule("aten.conj", "aten._conj", "aten.conj_physical", "aten.real", "aten.imag")
def conjugate(t: GraphBuilder, x: Value) -> Value:
    return t.linear(x, t.labels(x), t.labels(x))


@rule("aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_hfft", "aten.fft_ihfft")
def fourier(t: GraphBuilder, x: Value, n: int | None = None, dim: int = -1, *_: Any) -> Value:
    return t.linear(x, t.pinned(x, [dim]), t.pinned(x, [dim]))


@rule(
    "aten.fft_fft2", "aten.fft_ifft2", "aten.fft_rfft2", "aten.fft_irfft2", "aten.fft_fftn", "aten.fft_ifftn",
    "aten.fft_rfftn", "aten.fft_irfftn", "aten.fft_fftshift", "aten.fft_ifftshift",
)  # fmt: skip
def fourier_over_many(t: GraphBuilder, x: Value, *args: Any) -> Value:
    at, default = (0, None) if "shift" in t.op else (1, (-2, -1) if "fft2" in t.op else None)
    dims: Sequence[int] | int | None = args[at] if len(args) > at else default
    labels = t.pinned(x, (dims,) if isinstance(dims, int) else range(x.ndim) if dims is None else dims)
    return t.linear(x, labels, labels)
