"""Stacks compute what each network computes alone, for every architecture and user networks; kernels against torch."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_check import CASES
from torch import Tensor, fx, nn

from intertwine.errors import InputError, MismatchError
from intertwine.lab.zoo.networks.registry import build
from intertwine.lab.zoo.randomness import Purpose, keyed
from intertwine.lab.zoo.stacking.program import ROOT, Chain, chains, trace
from intertwine.lab.zoo.stacking.stack import Stack

BATCH = 4
#: Small versions of every kind of network: name, options, and one input (ids run below the number given with "gpt").
SMALL: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mlp": ("mlp", {"widths": (12, 6, 5, 4)}, (3, 2, 2)),
    "lenet": ("lenet", {"widths": (3, 4, 6, 5), "side": 16}, (1, 16, 16)),
    "myrtle": ("myrtle", {"widths": (3, 4, 5, 6)}, (3, 32, 32)),
    "myrtle, no BN": ("myrtle", {"width": 4, "norm": False, "activation": "leaky_relu:0.1"}, (3, 32, 32)),
    "tiny10": ("tiny10", {"width": 0.25, "classes": 3}, (3, 32, 32)),
    "resnet20, A": ("resnet20", {"width": 0.25, "shortcut": "A"}, (3, 8, 8)),
    "resnet20, B": ("resnet20", {"width": 0.25, "shortcut": "B", "in_channels": 1}, (1, 8, 8)),
    "vgg11": ("vgg11", {"width": 0.0625}, (3, 32, 32)),
    "vgg11_bn": ("vgg11_bn", {"width": 0.0625}, (3, 32, 32)),
    "cct": ("cct", {"dim": 8, "depth": 2, "heads": 2, "side": 8}, (3, 8, 8)),
    "vit": ("vit", {"dim": 8, "depth": 2, "heads": 2, "side": 8}, (3, 8, 8)),
    "vit, mean": ("vit", {"dim": 8, "depth": 1, "heads": 2, "side": 8, "pool": "mean"}, (3, 8, 8)),
    "gpt": ("gpt", {"dim": 8, "depth": 2, "heads": 2, "vocab": 11, "context": 6, "tied": True}, (5,)),
    "gpt, free head": ("gpt", {"dim": 8, "depth": 1, "heads": 2, "vocab": 11, "tied": False}, (5,)),
}


def small(case: str, count: int = 2) -> tuple[list[nn.Module], Tensor]:
    """Networks of one case in double precision, away from their start, and inputs for each of them."""
    name, options, shape = SMALL[case]
    models = [away(build(name, **options).double()) for _ in range(count)]
    if name == "gpt":
        return models, torch.randint(0, 11, (count, BATCH, *shape))
    return models, torch.randn(count, BATCH, *shape, dtype=torch.float64)


def away(model: nn.Module) -> nn.Module:
    """Biases and scales start at 0 and 1 in every network; here they differ, so that none can stand in for another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand_like(buffer))
    return model


def close(found: Tensor, expected: Tensor, least: float = 1e-12) -> bool:
    """Up to rounding; a gradient that is zero but for rounding needs the absolute part."""
    return bool((found - expected).norm() <= 1e-10 * expected.norm() + least)


def check(models: Sequence[nn.Module], inputs: Tensor, **options: Any) -> Stack:
    """Outputs, gradients and buffers of one call in training, then the outputs in use, against each network alone."""
    stack = Stack(models, dtype=torch.float64, **options)
    outputs = stack(inputs)
    weights = torch.randn_like(outputs)
    (outputs * weights).sum().backward()
    stack.train(False)
    with torch.no_grad():
        used = stack(inputs)
    for i, model in enumerate(copy.deepcopy(models)):
        alone = model.train()(inputs[i])
        assert close(outputs[i], alone)
        (alone * weights[i]).sum().backward()
        for name, parameter in model.named_parameters():
            gradient = stack.parameters[name].grad
            assert gradient is not None
            assert parameter.grad is not None
            assert close(gradient[i], parameter.grad, 1e-11), name
        for name, buffer in model.named_buffers():
            assert close(stack.buffers[name][i].double(), buffer.double()), name
        with torch.no_grad():
            assert close(used[i], model.eval()(inputs[i]))
            assert close(stack.module(i)(inputs[i]), model(inputs[i]))
    return stack


