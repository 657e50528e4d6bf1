"""Folding is exact: planted duplicates come back, the function stays, and the result is a real, trainable module."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from networks import Net, gap, parameter, wire_at
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import intertwine as it
from intertwine import zoo
from intertwine.fold.fold import fold, fold_groups, shrink
from intertwine.fold.options import PAPER_CODE, PRINTED

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
SMALL = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def lively(model: nn.Module) -> nn.Module:
    """The model in double precision and evaluation mode, with batch statistics and norm weights of no special value."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                if tensor is not None:
                    tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
            if module.affine:
                module.weight.data[::3] *= -1
    return model.double().eval()


def planted(model: nn.Module, x: Tensor, copies: int = 2) -> tuple[nn.Module, dict[str, set[frozenset[int]]]]:
    """A copy in which features 1 to `copies` of every wire of four or more are made equal to feature 0.

    Everything that makes the feature is copied, in every layer that writes it; what reads it stays different.
    """
    twin, groups = copy.deepcopy(model), {}
    tensors = twin.state_dict(keep_vars=True)
    for wire in it.symmetry(model, x).wires:
        if wire.size < 4:
            continue
        groups[wire.name] = {frozenset(range(copies + 1))}
        for slot in wire.slots:
            if slot.axis == 0:  # layers read along axis 1
                tensor = tensors[slot.parameter].data
                tensor[slot.offset + 1 : slot.offset + 1 + copies] = tensor[slot.offset]
    return twin, groups


def merged_sets(groups: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, set[frozenset[int]]]:
    """The groups of two and more features, as sets."""
    return {name: {frozenset(g) for g in found if len(g) > 1} for name, found in groups.items()}


def chain(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def mobile() -> nn.Sequential:
    """A depthwise convolution between two others, all with BatchNorm."""
    return nn.Sequential(
        *(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, groups=6, bias=False),
            nn.BatchNorm2d(6),
        ),
        *(nn.ReLU6(), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)),
    )


def dense() -> Net:
    """Concatenated features with a BatchNorm over both, and a linear layer behind a flatten."""

    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.a(x).relu()
        both = torch.cat([first, m.b(first)], 1)
        return m.head(m.norm(both).relu().flatten(1))

    parts = {"a": nn.Conv2d(3, 5, 3, 2), "b": nn.Conv2d(5, 4, 3, padding=1), "norm": nn.BatchNorm2d(9)}
    return Net(forward, **parts, head=nn.Linear(81, 2))


