"""Measures in one pass over batches: the value of all samples at once, in constant memory."""

import re
from collections.abc import Callable, Iterator
from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import intertwine as it
from intertwine.data.features import Features, features
from intertwine.errors import InputError, MismatchError
from intertwine.measure import compare as module
from intertwine.measure.cca import span
from intertwine.measure.compare import STREAMED
from intertwine.measure.measure import Measure, Representation, Result, find
from intertwine.measure.streaming import StreamingCKA, StreamingMoments


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
    with pytest.raises(InputError, match=r"'b' and 'd' are not compared. The pairs that are: \('a', 'c'\)"):
        stream.result("b", "d")
    with pytest.raises(InputError, match=r"Unknown pair \('a', 'z'\)"):
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


NAMES = [
    "cca", "svcca", "pwcca", "r2", "orthogonal_procrustes", "permutation_procrustes", "relu_procrustes", "soft_matching"
]  # fmt: skip
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-9}


def random(n: int, p: int, q: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two related representations in float64."""
    g = torch.Generator().manual_seed(seed)
    x, w, noise = (torch.randn(*size, generator=g, dtype=torch.float64) for size in ((n, p), (p, q), (n, q)))
    return x, x @ w / p**0.5 + noise


def dead() -> tuple[Tensor, Tensor]:
    """ReLU features with dead and repeated channels."""
    x, y = (torch.relu(z - 0.3) for z in random(301, 12, 9, 1))
    x[:, [2, 5]] = 0
    return torch.cat([x, x[:, :3], 3 * x[:, 6:8]], 1), y


def drifting() -> tuple[Tensor, Tensor]:
    """Sorted data: the first batch is far from the rest."""
    x, y = random(200, 8, 5, 2)
    x[:50] += 1000
    return x, y


def changed(first: Tensor | float = 1.0, second: float = 1.0, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Features in other units, with a mean."""
    x, y = random(300, 12, 9)
    return x * first + offset, y * second + offset


CASES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "random": lambda: random(300, 12, 9),
    "offset": lambda: changed(offset=100),
    "large and small": lambda: changed(1e6, 1e-6),
    "very large and small": lambda: changed(1e30, 1e-30),
    "features of many scales": lambda: changed(torch.logspace(-4, 4, 12, dtype=torch.float64)),
    "dead": dead,
    "few directions": lambda: (random(300, 6, 9)[0] @ random(6, 20, 1, 5)[0], random(300, 6, 9)[1]),
    "drifting": drifting,
    "itself": lambda: (random(300, 12, 9)[0],) * 2,
    "fewer samples than features": lambda: random(10, 30, 20),
    "fewer samples than one side": lambda: random(25, 30, 5),
    "as many directions as samples": lambda: random(31, 30, 5),
    "a few more samples": lambda: random(40, 30, 5),
    "constant": lambda: (random(60, 5, 4)[0], torch.full((60, 4), 3.3, dtype=torch.float64)),
    "rounding only": lambda: (random(60, 5, 4)[0], 1e4 + 1e-3 * random(60, 5, 4)[1]),
    "two samples": lambda: random(2, 3, 4),
    "one sample": lambda: random(1, 3, 4),
}


def moment_results(
    measures: list[Measure], x: Tensor, y: Tensor, size: int = 47, baseline: bool = True
) -> list[Result]:
    stream = StreamingMoments([("x", "y")], baseline)
    for a, b in zip(x.split(size), y.split(size), strict=True):
        stream.update({"x": a}, {"y": b})
    return stream.results(measures, "x", "y")


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_one_pass_gives_what_all_samples_give(case: str, dtype: torch.dtype) -> None:
    x, y = (z.to(dtype) for z in CASES[case]())
    for name, got in zip(NAMES, moment_results([find(name) for name in NAMES], x, y), strict=True):
        expected = find(name)(x, y)
        assert got.degenerate == expected.degenerate, name
        notes = tuple(note for note in got.notes if not note.startswith("one pass"))
        assert notes == expected.notes, name
        if expected.degenerate is None:
            assert got.value == pytest.approx(expected.value, abs=TOLERANCE[dtype]), name
        assert (got.baseline is None) == (expected.baseline is None), name


@pytest.mark.parametrize("size", [1, 2, 13, 299, 300])
def test_the_size_of_batches_does_not_matter(size: int) -> None:
    x, y = random(300, 12, 9)
    results = moment_results([find(name) for name in NAMES], x, y, size)
    for name, got in zip(NAMES, results, strict=True):
        assert got.value == pytest.approx(find(name)(x, y).value, abs=1e-12), name


