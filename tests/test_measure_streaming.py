"""CKA in one pass over batches: the value of all samples at once, in memory that does not grow with them."""

from collections.abc import Iterator
from math import isnan

import numpy as np
import pytest
import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.measure.measure import find
from intertwine.measure.streaming import StreamingCKA


def dense(x: Tensor, y: Tensor, biased: bool = False) -> float:
    """CKA from full Gram matrices in float64: Song's three terms, or the double-centred form."""
    k, l = ((z := a.double().flatten(1).numpy() - a.double().flatten(1).numpy().mean(0)) @ z.T for a in (x, y))  # noqa: E741
    return hsic(k, l, biased) / float(np.sqrt(hsic(k, k, biased) * hsic(l, l, biased)))


def hsic(k: np.ndarray, l: np.ndarray, biased: bool) -> float:  # noqa: E741
    if biased:
        return float((k * l).sum())
    n = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    return float((k * l).sum() + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k @ l).sum())


def related(samples: int, width: int, other: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, width, dtype=torch.float64)
    y = (x @ torch.randn(width, other, dtype=torch.float64) / width**0.5 + 0.5).relu()
    return (x + y[:, :1]).to(dtype), (y + 0.3 * torch.randn(samples, other, dtype=torch.float64)).to(dtype)


def batches(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(t.split(size) for t in tensors), strict=True)


def streamed(x: Tensor, y: Tensor, size: int) -> StreamingCKA:
    stream = StreamingCKA()
    for a, b in batches(size, x, y):
        stream.update(a, b)
    return stream


@pytest.mark.parametrize("size", [1, 2, 7, 32, 64, 101, 1000])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("width", "other"), [(5, 8), (150, 3), (1, 1)])
def test_equal_to_all_samples_at_once(size: int, biased: bool, width: int, other: int) -> None:
    """Whatever the batches, a ragged last one and single samples included; also for more features than samples."""
    x, y = related(101, width, other)
    found = streamed(x, y, size).result(biased=biased)
    assert found.value == pytest.approx(dense(x, y, biased), abs=1e-12)
    assert found.value == pytest.approx(float(find(found.measure)(x, y)), abs=1e-12)
    assert found.measure == ("linear_cka_biased" if biased else "linear_cka")


