"""Rules for linear maps: linear layers, matrix products, einsum, convolutions, complex numbers and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertwine.graph.builder import PINNED, Factor, GraphBuilder, rule
from intertwine.graph.constraints import Label, Value
from intertwine.graph.rules.elementwise import out_labels, spread

# ----------------------------------------------------------------------------------------------------
# Rules for matrix products: linear layers, matmul in all its spellings, einsum.


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
    over_a, over_b = [d % a.ndim for d in dims_a], [d % b.ndim for d in dims_b]
    labels_a = [("sum", over_a.index(d)) if d in over_a else ("a", d) for d in range(a.ndim)]
    labels_b = [("sum", over_b.index(d)) if d in over_b else ("b", d) for d in range(b.ndim)]
    kept = [label for label in (*labels_a, *labels_b) if label[0] != "sum"]
    return t.multilinear([[(a, labels_a), (b, labels_b)]], kept)


@rule("aten.einsum")
def einsum(t: GraphBuilder, equation: str, operands: Sequence[Value], **_: object) -> Value:
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


# ----------------------------------------------------------------------------------------------------
# Rules for convolutions of any dimension, grouped, depthwise and transposed.
#
# Channels of a grouped convolution are read as (group, channel within the group); everything else follows.


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def conv(
    t: GraphBuilder,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> Value:
    return _convolve(t, x, weight, bias, groups, transposed=False)


@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def conv_transpose(
    t: GraphBuilder,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: object = 1,
    padding: object = 0,
    output_padding: object = 0,
    groups: int = 1,
    dilation: object = 1,
) -> Value:
    return _convolve(t, x, weight, bias, groups, transposed=True)


@rule("aten.convolution", "aten._convolution")
def convolution(
    t: GraphBuilder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    *_: object,
) -> Value:
    return _convolve(t, x, weight, bias, groups, transposed)


def _convolve(t: GraphBuilder, x: Value, weight: Value, bias: Value | None, groups: int, transposed: bool) -> Value:
    space = weight.ndim - 2
    batch: list[Label] = ["batch"] * (x.ndim - space - 1)
    lead, spatial = len(batch), [PINNED] * space
    kernel = [PINNED] * space
    if groups == 1:
        channels = ["in", "out"] if transposed else ["out", "in"]
        terms = [[(x, [*batch, "in", *spatial]), (weight, [*channels, *kernel])], [(bias, ["out"])]]
        return t.multilinear(terms, [*batch, "out", *spatial])
    grouped_x = t.reshape(x, (*x.shape[:lead], groups, x.shape[lead] // groups, *x.shape[lead + 1 :]))
    grouped_w = t.reshape(weight, (groups, weight.shape[0] // groups, *weight.shape[1:]))
    out = t.shape[lead]
    grouped_b = t.reshape(bias, (groups, out // groups)) if bias is not None else None
    channels = ["group", "in", "out"] if transposed else ["group", "out", "in"]
    terms = [
        [(grouped_x, [*batch, "group", "in", *spatial]), (grouped_w, [*channels, *kernel])],
        [(grouped_b, ["group", "out"])],
    ]
    shape = (*t.shape[:lead], groups, out // groups, *t.shape[lead + 1 :])
    return t.reshape(t.multilinear(terms, [*batch, "group", "out", *spatial], shape), t.shape)


# ----------------------------------------------------------------------------------------------------
# Rules for complex numbers made of real ones, and for Fourier transforms.
#
# They are linear over the reals, so real scales and signs pass along every axis but the transformed one.


@rule("aten.view_as_complex", "aten.view_as_complex_copy")
def view_as_complex(t: GraphBuilder, x: Value) -> Value:
    labels = t.labels(x, 1)
    return t.multilinear([[(x, [*labels, PINNED])]], labels)


@rule("aten.view_as_real", "aten.view_as_real_copy")
def view_as_real(t: GraphBuilder, x: Value) -> Value:
    labels = t.labels(x)
    return t.multilinear([[(x, labels)]], [*labels, PINNED])


@rule("aten.complex")
def from_parts(t: GraphBuilder, real: Value, imaginary: Value) -> Value:
    return t.multilinear([[(real, spread(t, real))], [(imaginary, spread(t, imaginary))]], out_labels(t))


@rule("aten.polar")
def polar(t: GraphBuilder, length: Value, angle: Value) -> Value:
    if not angle.live and angle.shape == t.shape:  # a rotary table: positions along all of it matter
        why = f"it meets a constant in {t.here}"
        t.boundary(length, why)
        return t.fixed(t.shape, why, floating=False)
    return t.joint([(length, spread(t, length)), (angle, spread(t, angle))], out_labels(t))


@rule("aten.conj", "aten._conj", "aten.conj_physical", "aten.real", "aten.imag")
def conjugate(t: GraphBuilder, x: Value) -> Value:
    labels = t.labels(x)
    return t.multilinear([[(x, labels)]], labels)


@rule("aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_hfft", "aten.fft_ihfft")
def fourier(t: GraphBuilder, x: Value, n: int | None = None, dim: int = -1, *_: Any) -> Value:
    return _transform(t, x, (dim,))


@rule(
    "aten.fft_fft2", "aten.fft_ifft2", "aten.fft_rfft2", "aten.fft_irfft2", "aten.fft_fftn", "aten.fft_ifftn",
    "aten.fft_rfftn", "aten.fft_irfftn", "aten.fft_fftshift", "aten.fft_ifftshift",
)  # fmt: skip
def fourier_over_many(t: GraphBuilder, x: Value, *args: Any) -> Value:
    assert t.call is not None
    at, default = (0, None) if "shift" in t.call.op else (1, (-2, -1) if "fft2" in t.call.op else None)
    dims: Sequence[int] | int | None = args[at] if len(args) > at else default
    return _transform(t, x, (dims,) if isinstance(dims, int) else dims)


def _transform(t: GraphBuilder, x: Value, dims: Sequence[int] | None) -> Value:
    """Every entry along the transformed axes becomes a mixture of all of them."""
    over = range(x.ndim) if dims is None else [d % x.ndim for d in dims]
    labels = [PINNED if d in over else label for d, label in enumerate(t.labels(x))]
    return t.multilinear([[(x, labels)]], labels)