NETWORKS = {
    "mlp": (lambda: chain(6, 9, 8, 3), torch.randn(4, 6)),
    "mlp-tanh": (lambda: chain(6, 9, 8, 3, act=nn.Tanh), torch.randn(4, 6)),
    "mlp-gelu": (lambda: chain(6, 9, 8, 3, act=nn.GELU), torch.randn(4, 6)),
    "mlp-prelu": (lambda: nn.Sequential(nn.Linear(6, 9), nn.PReLU(9), nn.Linear(9, 3)), torch.randn(4, 6)),
    "vgg": (lambda: zoo.build("vgg11", width=0.125), IMAGES),
    "vgg-bn": (lambda: zoo.build("vgg16_bn", width=0.125), IMAGES),
    "resnet20": (lambda: zoo.build("resnet20"), IMAGES),
    "resnet18": (lambda: zoo.build("resnet18", width=0.125), IMAGES),
    "tiny10": (lambda: zoo.build("tiny10"), IMAGES),
    "mobile": (mobile, SMALL),
    "dense": (dense, SMALL),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_planted_duplicates_come_back_exactly_003_F08_F13_F14(name: str) -> None:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    twin, groups = planted(lively(make()), x.double())
    folded = fold(twin, x.double(), beta=1e-7)
    assert {n: g for n, g in merged_sets(dict(folded.groups)).items() if g} == groups
    assert gap(twin, folded.model, x.double()) < 1e-9
    assert folded.parameters.after < folded.parameters.before
    assert folded.flops.after < folded.flops.before
    assert type(folded.model) is type(twin)
    assert [type(m) for m in folded.model.modules()] == [type(m) for m in twin.modules()]


def test_rules_follow_the_activation_003_D14() -> None:
    def rules_of(name: str) -> set[str]:
        make, x = NETWORKS[name]
        return set(fold(lively(make()), x.double(), rows="ward").rules.values())

    rules = {name: rules_of(name) for name in ("mlp", "mlp-tanh", "mlp-gelu", "mlp-prelu", "vgg-bn", "dense")}
    assert rules == {"mlp": {"sum"}, "mlp-tanh": {"mean"}, "mlp-gelu": {"mean"}, "mlp-prelu": {"sum"},
                     "vgg-bn": {"sum"}, "dense": {"mean"}}  # fmt: skip


def test_a_residual_wire_has_all_its_writers_and_readers_003_F13() -> None:
    """By hand: rows of both writers summed, columns of both readers averaged."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.head((h + m.b(h)).relu())

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 5), head=nn.Linear(5, 2)).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    (name,) = {w.name for w in it.symmetry(net, x).wires}
    small: Any = fold_groups(net, x, groups={name: [(1, 3)]}).model
    keep, mix = [0, 1, 2, 4], torch.eye(5, dtype=torch.float64)
    mix[1, 3] = 1.0
    mean = mix.clone()
    mean[1] /= 2
    assert torch.allclose(small.a.weight, (mix @ net.a.weight)[keep])
    assert torch.allclose(small.a.bias, (mix @ net.a.bias)[keep])
    assert torch.allclose(small.b.weight, (mix @ net.b.weight @ mean.T)[keep][:, keep])
    assert torch.allclose(small.head.weight, (net.head.weight @ mean.T)[:, keep])


def test_any_order_of_merging_gives_the_same_network_003_F09_D11() -> None:
    torch.manual_seed(0)
    twin, _ = planted(chain(6, 9, 3).double(), torch.zeros(1, 6).double(), copies=3)
    x = torch.randn(5, 6, dtype=torch.float64)
    once = fold_groups(twin, x, groups={"0": [(0, 1, 2, 3)]}).model
    first = fold_groups(twin, x, groups={"0": [(0, 1), (2, 3)]})
    twice = fold_groups(first.model, x, groups={"0": [(0, 1)]}).model
    assert gap(once, twice, x) < 1e-12  # features of two each: shares are equal
    weight = cast(Any, twin)[2].weight
    assert torch.allclose(cast(Any, once)[2].weight[:, 0], weight[:, :4].mean(1))
    other = fold(twin, x, beta=1e-7).model
    assert gap(twin, other, x) < 1e-12


def test_batch_norm_summed_as_the_papers_code_does_is_wrong_003_F12_D13() -> None:
    torch.manual_seed(0)
    twin, _ = planted(lively(zoo.build("tiny10")), IMAGES.double(), copies=1)
    pairs = {"conv1": [(0, 1)]}
    exact = fold_groups(twin, IMAGES.double(), groups=pairs)
    summed = fold_groups(twin, IMAGES.double(), groups=pairs, norm="sum")
    assert gap(twin, exact.model, IMAGES.double()) < 1e-12
    assert gap(twin, summed.model, IMAGES.double()) > 1e-5
    before, after = cast(Any, twin).bn1, cast(Any, summed.model).bn1
    for key in ("weight", "bias", "running_mean", "running_var"):
        assert torch.allclose(getattr(after, key)[0], getattr(before, key)[:2].sum())


def test_folded_batch_norm_keeps_training_mode_too_003_F12() -> None:
    """Duplicates merged: batch statistics normalise the small network as they did the large one."""
    torch.manual_seed(0)
    twin, _ = planted(lively(zoo.build("tiny10")), IMAGES.double())
    small = fold(twin, IMAGES.double(), beta=1e-7).model
    assert gap(copy.deepcopy(twin).train(), small.train(), IMAGES.double()) < 1e-4  # eps weighs a little differently


def test_equal_up_to_what_batch_norm_undoes_is_equal_003_F12() -> None:
    """A feature with its row scaled and flipped, and statistics to match, is the same feature."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=0.0), nn.ReLU(), nn.Linear(6, 2))
    lively(net)
    with torch.no_grad():
        net[0].weight[3], net[0].bias[3] = -2 * net[0].weight[1], -2 * net[0].bias[1]
        net[1].running_mean[3], net[1].running_var[3] = -2 * net[1].running_mean[1], 4 * net[1].running_var[1]
        net[1].weight[3], net[1].bias[3] = -net[1].weight[1], net[1].bias[1]
    x = torch.randn(5, 4, dtype=torch.float64)
    folded = fold(net, x, beta=1e-7)
    assert merged_sets(dict(folded.groups)) == {"0": {frozenset({1, 3})}}
    assert gap(net, folded.model, x) < 1e-12


def test_it_trains_saves_and_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.build("resnet20").train()
    folded = fold(model, IMAGES, beta=0.7, max_ratio=0.5)
    assert folded.model.training
    assert folded.removed > 0
    small = folded.model
    optimizer = torch.optim.SGD(small.parameters(), 0.05)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(small(IMAGES), torch.tensor([0, 1, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    save_file(small.state_dict(), tmp_path / "small.safetensors")
    widths = {name: int(width.after) for name, width in folded.widths.items()}
    again = shrink(zoo.build("resnet20"), IMAGES, widths=widths)
    again.load_state_dict(load_file(tmp_path / "small.safetensors"))
    assert gap(small.eval(), again.eval(), IMAGES) == 0.0
    torch.export.export(small, (IMAGES,))


def test_the_given_model_is_not_touched() -> None:
    torch.manual_seed(0)
    model = zoo.build("tiny10").train()
    before = copy.deepcopy(model.state_dict())
    fold(model, IMAGES, beta=0.5)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules())


def test_the_papers_options_run() -> None:
    model = zoo.build("tiny10")
    for options in (PRINTED, PAPER_CODE):
        assert fold(model, IMAGES, beta=0.9, **options).removed > 0


def test_a_parameter_without_a_module_is_folded_too() -> None:
    """A scale per feature, held by the network itself."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)) * m.scale)

    net: Any = Net(forward, a=nn.Linear(3, 5), scale=parameter(5), b=nn.Linear(5, 2)).double()
    with torch.no_grad():
        net.a.weight[1], net.a.bias[1] = net.a.weight[4], net.a.bias[4]
    x = torch.randn(6, 3, dtype=torch.float64)
    assert fold(net, x, beta=1e-7).removed == 0  # the scales differ
    with torch.no_grad():
        net.scale[1] = net.scale[4]
    folded = fold(net, x, beta=1e-7)
    assert folded.removed == 1
    assert gap(net, folded.model, x) < 1e-12
    assert wire_at(it.symmetry(net, x), "scale[0]").name in folded.groups


class Gated(nn.Module):
    """One layer writes six features and the gate that they all pass: its first row has a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 7), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h[:, 1:].tanh() * h[:, :1].sigmoid())


class Experts(nn.Module):
    """A mixture of two experts by hand: each takes its own column of the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return sum((shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)), torch.zeros(()))


def shuffled() -> nn.Sequential:
    """Of twelve channels every four become the pixels of one, so one part of their axis moves and two do not."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.PixelShuffle(2), nn.ReLU()),
        nn.Conv2d(3, 2, 3),
    )