@pytest.mark.parametrize("size", [1, 7, 101])
@pytest.mark.parametrize(("width", "other"), [(5, 8), (150, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_001_C18_kernel_alignment_is_not_centred(size: int, width: int, other: int, dtype: torch.dtype) -> None:
    """The shift by the first batch is taken back, scales and large means included."""
    x, y = related(101, width, other)
    x, y = (1e-3 * (x + 4)).to(dtype), (100 * y).to(dtype)
    k, l = (a.double() @ a.double().T for a in (x, y))  # noqa: E741
    expected = float((k * l).sum() / (k.square().sum() * l.square().sum()).sqrt())
    found = streamed(x, y, size).result(center=False)
    assert found.measure == "kernel_alignment"
    assert found.value == pytest.approx(expected, abs=1e-12 if dtype == torch.float64 else 1e-6)
    still = torch.full((101, 2), 3.0, dtype=dtype)
    k, l = still.double() @ still.double().T, l  # noqa: E741
    expected = float((k * l).sum() / (k.square().sum() * l.square().sum()).sqrt())
    assert streamed(still, y, size).result(center=False).value == pytest.approx(expected, abs=1e-6)
    assert streamed(x, 0 * y, size).result(center=False).degenerate == "y is zero everywhere"


@pytest.mark.parametrize("offset", [0.0, 100.0, -1e4])
@pytest.mark.parametrize("size", [16, 33])
def test_single_precision_with_means_far_from_zero(offset: float, size: int) -> None:
    x, y = related(256, 64, 32, torch.float32)
    x, y = x + offset, y - offset
    assert float(streamed(x, y, size).result()) == pytest.approx(dense(x, y), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_first_batch_need_not_be_like_the_rest(dtype: torch.dtype) -> None:
    """Sorted samples: the shift is far from the mean, and the first batch has another size."""
    x, y = related(200, 10, 12, dtype)
    order = x[:, 0].argsort()
    x, y = x[order], y[order]
    x[:20] = 1e-3 * x[:20]
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    assert float(streamed(x, y, 20).result()) == pytest.approx(dense(x, y), abs=tolerance)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_no_product_overflows(size: float) -> None:
    """A first batch that hardly varies, and others 1e30 times larger."""
    x, y = related(60, 4, 5, torch.float32)
    x[:10] *= 1e-30
    expected = dense(x, y)
    assert float(streamed(x * size, y * 1e15, 10).result()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x, y = related(100, 6, 7, dtype)
    assert float(streamed(x, y, 30).result()) == pytest.approx(dense(x, y), abs=1e-5)


def test_mixed_precision() -> None:
    x, y = related(100, 6, 7)
    assert float(streamed(x.float(), y, 30).result()) == pytest.approx(dense(x, y), abs=1e-6)


def test_many_layers_at_once() -> None:
    x, y = related(90, 6, 7)
    xs, ys = {"a": x, "b": x[:, :3].relu()}, {"c": y, "d": y.reshape(90, 7, 1, 1), "e": x.sin()}
    stream = StreamingCKA()
    for i in range(0, 90, 40):
        stream.update({k: v[i : i + 40] for k, v in xs.items()}, {k: v[i : i + 40] for k, v in ys.items()})
    found = stream.results()
    assert set(found) == {(a, b) for a in xs for b in ys}
    for (a, b), result in found.items():
        assert result.value == pytest.approx(dense(xs[a], ys[b]), abs=1e-12)
    assert stream.result("b", "e", biased=True).value == pytest.approx(dense(xs["b"], ys["e"], True), abs=1e-12)


def test_some_pairs_only() -> None:
    x, y = related(40, 6, 7)
    stream = StreamingCKA(pairs=[("a", "c")])
    stream.update({"a": x, "b": x}, {"c": y, "d": y})
    assert set(stream.results()) == {("a", "c")}
    with pytest.raises(InputError, match=r"'b' and 'd' were asked for. The pairs that are compared: \('a', 'c'\)"):
        stream.result("b", "d")
    with pytest.raises(InputError, match=r"pair \('a', 'z'\) was asked for"):
        StreamingCKA(pairs=[("a", "z")]).update({"a": x}, {"b": y})


def test_values_on_the_way() -> None:
    """A result can be read at any time, and more batches follow."""
    x, y = related(60, 6, 7)
    stream = StreamingCKA()
    for i, (a, b) in enumerate(batches(20, x, y), 1):
        stream.update(a, b)
        for biased in (False, True):
            assert float(stream.result(biased=biased)) == pytest.approx(
                dense(x[: 20 * i], y[: 20 * i], biased), abs=1e-12
            )


def test_memory_does_not_grow() -> None:
    def held(stream: StreamingCKA) -> int:
        layers = [*stream._sides[0].values(), *stream._sides[1].values()]
        things = [*layers, *(layer.products for layer in layers), *stream._pairs.values()]
        return sum(t.numel() for thing in things for t in vars(thing).values() if isinstance(t, Tensor))

    x, y = related(400, 6, 7)
    assert held(streamed(x[:20], y[:20], 20)) == held(streamed(x, y, 20)) < 300


def test_the_inputs_stay_as_they_are() -> None:
    x, y = related(30, 4, 4)
    before = x.clone(), y.clone()
    streamed(x, y, 10).result()
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_features(dtype: torch.dtype) -> None:
    x, y = related(50, 5, 6, dtype)
    dead = torch.full((50, 3), 0.1, dtype=dtype)
    result = streamed(x, dead, 16).result()
    assert result.degenerate == "y is constant: no feature varies over the samples"
    assert isnan(result.value)
    assert streamed(dead, y, 16).result(biased=True).degenerate == "x is constant: no feature varies over the samples"
    rounding = 1 + torch.arange(50, dtype=dtype)[:, None].remainder(2) * torch.finfo(dtype).eps
    assert streamed(x, rounding, 16).result().degenerate == "y is constant: no feature varies over the samples"
    some = torch.cat([x, dead], 1)
    assert float(streamed(some, y, 16).result()) == pytest.approx(
        dense(x, y), abs=1e-5 if dtype.itemsize < 8 else 1e-12
    )
    late = dead.clone()
    late[40:] = x[40:, :3]
    assert float(streamed(late, y, 16).result()) == pytest.approx(
        dense(late, y), abs=1e-5 if dtype.itemsize < 8 else 1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_to_align(dtype: torch.dtype) -> None:
    for n in (*range(4, 24), 64, 300):
        result = streamed(torch.eye(n, dtype=dtype), torch.randn(n, 3, dtype=dtype), 5).result()
        assert (
            result.degenerate == "x has no similarity between different samples to align: it is the same for all pairs"
        )


def test_too_few_samples() -> None:
    x, y = related(3, 2, 2)
    stream = streamed(x, y, 2)
    assert stream.result().degenerate == "it needs at least 4 samples, and there are 3"
    assert stream.result(biased=True).value == pytest.approx(dense(x, y, True), abs=1e-12)


def test_what_is_refused_is_not_taken_in_by_half() -> None:
    x, y = related(60, 5, 6)
    stream = streamed(x, y, 20)
    bad = x[:5].clone()
    bad[0, 0] = float("nan")
    for a, b, error, words in (
        (x[:5], y[:6], MismatchError, "'x' of xs 5, 'y' of ys 6"),
        (x[:5, :4], y[:5], MismatchError, r"widths: {'x': 5}; this one has {'x': 4}"),
        ({"other": x[:5]}, y[:5], MismatchError, r"this one has {'other': 5}"),
        (bad, y[:5], InputError, "1 entries that are not finite"),
        (x[:5], {}, MismatchError, "layers of these widths"),
        ({}, {}, MismatchError, "found no layer at all"),
    ):
        with pytest.raises(error, match=words):
            stream.update(a, b)
    assert stream.samples == 60
    assert float(stream.result()) == pytest.approx(dense(x, y), abs=1e-12)


def test_before_the_first_batch() -> None:
    with pytest.raises(InputError, match="none before the first batch"):
        StreamingCKA().result()
    assert StreamingCKA().results() == {}


@pytest.mark.parametrize("width", [2, 6, 8, 17])
def test_narrow_features_of_many_samples(width: int) -> None:
    """Libraries sum a narrow product in single precision one row after another: 5e-5 off at this length."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60_000, width, generator=g).relu()
    y = (x @ torch.randn(width, width, generator=g) + torch.randn(60_000, width, generator=g)).relu()
    a, b = (z.double().numpy() - z.double().numpy().mean(0) for z in (x, y))
    norms = (np.linalg.norm(left.T @ right) for left, right in ((a, b), (a, a), (b, b)))
    expected = next(norms) ** 2 / (next(norms) * next(norms))
    own = find("linear_cka_biased")
    assert float(own(x, y)) == pytest.approx(expected, abs=1e-6)
    assert float(streamed(x, y, 60_000).result(biased=True)) == pytest.approx(expected, abs=1e-6)
    few = torch.randn(2, 7, 60_000, generator=g).relu()
    assert float(own(*few)) == pytest.approx(float(own(*few.double())), abs=1e-6)
