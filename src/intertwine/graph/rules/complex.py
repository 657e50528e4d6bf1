"""Rules for complex numbers made of real ones, and for Fourier transforms.

They are linear over the reals, so real scales and signs pass along every axis but the transformed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intertwine.graph.registry import rule
from intertwine.graph.rules.elementwise import out_labels, spread
from intertwine.graph.tape import PINNED, Tape, Value


@rule("aten.view_as_complex", "aten.view_as_complex_copy")
def view_as_complex(t: Tape, x: Value) -> Value:
    labels = t.labels(x, 1)
    return t.multilinear([[(x, [*labels, PINNED])]], labels)


@rule("aten.view_as_real", "aten.view_as_real_copy")
def view_as_real(t: Tape, x: Value) -> Value:
    labels = t.labels(x)
    return t.multilinear([[(x, labels)]], [*labels, PINNED])


@rule("aten.complex")
def from_parts(t: Tape, real: Value, imaginary: Value) -> Value:
    return t.multilinear([[(real, spread(t, real))], [(imaginary, spread(t, imaginary))]], out_labels(t))


@rule("aten.polar")
def polar(t: Tape, length: Value, angle: Value) -> Value:
    if not angle.live and angle.shape == t.shape:  # a rotary table: positions along all of it matter
        why = f"it meets a constant in {t.here}"
        t.boundary(length, why)
        return t.fixed(t.shape, why, floating=False)
    return t.joint([(length, spread(t, length)), (angle, spread(t, angle))], out_labels(t))


@rule("aten.conj", "aten._conj", "aten.conj_physical", "aten.real", "aten.imag")
def conjugate(t: Tape, x: Value) -> Value:
    labels = t.labels(x)
    return t.multilinear([[(x, labels)]], labels)


@rule("aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_hfft", "aten.fft_ihfft")
def fourier(t: Tape, x: Value, n: int | None = None, dim: int = -1, *_: Any) -> Value:
    return _transform(t, x, (dim,))


@rule(
    "aten.fft_fft2", "aten.fft_ifft2", "aten.fft_rfft2", "aten.fft_irfft2", "aten.fft_fftn", "aten.fft_ifftn",
    "aten.fft_rfftn", "aten.fft_irfftn", "aten.fft_fftshift", "aten.fft_ifftshift",
)  # fmt: skip
def fourier_over_many(t: Tape, x: Value, *args: Any) -> Value:
    assert t.call is not None
    at, default = (0, None) if "shift" in t.call.op else (1, (-2, -1) if "fft2" in t.call.op else None)
    dims: Sequence[int] | int | None = args[at] if len(args) > at else default
    return _transform(t, x, (dims,) if isinstance(dims, int) else dims)


def _transform(t: Tape, x: Value, dims: Sequence[int] | None) -> Value:
    """Every entry along the transformed axes becomes a mixture of all of them."""
    over = range(x.ndim) if dims is None else [d % x.ndim for d in dims]
    labels = [PINNED if d in over else label for d, label in enumerate(t.labels(x))]
    return t.multilinear([[(x, labels)]], labels)