@pytest.mark.parametrize("name", ["r2", "orthogonal_procrustes", "permutation_procrustes", "relu_procrustes"])
def test_means_stay_where_features_are_not_centred(name: str) -> None:
    x, y = random(300, 12, 9)
    x, y = x + 2, y - torch.arange(9)
    measure = find(name, center=False)
    (got,) = moment_results([measure], x, y)
    assert got.value == pytest.approx(measure(x, y).value, abs=1e-12)
    assert got.value != pytest.approx(find(name)(x, y).value, abs=1e-3)


def test_squares_neither_overflow_nor_vanish() -> None:
    """The first batch is zero, so that nothing is known yet of how large features are."""
    x, y = random(100, 5, 4)
    x[:20], y[:20] = 0, 0
    for name, got in zip(NAMES, moment_results([find(name) for name in NAMES], 1e200 * x, 1e-200 * y, 20), strict=True):
        assert got.value == pytest.approx(find(name)(x, y).value, abs=1e-9), name


# -- against formulas of their own -------------------------------------------------------------------------------------


def reference_values(x: Tensor, y: Tensor) -> dict[str, float]:
    """The measures by numpy and scipy, from all samples."""
    a, b = ((z - z.mean(0)).double().numpy() for z in (x, y))
    fit = a @ np.linalg.lstsq(a, b, rcond=None)[0]
    unit = a / np.linalg.norm(a), b / np.linalg.norm(b)
    turned = np.linalg.svd(unit[0].T @ unit[1], compute_uv=False).sum()
    products = unit[0].T @ unit[1]
    matched = products[linear_sum_assignment(-products)].sum()
    return {
        "cca": float(np.cos(subspace_angles(a, b)).mean()),
        "r2": float((fit**2).sum() / (b**2).sum()),
        "orthogonal_procrustes": 1 - np.sqrt(2 - 2 * turned) / 2,
        "permutation_procrustes": 1 - np.sqrt(2 - 2 * matched) / 2,
    }


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_dense_formulas(dtype: torch.dtype, offset: float) -> None:
    x, y = ((z + offset).to(dtype) for z in random(301, 12, 9, 3))
    expected = reference_values(x.double(), y.double())
    for name, got in zip(expected, moment_results([find(name) for name in expected], x, y), strict=True):
        assert got.value == pytest.approx(expected[name], abs=TOLERANCE[dtype]), name


def test_asymmetric_measures_keep_their_direction() -> None:
    x, y = random(300, 12, 3)
    for name in ("r2", "pwcca"):
        there, back = (moment_results([find(name)], *pair)[0].value for pair in ((x, y), (y, x)))
        assert there == pytest.approx(find(name)(x, y).value, abs=1e-12)
        assert back == pytest.approx(find(name)(y, x).value, abs=1e-12)
        assert abs(there - back) > 5e-4


# -- maps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "p", "q"), [(300, 12, 9), (300, 9, 12)])
def test_alignments_are_in_the_coordinates_of_the_features(n: int, p: int, q: int) -> None:
    x, y = random(n, p, q)
    x, y = 1000 * x + 5, y / 1000
    for name, got in zip(NAMES[4:], moment_results([find(name) for name in NAMES[4:]], x, y), strict=True):
        expected = find(name)(x, y).alignment
        assert expected is not None
        assert got.alignment is not None
        for part in ("permutation", "scales", "matrix", "plan"):
            here, there = getattr(got.alignment, part), getattr(expected, part)
            assert (here is None) == (there is None)
            assert here is None or torch.allclose(here, there, rtol=1e-6, atol=1e-9 * float(there.abs().max())), part


def test_a_rotation_of_fewer_samples_than_features() -> None:
    """The map is zero on what no sample has; on what they have it is the one that all samples give."""
    x, y = random(20, 30, 25)
    (got,), expected = (
        moment_results([find("orthogonal_procrustes")], x, y),
        find("orthogonal_procrustes")(x, y),
    )
    maps = [a.matrix for a in (got.alignment, expected.alignment) if a is not None and a.matrix is not None]
    turned = [(y - y.mean(0)) @ matrix for matrix in maps]
    assert torch.allclose(turned[0], turned[1], atol=1e-9)
    assert int(torch.linalg.matrix_rank(maps[0])) <= 20


def test_a_rotation_stays_whole_where_features_are_dead() -> None:
    """With enough samples the map is orthogonal even where both sides have few directions."""
    x, y = random(300, 3, 3)
    x, y = (torch.cat([z, torch.zeros(300, 9, dtype=z.dtype)], 1) for z in (x, y))
    (got,) = moment_results([find("orthogonal_procrustes")], x, y)
    assert got.alignment is not None
    assert got.alignment.matrix is not None
    gram = got.alignment.matrix.T @ got.alignment.matrix
    assert torch.allclose(gram, gram[0, 0] * torch.eye(12, dtype=gram.dtype), atol=1e-9)