# -- architectures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SMALL)
def test_a_stack_is_each_network_alone(case: str) -> None:
    stack = check(*small(case))
    assert len(stack._program.steps) > 1  # no architecture of the zoo has to be taken as a whole
    assert len(stack) == 2


@pytest.mark.parametrize("case", SMALL)
def test_a_stack_in_half_precision(case: str) -> None:
    """Every layer lets torch choose its numbers: weights in single precision meet images in half precision."""
    models, inputs = small(case)
    stack = Stack(models)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        outputs = stack(inputs.bfloat16() if inputs.is_floating_point() else inputs)
    outputs.sum().backward()
    expected = Stack(models, dtype=torch.float64)(inputs)
    assert outputs.dtype == torch.bfloat16
    assert 1e-4 < float((outputs - expected).detach().norm() / expected.detach().norm()) < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in stack.parameters.values())


def test_one_network_is_a_stack_too() -> None:
    check(*small("myrtle", 1))


def test_batches_of_one_image() -> None:
    models, inputs = small("vit")
    check(models, inputs[:, :1])


def test_inputs_may_be_shared() -> None:
    models, inputs = small("lenet")
    outputs = Stack(models, dtype=torch.float64)(inputs[0].expand(2, *inputs[0].shape))
    assert all(close(outputs[i], models[i](inputs[0])) for i in range(2))


def test_the_networks_given_are_left_alone() -> None:
    models, inputs = small("myrtle", 2)
    before = copy.deepcopy([model.state_dict() for model in models])
    stack = Stack(models, dtype=torch.float64)
    stack(inputs).sum().backward()
    with torch.no_grad():
        stack.parameters["0.weight"].zero_()
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
        assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_numbers_are_kept_in_the_dtype_asked_for() -> None:
    models, inputs = small("myrtle", 2)
    stack = Stack(models)
    assert {t.dtype for t in stack.parameters.values()} == {torch.float32}
    assert stack.buffers["1.num_batches_tracked"].dtype == torch.int64
    assert stack(inputs.float()).dtype == torch.float32


def test_state_and_module_of_one_network() -> None:
    models, inputs = small("resnet20, B", 2)
    stack = Stack(models, dtype=torch.float64)
    state = stack.state(1)
    assert list(state) == [name for name, _ in [*models[1].named_parameters(), *models[1].named_buffers()]]
    assert all(torch.equal(state[name], t) for name, t in models[1].state_dict().items())
    state["conv1.weight"].zero_()  # a copy
    assert stack.tensors["conv1.weight"][1].any()
    module = stack.module(1)
    assert not module.training
    assert torch.equal(module(inputs[1]), models[1].eval()(inputs[1]))


def test_a_tied_weight_is_one_weight() -> None:
    models, inputs = small("gpt", 2)
    stack = check(models, inputs)
    assert "tokens.weight" in stack.parameters
    assert "head.weight" not in stack.tensors
    module = stack.module(0)
    assert module.get_parameter("head.weight") is module.get_parameter("tokens.weight")


# -- foreign networks --------------------------------------------------------------------------------------------------


class Branch(nn.Module):
    """Its forward asks for a number of images, which a trace does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return self.last(y.relu() if x.shape[0] > 2 else y.tanh())


class Modes(nn.Module):
    """Another network in training than in use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2 if self.training else self.layer(x)


class Optional(nn.Module):
    """An input nobody has to give."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x) if mask is None else self.layer(x) * mask


class Own(nn.Module):
    """Parameters and buffers of its own, one of them in no state dict, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.fixed = torch.arange(4.0)
        self.inner = nn.ModuleDict({"layer": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner["layer"](x @ self.scale + self.shift) * self.hidden + self.fixed
        return y * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Positions(nn.Module):
    """Embeddings of places that are counted in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.places(torch.arange(x.shape[1], device=x.device)))


class Attention(nn.Module):
    """Attention called with keywords, with a scale, and, for two-dimensional inputs, without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(self.layer(x), x, value=x, scale=0.3)
        return F.scaled_dot_product_attention(query=y, key=x, value=x, is_causal=True)


class Masked(nn.Module):
    """Attention with a mask, which no network may share with another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.layer(x), x, x, attn_mask=x.mean(-1)[:, None] > 0)


class Shared(nn.Module):
    """One layer in two places, and two results out of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.again(self.layer(x)).chunk(2, dim=1)
        return torch.cat([left.softmax(1), right.sort(1).values], 1)


class Even(nn.Module):
    """A weight that is made of another one."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.flip(0)


class Norms(nn.Module):
    """Normalisations of every kind, without running statistics and without weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 3, groups=2, padding="same"),
            nn.BatchNorm2d(4, track_running_stats=False), nn.InstanceNorm2d(4, affine=True), nn.LocalResponseNorm(2),
        )  # fmt: skip
        self.tail = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 4))
        nn.utils.parametrize.register_parametrization(self.tail[2], "weight", Even())

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.layers(x))


