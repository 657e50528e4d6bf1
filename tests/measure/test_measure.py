"""Every measure on degenerate input: a correct value or a reason, never NaN; the registry and its checks."""

from collections.abc import Callable
from dataclasses import replace
from math import isfinite

import jaxtyping
import pytest
import torch
from torch import Tensor

import intertwine as it
from intertwine.errors import InputError, MismatchError
from intertwine.measure import measure as registry
from intertwine.measure.measure import CHANGES, Measure, Representation, Result, find, represent
from intertwine.testing.measure import MeasureError, check_measure, random_representations

MEASURES = [m.name for m in it.measures()]


@pytest.fixture(params=MEASURES)
def measure(request: pytest.FixtureRequest) -> Measure:
    return find(request.param)


def honest(result: Result) -> Result:
    """A finite value and no reason, or a reason and no value."""
    if result.degenerate is None:
        assert isfinite(result.value), result
    else:
        assert result.value != result.value, result
        assert len(result.degenerate) > 10
    return result


def within(measure: Measure, result: Result) -> bool:
    low, high = measure.range
    return result.degenerate is not None or low - 1e-6 <= result.value <= high + 1e-6


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_few_samples(measure: Measure, samples: int) -> None:
    x, y = random_representations(0)
    result = honest(measure(x[:samples], y[:samples]))
    if samples < measure.needs:
        assert result.degenerate == f"it needs at least {measure.needs} samples, and there are {samples}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_columns_beside_others(measure: Measure, dtype: torch.dtype) -> None:
    """A column that never varies, zero or not, says nothing of the samples."""
    x, y = (t.to(dtype) for t in random_representations(0))
    dead = torch.cat([y, torch.zeros(len(y), 1, dtype=dtype), torch.full((len(y), 1), 3.3, dtype=dtype)], 1)
    result = honest(measure(x, dead))
    assert within(measure, result)
    if "translation" in measure.invariances and measure.name not in ("soft_matching",):
        assert result.degenerate is None


def test_nothing_varies(measure: Measure) -> None:
    x, _ = random_representations(0)
    for still in (torch.zeros(len(x), 3), torch.full((len(x), 3), 0.1), torch.full((len(x), 3), 1e6)):
        for pair in ((x, still), (still, x), (still, still)):
            result = honest(measure(*(t.float() for t in pair)))
            assert result.degenerate is not None or "translation" not in measure.invariances, result


def test_more_features_than_samples(measure: Measure) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 40, generator=g), torch.randn(12, 30, generator=g)
    assert within(measure, honest(measure(x, y)))


def test_duplicate_columns(measure: Measure) -> None:
    x, y = random_representations(0)
    assert within(measure, honest(measure(torch.cat([x, x], 1), torch.cat([y, y[:, :1]], 1))))


@pytest.mark.parametrize("scale", [1e-6, 1e6, 1e-18, 1e18])
def test_scales(measure: Measure, scale: float) -> None:
    """No epsilon hides in a denominator: the unit of the features does not matter."""
    x, y = random_representations(0)
    result, plain = honest(measure(x, y * scale)), measure(x, y)
    if "isotropic scale" in measure.invariances:
        assert result.value == pytest.approx(plain.value, abs=1e-9)
    single = honest(measure(x.float(), (y * scale).float()))
    if "isotropic scale" in measure.invariances:
        assert single.value == pytest.approx(plain.value, abs=1e-4)