# -- what unrelated features score -------------------------------------------------------------------------------------


def cycle(sizes: list[int]) -> Tensor:
    """Which sample of y meets each of x: read off the products of one-hot features."""
    n = sum(sizes)
    stream = StreamingMoments([("x", "y")], baseline=True)
    for rows in torch.eye(n, dtype=torch.float64).split(sizes):
        stream.update({"x": rows}, {"y": rows})
    first, last = stream._sides[1]["y"].first, stream._sides[0]["x"].waiting
    found = stream._shuffled["x", "y"].closed(last, first) * stream._sides[0]["x"].scale ** 2 + 1 / n
    assert torch.allclose(found, found.round(), atol=1e-9)
    assert found.round().sum(0).eq(1).all()
    return found.round().argmax(1)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2], [40, 1], [1, 40], [47, 47, 47, 6]])
def test_every_sample_meets_another_once(sizes: list[int]) -> None:
    meets = cycle(sizes)
    n, seen, at = len(meets), set(), 0
    for _ in range(n):
        at = int(meets[at])
        seen.add(at)
    assert len(seen) == n
    assert not meets.eq(torch.arange(n)).any()


@pytest.mark.parametrize("sizes", [[47, 47, 47, 6], [40, 1], [10, 10, 5]])
def test_the_baseline_is_that_of_samples_in_another_order(sizes: list[int]) -> None:
    meets = cycle(sizes)
    x, y = random(len(meets), 12, 9)
    x, y = x * 1e6 + 3, torch.relu(y)
    stream = StreamingMoments([("x", "y")], baseline=True)
    for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
        stream.update({"x": a}, {"y": b})
    names = NAMES[4:7]
    for name, got in zip(names, stream.results([find(name) for name in names], "x", "y"), strict=True):
        assert got.baseline == pytest.approx(find(name)(x, y[meets]).value, abs=1e-9), name
        assert got.value == pytest.approx(find(name)(x, y).value, abs=1e-9), name


def test_no_baseline_where_none_was_asked_for() -> None:
    x, y = random(50, 4, 3)
    assert moment_results([find("relu_procrustes", baseline=False)], x, y)[0].baseline is None
    assert moment_results([find("relu_procrustes")], x, y, baseline=False)[0].baseline is None


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowest", [-9, -7, -6])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_as_many_directions_count(lowest: int, offset: float) -> None:
    """Singular values down to below the precision of float32: the number of directions is in the note."""
    z, y = random(80, 40, 5)
    rotation = torch.linalg.qr(random(40, 40, 1, 7)[0])[0]
    x = (z * torch.logspace(0, lowest, 40, dtype=z.dtype) @ rotation + offset).float()
    got, expected = moment_results([find("cca")], x, y.float())[0], find("cca")(x, y.float())
    assert got.notes == expected.notes
    assert "directions" in got.notes[0]
    precise = [Representation(side.double(), torch.finfo(torch.float32).eps) for side in (x, y.float())]
    value = find("cca").compare_with(*map(span, precise)).value  # centred in float64: nothing is lost
    assert got.value == pytest.approx(value, abs=1e-4)  # the smallest that counts is half rounding of the input


def test_directions_that_products_cannot_show_are_noted() -> None:
    x, y = random(300, 5, 4)
    x[:, 4] = x[:, 3] + 1e-10 * x[:, 4]
    note = "one pass: directions of x below about 1e-7 of the largest are not seen"
    assert note in moment_results([find("cca")], x, y)[0].notes
    assert "one pass: directions of x and y below" in moment_results([find("r2")], x, x)[0].notes[0]
    assert not moment_results([find("cca")], x.float(), y.float())[0].notes
    assert not moment_results([find("cca")], x[:, :4], y)[0].notes
    assert not moment_results([find("orthogonal_procrustes")], x[:4, :4], y[:4])[0].notes  # no more than samples allow


# -- memory ------------------------------------------------------------------------------------------------------------