@pytest.mark.parametrize(
    ("make", "shape", "steps"),
    [
        (Branch, (3, 4), 1),
        (Branch, (2, 4), 1),
        (Modes, (3, 4), 1),
        (Optional, (3, 4), 1),
        (Own, (3, 4), None),
        (Positions, (3, 5, 4), None),
        (Positions, (3, 2, 4), None),  # as many places as networks
        (Attention, (3, 5, 4), None),
        (Attention, (5, 4), None),
        (Masked, (3, 5, 4), None),
        (Shared, (3, 4), None),
        (Norms, (3, 4, 2, 2), None),
    ],
)
def test_foreign_networks(make: type[nn.Module], shape: tuple[int, ...], steps: int | None) -> None:
    models = [away(make().double()) for _ in range(2)]
    stack = check(models, torch.randn(2, *shape, dtype=torch.float64))
    assert (len(stack._program.steps) == 1) == (steps == 1)
    assert (stack._program.steps[0].path == ROOT) == (steps == 1)


def test_a_frozen_layer_of_torch_is_taken_as_it_is() -> None:
    """A layer that torch has and the stack does not know by name."""
    check(
        [nn.Sequential(nn.PReLU(3), nn.Conv1d(3, 2, 2), nn.Softmax(-1)).double() for _ in range(2)],
        torch.randn(2, 4, 3, 5).double(),
    )


@pytest.mark.parametrize("axes", [(1, -1), (1, 2), (2, -1), (2, 3), (-2, -1), (1, -2)])
def test_axes_are_flattened_as_in_one_network(axes: tuple[int, int]) -> None:
    models = [nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(*axes)).double() for _ in range(2)]
    check(models, torch.randn(2, 3, 2, 3, 4).double())


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1, "padding_mode": "reflect"}, {"padding": "same", "dilation": 2}, {"groups": 2, "bias": False},
        {"stride": (1, 2), "padding": (0, 1)}, {"padding": 1, "padding_mode": "circular", "groups": 4},
    ],
    ids=str,
)  # fmt: skip
def test_every_kind_of_convolution(options: dict[str, Any]) -> None:
    check(
        [nn.Sequential(nn.Conv2d(4, 8, 3, **options)).double() for _ in range(2)], torch.randn(2, 3, 4, 6, 7).double()
    )


# -- dropout -----------------------------------------------------------------------------------------------------------


def dropped(seeds: list[int], step: int = 0, rate: float = 0.3, size: int = 5000) -> Tensor:
    """What two layers of dropout, one after the other, make of ones."""
    stack = Stack([nn.Sequential(nn.Dropout(rate), nn.Dropout(rate)) for _ in seeds])
    stack.keys = keyed(torch.tensor(seeds), int(Purpose.DROPOUT), step)
    return stack(torch.ones(len(seeds), 2, size))


def test_dropout_depends_on_the_key_of_the_network_alone() -> None:
    assert torch.equal(dropped([7])[0], dropped([1, 7, 3])[1])
    assert torch.equal(dropped([7, 3], 5)[0], dropped([3, 7], 5)[1])
    state = torch.get_rng_state()
    dropped([1])
    assert torch.equal(torch.get_rng_state(), state)


def test_entries_are_dropped_at_their_rate() -> None:
    y = dropped([1, 2])
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.7 / 0.7)}
    kept = (y != 0).double()
    assert float(kept.mean()) == pytest.approx(0.49, abs=0.01)  # each layer draws for itself
    one = dropped([1], rate=0.5)
    assert float((one != 0).double().mean()) == pytest.approx(0.25, abs=0.02)