#: Networks with an axis that is frozen in part: (network, input, layer, rows that become the same, rows they become).
PARTLY_FROZEN: dict[str, tuple[Callable[[], nn.Module], Tensor, str, list[int], list[int]]] = {
    "pixel shuffle, the layer before": (shuffled, SMALL, "0", [5], [2]),
    "pixel shuffle, its own channels": (shuffled, SMALL, "2", [4, 5, 6, 7], [0, 1, 2, 3]),
    "gate": (Gated, torch.randn(9, 5), "first", [4], [2]),
    "experts": (Experts, torch.randn(9, 5), "experts.1.0", [4], [2]),
}


@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_axes_that_are_frozen_in_part_are_no_obstacle(name: str) -> None:
    make, x, layer, copies, of = PARTLY_FROZEN[name]
    torch.manual_seed(0)
    model = make().double().eval()
    module: Any = model.get_submodule(layer)
    with torch.no_grad():
        module.weight[copies], module.bias[copies] = module.weight[of], module.bias[of]
    folded = fold(model, x.double(), beta=1e-6)
    smaller: Any = folded.model.get_submodule(layer)
    assert folded.removed == 1
    assert len(smaller.weight) == len(module.weight) - len(copies)
    assert gap(model, folded.model, x.double()) < 1e-12
    assert len(set(folded.skipped)) == len(folded.skipped)
    assert it.complexity(model, x.double()).layers
    assert it.fold_to(model, x.double(), parameters=0.9).parameters.share <= 0.9