def held(thing: Any, seen: set[int]) -> int:
    """Bytes of all tensors that can be reached."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, dict | list | tuple):
        return sum(held(part, seen) for part in (thing.values() if isinstance(thing, dict) else thing))
    return sum(held(part, seen) for part in getattr(thing, "__dict__", {}).values())


def test_what_is_held_does_not_grow_with_samples() -> None:
    def after(count: int) -> int:
        stream = StreamingMoments([("x", "y"), ("z", "y")], baseline=True)
        for i in range(count):
            x, y = random(20, 12, 9, i)
            stream.update({"x": x, "z": x[:, :5]}, {"y": y})
        return held(stream, set())

    products = 8 * (12 * 12 + 5 * 5 + 9 * 9 + 2 * (12 + 5) * 9)
    assert products <= after(30) == after(3) < products + 8 * 20 * (12 + 5 + 9)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    convolutions = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(72, 5)).eval()


def images(sizes: tuple[int, ...] = (40, 40, 7)) -> list[tuple[Tensor, Any]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 3, 8, 8, generator=g), None) for size in sizes]


@pytest.mark.parametrize("policy", ["channels", "pool"])
def test_compare_goes_batch_by_batch(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several layers, resolutions and measures, a last batch of other size; nothing is collected."""
    layers, names = ["0", "1", "3", "5"], [*NAMES, "linear_cka", "rv"]
    with monkeypatch.context() as patch:
        patch.setattr(Features, "collect", lambda *_: pytest.fail("collected"))
        found = it.compare(net(0), net(1), images((40,) * 9 + (7,)), layers, names, policy)
    monkeypatch.setattr(module, "_by_batches", lambda *_: False)
    expected = it.compare(net(0), net(1), images((40,) * 9 + (7,)), layers, names, policy)
    assert list(found.results) == list(expected.results)
    for key, result in expected.results.items():
        assert found.results[key].degenerate == result.degenerate
        near = 1e-6
        assert found.results[key].value == pytest.approx(result.value, abs=near), key
        assert found.results[key].notes == result.notes
        baselines = found.results[key].baseline, result.baseline
        assert baselines == (None, None) or baselines[0] == pytest.approx(baselines[1], abs=0.1)


def test_a_limit_that_is_too_small_to_collect_is_enough() -> None:
    limit = 8 * (6 * 6 * 2 + 2 * 6 * 6 + 3 * 12**2)  # own products, pairs in two orders, one pair at work
    for name in NAMES:
        found = it.compare(net(0), net(1), images(), ["1"], [name], memory=limit)
        assert found.matrix().isfinite().all()
    with pytest.raises(InputError, match=re.escape("A comparison by rsa with all samples in memory (rsa: every sam")):
        it.compare(net(0), net(1), images(), ["1"], ["cca", "rsa"], memory=limit)
    with pytest.raises(InputError, match=r"A comparison batch by batch needs at least 4\.61e-06 GB at once"):
        it.compare(net(0), net(1), images(), ["1"], ["orthogonal_procrustes"], memory=limit - 1)
    assert it.compare(net(0), net(1), images(), ["1"], ["cca"], memory=limit - 8 * 36).first == ("1",)  # no baseline
    with pytest.raises(InputError, match="A comparison batch by batch needs"):  # sums of two kinds
        it.compare(net(0), net(1), images(), ["1"], ["cca", "rv"], memory=limit)


def test_what_is_smaller_is_collected() -> None:
    """Wide layers of few samples: the features take less room than their products."""
    few = images((5, 4))
    found = it.compare(net(0), net(1), few, ["1"], ["orthogonal_procrustes"], "flatten", memory=10 * 2 * 6 * 64 * 12)
    assert found.matrix().isfinite().all()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    stream = StreamingMoments([("x", "y")])
    with pytest.raises(InputError, match=re.escape("'x' and 'y' are not compared. The pairs that are: none")):
        stream.results([find("cca")], "x", "y")
    x, y = random(10, 3, 2)
    stream.update({"x": x}, {"y": y})
    with pytest.raises(InputError, match=re.escape("'x' and 'z' are not compared. The pairs that are: ('x'")):
        stream.results([find("cca")], "x", "z")
    with pytest.raises(MismatchError, match=r"'x' has 2 features in this batch, but 3 in the previous ones\. Give"):
        stream.update({"x": x[:, :2]}, {"y": y})
    with pytest.raises(MismatchError, match="but x has 10 and y 9"):
        stream.update({"x": x}, {"y": y[:9]})
    with pytest.raises(InputError, match="y holds 20 entries that are not finite"):
        stream.update({"x": x}, {"y": y * torch.nan})


def test_inputs_of_another_size_are_refused() -> None:
    class Endless:
        def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
            return iter([(torch.randn(4, 3, size, size), None) for size in (8, 6)])

    model = nn.Sequential(nn.Conv2d(3, 2, 1)).eval()
    with pytest.raises(MismatchError, match="'0' has 72 features in this batch, but 128 in the previous ones"):
        it.compare(model, model, Endless(), ["0"], ["cca"], "flatten")


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_measures_are_the_measures(name: str) -> None:
    a, b = (nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval() for _ in range(2))
    x = torch.randn(50, 3)
    data = [(part, torch.zeros(len(part))) for part in x.split(20)]
    found = it.compare(a, b, data, layers=["1"], measures=(name,)).result("1", "1").value
    (one, other) = (features(model, data, ["1"]).collect()["1"] for model in (a, b))
    assert found == pytest.approx(it.measure(one, other, name).value, abs=1e-6)