def test_masks_differ_between_networks_steps_and_images() -> None:
    masks = [dropped([1])[0, 0], dropped([2])[0, 0], dropped([1], 1)[0, 0], dropped([1])[0, 1]]
    correlations = torch.corrcoef(torch.stack(masks)) - torch.eye(4)
    assert correlations.abs().max() < 0.06


def test_in_use_nothing_is_dropped() -> None:
    stack = Stack([nn.Sequential(nn.Dropout(0.5)) for _ in range(2)]).train(False)
    stack.keys = torch.tensor([1, 2])
    assert stack.draws
    x = torch.randn(2, 3, 4)
    assert torch.equal(stack(x), x)
    assert not Stack([nn.Sequential(nn.Dropout(0.0))]).draws


def test_gradients_pass_where_nothing_was_dropped() -> None:
    stack = Stack([nn.Sequential(nn.Dropout(0.5)) for _ in range(2)])
    stack.keys = torch.tensor([1, 2])
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = stack(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (y != 0).float() * 2)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_no_networks() -> None:
    with pytest.raises(InputError, match=r"A stack needs at least one network"):
        Stack([])


@pytest.mark.parametrize(
    "other", [{"widths": (4, 5, 2)}, {"widths": (4, 3, 2), "bias": False}, {"widths": (4, 3, 3, 2)}], ids=str
)
def test_different_architectures(other: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match=r"network 1 has other tensors than network 0. Make one stack for each"):
        Stack([build("mlp", widths=(4, 3, 2)), build("mlp", **other)])


def test_a_tensor_that_is_no_buffer_must_not_differ() -> None:
    models = [nn.Sequential(Own()) for _ in range(2)]
    models[1].get_submodule("0").fixed = torch.zeros(4)
    with pytest.raises(MismatchError, match=r"differ in the tensor 0\.fixed, .* Register it as a buffer"):
        Stack(models)


def test_a_cumulative_average_is_refused() -> None:
    stack = Stack([nn.Sequential(nn.BatchNorm1d(3, momentum=None))])
    with pytest.raises(InputError, match=r"BatchNorm with momentum=None .* Give the layer a momentum, such as 0.1"):
        stack(torch.randn(1, 4, 3))


def test_too_many_inputs() -> None:
    with pytest.raises(ValueError, match="zip"):
        Stack([Optional()])(torch.randn(1, 3, 4), torch.randn(1, 3, 4))


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("case", ["mlp", "resnet20, A", "vit", "gpt"])
def test_a_result_is_dropped_after_its_last_reader(case: str, together: bool) -> None:
    program = trace(small(case)[0][0], together)
    last: dict[str, int] = {}
    for place, step in enumerate(program.steps):
        fx.map_arg(
            (step.args, step.kwargs, step.chain.skip if step.chain else None),
            lambda node, place=place: last.__setitem__(node.name, place),
        )
    expected: list[list[str]] = [[] for _ in program.steps]
    for name, place in last.items():
        expected[place].append(name)
    assert [list(step.drops) for step in program.steps] == [sorted(names) for names in expected]
    assert program.output.name not in last


def test_a_result_that_is_returned_is_kept() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = x.relu()
            return {"first": y, "second": (y + 1, x)}

    x = torch.randn(2, 3, 4)
    found = Stack([Two(), Two()])(x)
    assert torch.equal(found["first"], x.relu())
    assert torch.equal(found["second"][0], x.relu() + 1)
    assert torch.equal(found["second"][1], x)


def test_memory_is_held_no_longer_than_needed() -> None:
    """While a chain of layers runs, the stack holds the tensor that is read and the one that is written."""
    stack = Stack([nn.Sequential(*(nn.Identity() for _ in range(6)))])
    seen: list[int] = []
    runners = stack._runners
    stack._runners = [lambda values, run=run: (seen.append(len(values)), run(values))[1] for run in runners]
    stack(torch.randn(1, 2, 3))
    assert seen == [1] * 6


# -- chains ------------------------------------------------------------------------------------------------------------


def found_chains(model: nn.Module) -> list[Chain]:
    return list(chains(fx.symbolic_trace(model).graph, model))


def described(model: nn.Module) -> list[tuple[str | None, str | None, str | None, float, bool]]:
    return [(c.conv, c.norm, c.skip.name if c.skip is not None else None, c.slope, c.pool) for c in found_chains(model)]


