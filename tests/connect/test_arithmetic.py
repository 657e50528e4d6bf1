"""Interpolation: the network on the line between two, and pairs that are refused."""

import copy
import re
from fractions import Fraction
from typing import Any, cast

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

import intertwine as it
from intertwine.data.weights import mix, path_between
from intertwine.errors import InputError, MismatchError


class Tied(nn.Module):
    """An embedding whose weight is the classifier's, with a mask and a shift that checkpoints leave out."""

    mask: Tensor
    shift: Tensor

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]), persistent=False)
        self.register_buffer("shift", torch.tensor(shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x)) + self.shift


def conv_net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 5)
    )
    net(torch.randn(8, 3, 8, 8))
    return net


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0, -0.5, 1.5])
def test_004_L01_every_weight_lies_on_the_line(t: float) -> None:
    a, b = conv_net(0).double(), conv_net(1).double()
    before = state(a), state(b)
    found = it.interpolate(a, b, t).state_dict()
    for name, value in found.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (1 - t) * before[0][name] + t * before[1][name], rtol=1e-14, atol=1e-15)
    for model, old in zip((a, b), before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


def rounded_once(a: Tensor, b: Tensor, t: float) -> Tensor:
    """The mix of two tensors in exact arithmetic on fractions, rounded to their precision by a cast of one number."""
    here = Fraction(t)
    exact = [(1 - here) * Fraction(x) + here * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return torch.tensor([float(value) for value in exact], dtype=torch.float64).to(a.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t", [0.3, 0.5, 1.7])
def test_half_precision_is_rounded_once(t: float, dtype: torch.dtype) -> None:
    a, b = conv_net(0).to(dtype), conv_net(1).to(dtype)
    path = path_between(a, b, [t])
    stacked, found = path.state([0]), dict(path.network(0).named_parameters())
    for name, x in a.named_parameters():
        wanted = rounded_once(x.detach().flatten(), b.get_parameter(name).detach().flatten(), t).reshape(x.shape)
        assert torch.equal(found[name], wanted)
        assert torch.equal(stacked[name][0], wanted)
    if t < 1:
        merged = it.merge([a, b], torch.zeros(1, 3, 8, 8, dtype=dtype), method="none", t=t).model.state_dict()
        assert all(torch.equal(merged[name], x) for name, x in found.items())


def test_half_precision_does_not_overflow_on_the_way() -> None:
    a, b = (nn.Linear(1, 2, bias=False).half() for _ in range(2))
    with torch.no_grad():
        a.weight[:, 0], b.weight[:, 0] = torch.tensor([60000, -torch.inf]), torch.tensor([49984, -torch.inf])
    assert it.interpolate(a, b, 3).get_parameter("weight").flatten().tolist() == [29952, -torch.inf]


def test_the_ends_are_exact_and_new() -> None:
    a, b = conv_net(0), conv_net(1)
    for t, end in ((0, a), (1, b)):
        found = it.interpolate(a, b, t)
        for name, value in found.named_parameters():
            there = end.get_parameter(name)
            assert torch.equal(value, there)
            assert value.data_ptr() != there.data_ptr()
            assert value.requires_grad


def test_004_L02_running_statistics_are_mixed_and_counters_are_not() -> None:
    a, b = conv_net(0), conv_net(1)
    b(torch.randn(8, 3, 8, 8))
    middle = it.interpolate(a, b, 0.5)
    counter = middle.get_buffer("1.num_batches_tracked")
    assert counter.dtype == torch.int64
    assert (counter.item(), b.get_buffer("1.num_batches_tracked").item()) == (1, 2)
    mean = (a.get_buffer("1.running_var") + b.get_buffer("1.running_var")) / 2
    torch.testing.assert_close(middle.get_buffer("1.running_var"), mean)


def test_tied_weights_stay_tied_and_buffers_outside_checkpoints_are_mixed() -> None:
    a, b = Tied(shift=1.0), Tied(shift=3.0)
    middle = it.interpolate(a, b, 0.25)
    assert isinstance(middle, Tied)
    assert middle.head.weight is middle.embed.weight
    torch.testing.assert_close(middle.embed.weight, 0.75 * a.embed.weight + 0.25 * b.embed.weight)
    assert middle.shift.item() == 1.5
    assert middle.mask.tolist() == [0.0, -torch.inf]


def test_mode_and_type_are_those_of_the_first() -> None:
    a, b = conv_net(0).eval().to(torch.bfloat16), conv_net(1).to(torch.bfloat16)
    middle = it.interpolate(a, b, 0.5)
    assert not any(module.training for module in middle.modules())
    assert b.training
    assert {p.dtype for p in middle.parameters()} == {torch.bfloat16}


def test_equal_entries_stay_equal() -> None:
    x = torch.randn(1000)
    assert torch.equal(mix(x, x.clone(), 0.3), x)
    assert mix(torch.tensor([1 + 2j]), torch.tensor([3 + 0j]), 0.5).tolist() == [2 + 1j]
    assert mix(torch.tensor([True]), torch.tensor([False]), 0.75).tolist() == [True]


def test_stacked_states_are_those_of_the_networks() -> None:
    path = path_between(conv_net(0), conv_net(1), [0.0, 0.3, 1.0])
    stacked = path.state([0, 1, 2])
    for point in range(3):
        one = path.network(point).state_dict()
        assert all(torch.equal(one[name], value[point]) for name, value in stacked.items())


def test_dropout_may_differ() -> None:
    a, b = conv_net(0), conv_net(1)
    b[4] = nn.Dropout(0.1)
    it.interpolate(a, b, 0.5)


def different_stride() -> nn.Module:
    other = conv_net(1)
    other[0] = nn.Conv2d(3, 4, 3, padding=1)
    return other


def other_with(index: int, layer: nn.Module) -> nn.Module:
    other = conv_net(1)
    other[index] = layer
    return other


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (other_with(0, nn.Conv2d(3, 5, 3)), "'0.weight' is float32 of shape (4, 3, 3, 3) in the first and is float32"),
        (other_with(0, nn.Conv2d(3, 4, 3, bias=False)), "'0.bias' is float32 of shape (4,) in the first and does not"),
        (conv_net(1).double(), "'0.weight' is float32 of shape (4, 3, 3, 3) in the first and is float64"),
        (other_with(2, nn.Tanh()), "2 is ReLU() in the first and Tanh() in the second"),
        (different_stride(), "padding=(1, 1)"),
        (other_with(1, nn.BatchNorm2d(4, eps=0.1)), "1 is BatchNorm2d(eps=1e-05) in the first"),
    ],
    ids=["shape", "name", "type", "activation", "padding", "eps"],
)
def test_networks_that_differ_are_refused(other: nn.Module, words: str) -> None:
    with pytest.raises(MismatchError, match=re.escape(words)) as caught:
        it.interpolate(conv_net(0), other, 0.5)
    assert "Only networks of one architecture" in str(caught.value)


def test_a_tie_that_only_the_first_has_is_refused() -> None:
    b = Tied()
    b.head.weight = nn.Parameter(b.embed.weight.detach() + 1)
    with pytest.raises(MismatchError, match=r"'embed.weight' and 'head.weight' are one tied weight in the first"):
        it.interpolate(Tied(), b, 0.5)
    it.interpolate(b, Tied(), 0.5)  # two weights may be mixed with one
    same = copy.deepcopy(b)
    same.head.weight = nn.Parameter(same.embed.weight.detach().clone())
    it.interpolate(Tied(), same, 0.5)  # equal values need no tie


@pytest.mark.parametrize("t", [float("nan"), float("inf")])
def test_t_must_be_a_number(t: float) -> None:
    with pytest.raises(InputError, match="t must be a finite number: 0 is the first network"):
        it.interpolate(conv_net(0), conv_net(1), t)


def test_lazy_layers_are_refused() -> None:
    lazy = nn.LazyLinear(3)
    with pytest.raises(InputError, match="'weight' belongs to a lazy layer without weights"):
        it.interpolate(lazy, lazy, 0.5)


def test_a_t_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    net: Any = nn.Linear(2, 2)
    with pytest.raises(it.InputError, match=r"t must be a finite number.*found 'x'"):
        it.interpolate(net, net, cast(Any, "x"))