def test_a_mean_far_from_zero(measure: Measure) -> None:
    """In single precision a mean of 100 leaves five digits, and they must be the right ones."""
    x, y = random_representations(0)
    result = honest(measure((x + 100).float(), (y - 100).float()))
    if "translation" in measure.invariances:
        assert result.value == pytest.approx(measure(x, y).value, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(measure: Measure, dtype: torch.dtype) -> None:
    x, y = (t.to(dtype) for t in random_representations(0))
    result = honest(measure(x, y))
    assert result.value == pytest.approx(measure(x.double(), y.double()).value, abs=1e-5)


def test_whole_numbers(measure: Measure) -> None:
    x, y = ((10 * t).round() for t in random_representations(0))
    assert honest(measure(x.long(), y.long())).value == pytest.approx(measure(x, y).value, abs=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(measure: Measure, bad: float) -> None:
    x, y = random_representations(0)
    y[3, 1] = bad
    with pytest.raises(InputError, match="y holds 1 entries that are not finite"):
        measure(x, y)


def test_other_samples(measure: Measure) -> None:
    x, y = random_representations(0)
    with pytest.raises(MismatchError, match=r"x has 80 and y 79. Give the features of the same inputs"):
        measure(x, y[:-1])


@pytest.mark.parametrize(
    "x", [torch.zeros(3), torch.zeros(2, 2, 2, 2), torch.zeros(3, 2, dtype=torch.complex64)], ids=["1-D", "4-D", "i"]
)
def test_what_is_no_representation(measure: Measure, x: Tensor) -> None:
    with pytest.raises(InputError, match="x must be a tensor"):
        it.measure(x, torch.zeros(3, 2), measure.name)


def test_no_entries(measure: Measure) -> None:
    with pytest.raises(InputError, match="x has no entries"):
        measure(torch.zeros(0, 3), torch.zeros(0, 3))


def test_inputs_are_not_changed(measure: Measure) -> None:
    x, y = random_representations(0)
    kept = x.clone(), y.clone()
    measure(x, y)
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("samples", [8, 50])
def test_samples_that_are_equally_far_apart(samples: int, dtype: torch.dtype) -> None:
    """A debiased Gram matrix without its diagonal is zero; what rounding leaves of it is not a value."""
    result = it.measure(torch.eye(samples, dtype=dtype), torch.randn(samples, 4, dtype=dtype))
    assert result.degenerate == "x has no similarity between different samples to align: it is the same for all pairs"


def test_unknown_names() -> None:
    x, y = random_representations(0)
    with pytest.raises(InputError, match=r"Unknown measure 'linear_cca'.*Did you mean 'linear_cka"):
        it.measure(x, y, "linear_cca")
    with pytest.raises(InputError, match=r"The options .'depth': 3. do not fit the measure linear_cka"):
        it.measure(x, y, "linear_cka", depth=3)


def test_a_name_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MAKERS", dict(registry._MAKERS))

    def mine(about: str = "first") -> Measure:
        return replace(find("rsa"), name="mine", about=about)

    def another() -> Measure:
        return mine()

    def rsa() -> Measure:
        return replace(find("rsa"), about="not ours")

    for _ in range(2):  # a cell that runs again
        assert registry.register(mine) is mine
    assert find("mine", about="second").about == "second"
    with pytest.raises(InputError, match=r"The name 'mine' belongs to .*mine\. Choose another name"):
        registry.register(another)
    rsa.__qualname__ = "rsa"  # as at the top of a user's file
    with pytest.raises(InputError, match=r"The name 'rsa' belongs to intertwine\.measure\.distances\.rsa"):
        registry.register(rsa)
    assert find("rsa").about != "not ours"


def test_advice_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    x = torch.randn(9, 3)
    with pytest.raises(it.InputError, match=r"no option 'scor'\. Did you mean 'score'\? Its options: score\."):
        it.measure(x, x, "soft_matching", scor="distance")
    with pytest.raises(it.InputError, match=r"no option 'foo'\. It has no options: leave them out"):
        it.measure(x, x, "linear_cka", foo=1)
    with pytest.raises(it.InputError, match=r"Make it one: torch\.as_tensor\(x\)"):
        it.measure(x.numpy(), x)  # pyrefly: ignore
    with pytest.raises(it.InputError, match=r"For one feature per sample write x\[:, None\]"):
        it.measure(x[:, 0], x)
    assert max(len(repr(m)) for m in it.measures()) < 200


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_what_it_declares(name: str) -> None:
    """The whole row of the invariance matrix, in both directions."""
    report = check_measure(name, seeds=(0, 1, 2))
    assert report.to_dict()["measure"] == name
    assert set(report.moves) == set(CHANGES)


def _broken(change: Callable[[Result], Result]) -> dict[str, object]:
    cka = find("linear_cka")
    return {"compare_with": lambda a, b: change(cka.compare_with(a, b))}


@pytest.mark.parametrize(
    ("parts", "law", "text"),
    [
        ({"at_identity": 0.0}, "value at identity", "the error is 1.0e\\+00"),
        ({"range": (0.99, 1.0)}, "range", "allowed is 1e-09"),
        ({"invariances": frozenset(CHANGES)}, "positive scales", "is declared invariant, and the value moves by"),
        ({"invariances": frozenset({"permutation", "signs", "orthogonal", "translation"})}, "isotropic scale", "only"),
        (_broken(lambda r: replace(r, value=r.value + 1e-3)), "value at identity", "the error is 1.0e-03"),
    ],
)
def test_a_false_declaration_is_found(parts: dict[str, object], law: str, text: str) -> None:
    wrong = replace(find("linear_cka"), **parts)  # pyrefly: ignore
    with pytest.raises(MeasureError, match=text) as caught:
        check_measure(wrong)
    assert caught.value.law == law


def test_a_measure_of_ones_own_that_changes_its_input() -> None:
    def spoil(x: Representation) -> Representation:
        x.values.mul_(2)
        return x

    wrong = replace(find("linear_cka"), prepare_with=spoil, compare_with=lambda a, b: Result("mine", 1.0))
    with pytest.raises(MeasureError, match="inputs untouched"):
        check_measure(wrong)


def test_a_measure_without_a_value() -> None:
    wrong = replace(find("linear_cka"), needs=1000)
    with pytest.raises(MeasureError, match="degenerate on ordinary data: it needs at least 1000 samples"):
        check_measure(wrong)


def test_results_read_well() -> None:
    x = torch.randn(10, 3)
    assert repr(it.measure(x, x)) == "Result(linear_cka: 1.000000)"
    plain = {"measure": "linear_cka", "value": 1.0, "degenerate": None, "notes": [], "baseline": None}
    assert it.measure(x, x).to_dict() == plain
    assert float(it.measure(x, x)) == 1.0
    assert repr(check_measure("rv")).startswith("MeasureReport(rv: 6 laws hold; invariant to permutation, signs")


def test_features_far_from_zero_are_centred_without_loss() -> None:
    x = 1e5 + torch.randn(100, 4)
    exact = x.double() - x.double().mean(0)
    assert (represent(x, "x").centred - exact).abs().max() < 1e-6