def test_chains_of_myrtle() -> None:
    assert described(build("myrtle", width=8)) == [
        ("0", "1", None, 0.0, False),
        ("3", "4", None, 0.0, True),
        ("7", "8", None, 0.0, True),
        ("11", "12", None, 0.0, True),
    ]
    assert described(build("myrtle", width=8, norm=False, activation="leaky_relu:0.1")) == [
        ("0", None, None, 0.1, False),
        ("2", None, None, 0.1, True),
        ("5", None, None, 0.1, True),
        ("8", None, None, 0.1, True),
    ]


def test_the_layers_of_a_chain_are_its_nodes() -> None:
    model = build("myrtle", width=8)
    assert [[str(node.target) for node in chain.nodes] for chain in found_chains(model)] == [
        ["0", "1", "2"], ["3", "4", "5", "6"], ["7", "8", "9", "10"], ["11", "12", "13", "14"]
    ]  # fmt: skip


@pytest.mark.parametrize(("shortcut", "joints"), [("A", 0), ("B", 2)])
def test_chains_of_resnet20(shortcut: str, joints: int) -> None:
    """The second convolution of a block takes in what its shortcut adds and the ReLU behind it."""
    found = described(build("resnet20", shortcut=shortcut))
    blocks = [f"layer{stage}.{i}" for stage in (1, 2, 3) for i in range(3)]
    assert len(found) == 1 + 2 * 9 + joints
    assert found[0] == ("conv1", "bn1", None, 0.0, False)
    by_conv = {entry[0]: entry for entry in found}
    for block in blocks:
        assert by_conv[f"{block}.conv1"] == (f"{block}.conv1", f"{block}.bn1", None, 0.0, False)
        conv, norm, skip, slope, pool = by_conv[f"{block}.conv2"]
        assert (conv, norm, slope, pool) == (f"{block}.conv2", f"{block}.bn2", 0.0, False)
        assert skip is not None
        inside = block in ("layer2.0", "layer3.0") and shortcut == "A"  # a slice and its padding
        assert skip == "pad" * inside + "_1" * (inside and block == "layer3.0") or "shortcut" in skip
    for block in ("layer2.0", "layer3.0") if shortcut == "B" else ():
        assert by_conv[f"{block}.shortcut.0"] == (f"{block}.shortcut.0", f"{block}.shortcut.1", None, 1.0, False)


def test_without_the_residual_relu_a_chain_ends_with_the_sum() -> None:
    found = [c for c in found_chains(build("resnet50", width=0.125, residual_relu=False)) if c.skip is not None]
    assert len(found) == 16
    assert {c.slope for c in found} == {1.0}


@pytest.mark.parametrize("name", ["vgg11", "vgg11_bn"])
def test_chains_of_vgg(name: str) -> None:
    found = found_chains(build(name))
    assert len(found) == 8
    assert [c.pool for c in found] == [True, True, False, True, False, True, False, True]
    assert all((c.norm is not None) == (name == "vgg11_bn") and c.slope == 0.0 for c in found)


class Before(nn.Module):
    """A block whose normalisation and unit come first: the unit's result, and the sum, are read twice."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.norm, self.relu, self.conv = nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        self.norm2, self.relu2, self.pool = nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Any:
        a = self.norm(x)
        b = self.relu(a)
        c = self.conv(b)
        d = self.norm2(c)
        e = d + x
        f = self.relu2(e)
        seen = {"a": a, "b": b, "c": c, "d": d, "e": e, "f": f}
        return self.pool(f), [seen[name] for name in self.reads]


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ("", [["norm", "relu"], ["conv", "norm2", "add", "relu2"]]),
        ("a", [["norm"], ["conv", "norm2", "add", "relu2"]]),
        ("b", [["norm", "relu"], ["conv", "norm2", "add", "relu2"]]),
        ("c", [["norm", "relu"], ["conv"], ["norm2", "add", "relu2"]]),
        ("d", [["norm", "relu"], ["conv", "norm2"], ["relu2", "pool"]]),
        ("e", [["norm", "relu"], ["conv", "norm2", "add"], ["relu2", "pool"]]),
        ("f", [["norm", "relu"], ["conv", "norm2", "add", "relu2"]]),
        ("ace", [["norm"], ["conv"], ["norm2", "add"], ["relu2", "pool"]]),
    ],
)
def test_a_result_with_two_readers_ends_a_chain(reads: str, expected: list[list[str]]) -> None:
    assert [[node.name for node in chain.nodes] for chain in found_chains(Before(reads))] == expected


class Residual(nn.Module):
    """What is added, in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv, self.norm, self.relu = kind, nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        match self.kind:
            case "plus":
                y = y + x
            case "turned":
                y = x + y
            case "torch":
                y = torch.add(y, x)
            case "in place":
                y += x
            case "number":
                y = y + 1.0
            case "twice":
                y = y + y
            case "alpha":
                y = torch.add(y, x, alpha=2)
            case "minus":
                y = y - x
        return self.relu(y)


@pytest.mark.parametrize("kind", ["plus", "turned", "torch", "in place"])
def test_additions_a_chain_takes_in(kind: str) -> None:
    (chain,) = found_chains(Residual(kind))
    assert chain.skip is not None
    assert (chain.skip.name, chain.slope, len(chain.nodes)) == ("x", 0.0, 4)


@pytest.mark.parametrize("kind", ["number", "twice", "alpha", "minus"])
def test_additions_a_chain_leaves(kind: str) -> None:
    (chain,) = found_chains(Residual(kind))
    assert (chain.skip, chain.slope, len(chain.nodes)) == (None, 1.0, 2)


@pytest.mark.parametrize(
    ("layers", "taken"),
    [
        ([nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)], 3),
        ([nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.2), nn.MaxPool2d((2, 2), (2, 2))], 3),
        ([nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2)], 2),
        ([nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2, 1)], 2),
        ([nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)], 2),
        ([nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1)], 2),
        ([nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2, dilation=2)], 2),
        ([nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AvgPool2d(2)], 2),
        ([nn.Conv2d(8, 8, 3), nn.MaxPool2d(2), nn.ReLU()], 1),
        ([nn.Conv2d(8, 8, 3), nn.LeakyReLU(-0.2), nn.MaxPool2d(2)], 1),
        ([nn.Conv2d(8, 8, 3), nn.GELU()], 1),
        ([nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU()], 1),
        ([nn.ReLU(), nn.MaxPool2d(2)], 2),
        ([nn.ReLU(), nn.AvgPool2d(2)], 0),
        ([nn.Conv2d(8, 12, 3)], 0),  # channels come in eights
        ([nn.Conv2d(8, 8, 3, groups=2)], 0),
        ([nn.Conv2d(8, 8, 3, dilation=2)], 0),
        ([nn.Conv2d(8, 8, 3, padding="same")], 0),
        ([nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")], 0),
        ([nn.Conv2d(8, 8, 3, stride=(1, 2))], 0),
        ([nn.Conv2d(8, 8, 3, padding=(1, 0))], 0),
        ([nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3))], 0),
        ([nn.Conv2d(3, 8, (3, 5), stride=2)], 1),
    ],
    ids=str,
)
def test_layers_a_chain_knows(layers: list[nn.Module], taken: int) -> None:
    found = found_chains(nn.Sequential(*layers))
    assert sum(len(chain.nodes) for chain in found) == taken


def test_a_program_holds_each_layer_once() -> None:
    model = build("resnet20", shortcut="B")
    program = trace(model, fuse=True)
    inside = [node.name for step in program.steps if step.chain for node in step.chain.nodes]
    whole = {step.into for step in trace(model).steps}
    assert len(inside) == len(set(inside))
    assert {step.into for step in program.steps} | set(inside) == whole
    assert all(step.into == step.chain.nodes[-1].name for step in program.steps if step.chain)


# -- Triton kernels, in the interpreter of triton ---------------------------------------------------------------------

#: Whole networks take the interpreter longest; one of each kind is enough for the suite.
SLOW = {"stack, myrtle, odd sizes", "stack, myrtle, no BN", "stack, resnet20, B", "stack, tiny10"}


@cache
def errors(slow: bool) -> dict[str, dict[str, float]]:
    """The errors of all cases of a tier; triton reads the variable when it is imported, so a process of its own."""
    names = [name for name in CASES if (name in SLOW) is slow]
    script = Path(__file__).parents[2] / "support" / "kernel_check.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *names], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["results"]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES])
def test_kernels(case: str) -> None:
    results, allowed = errors(case in SLOW), CASES[case][1]
    assert results[case]
    assert {name: error for name, error in results[case].items() if not error <= allowed} == {}
