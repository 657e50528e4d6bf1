"""The rules of folding against numbers computed by hand: sums and means, norms, the stop rule, options, cutting."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Net, gap
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from intertwine import zoo
from intertwine.errors import InputError
from intertwine.fold.fold import build_fold, fold
from intertwine.fold.merging import MergeState
from intertwine.fold.options import CHOICES, PAPER_CODE, Options
from intertwine.fold.prepare import prepare
from intertwine.fold.result import Fold, shrink

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATOR = torch.Generator().manual_seed(5)
ROWS = torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR)
IMAGES = torch.randn(2, 3, 7, 7, dtype=torch.float64, generator=GENERATOR)
THREE = [(1, 3, 4)]  # of five features: a group of three, so that shares of a half are wrong


def ready(model: nn.Module) -> Any:
    """In double precision and evaluation mode, every parameter and every statistic of no special value."""
    g = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, (nn.modules.batchnorm._NormBase, nn.PReLU)):
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.data = torch.rand(tensor.shape, generator=g) + 0.5
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.weight is not None:
                module.weight.data[::2] *= -1
    return model.double().eval()


def mixers(size: int, groups: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Matrices that add up, and that average, the features of every group; those in no group stay."""
    alone = [(i,) for i in range(size) if not any(i in g for g in groups)]
    rows = [[float(i in g) for i in range(size)] for g in sorted([*map(tuple, groups), *alone])]
    total = torch.tensor(rows, dtype=torch.float64)
    return total, total / total.sum(1, keepdim=True)


ADD, MEAN = mixers(5, THREE)


def by_groups(model: nn.Module, x: Tensor, groups: Mapping[str, Sequence[Sequence[int]]], norm: str = "fold") -> Fold:
    """Given groups merged one feature after the other, each feature with the same weight."""
    prepared = prepare(model, ((x,), {}), norm)
    merging = MergeState(prepared.wires, Options(rows="mean", norm=norm))
    for w, wire in enumerate(prepared.wires):
        for first, *others in groups.get(wire.name, ()):
            for other in others:
                merging.merge(w, first, other)
    return build_fold(prepared, merging)


def affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm in evaluation mode."""
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return scale, norm.bias - scale * norm.running_mean


def same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 1e-11 * expected.abs().max())


def tall(vector: Tensor) -> Tensor:
    """Numbers of channels, to be used on images."""
    return vector[:, None, None]


# -- rule "sum": rows added, columns averaged --------------------------------------------------------------------------


@torch.no_grad()
def test_sum_rule_through_prelu_003_F08() -> None:
    """A slope per feature is averaged, whatever the scales."""
    model = ready(nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 2)))
    folded = by_groups(model, ROWS, groups={"0": THREE})
    assert folded.rules == {"0": "sum"}
    small: Any = folded.model
    assert same(small[0].weight, ADD @ model[0].weight)
    assert same(small[0].bias, ADD @ model[0].bias)
    assert same(small[1].weight, MEAN @ model[1].weight)
    assert same(small[2].weight, model[2].weight @ MEAN.T)
    assert same(small[2].bias, model[2].bias)
    assert small[1].num_parameters == 3


@torch.no_grad()
def test_sum_rule_through_batch_norm_and_prelu_003_F12() -> None:
    """As a function: the norm is part of the rows, so scales of different sign and size are added rightly."""
    model = ready(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.PReLU(5), nn.Conv2d(5, 2, 3)))
    folded = by_groups(model, IMAGES, groups={"0": THREE})
    assert folded.rules == {"0": "sum"}
    scale, shift = affine(model[1])
    rows = torch.einsum("kf,fihw->kihw", ADD, scale[:, None, None, None] * model[0].weight)
    hidden = F.prelu(F.conv2d(IMAGES, rows, ADD @ (scale * model[0].bias + shift)), MEAN @ model[2].weight)
    expected = F.conv2d(hidden, torch.einsum("ofhw,kf->okhw", model[3].weight, MEAN), model[3].bias)
    assert same(folded.model(IMAGES), expected)
    small: Any = folded.model
    # statistics and γ keep their meaning: |γ| is added up, and √var is the mean of the √var weighted by |γ|
    gamma, deviation = model[1].weight.abs(), (model[1].running_var + 1e-5).sqrt()
    assert same(small[1].weight, (ADD @ gamma) * model[1].weight[:3].sign())  # the sign of the first of a group
    assert same((small[1].running_var + 1e-5).sqrt(), (ADD @ (gamma * deviation)) / (ADD @ gamma))
    assert same(small[1].bias, ADD @ model[1].bias)


@torch.no_grad()
def test_sum_rule_through_depthwise_convolution_003_F08() -> None:
    """Kernels of their own are averaged, their biases added, and groups and channels stated anew."""
    layers = (nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 5, 3, groups=5), nn.ReLU(), nn.Conv2d(5, 2, 1))
    model = ready(nn.Sequential(*layers))
    folded = by_groups(model, IMAGES, groups={"0": THREE})
    assert folded.rules == {"0": "sum"}
    small: Any = folded.model
    assert same(small[0].weight, torch.einsum("kf,fihw->kihw", ADD, model[0].weight))
    assert same(small[0].bias, ADD @ model[0].bias)
    assert same(small[2].weight, torch.einsum("kf,fihw->kihw", MEAN, model[2].weight))
    assert same(small[2].bias, ADD @ model[2].bias)
    assert same(small[4].weight, torch.einsum("ofhw,kf->okhw", model[4].weight, MEAN))
    assert (small[2].groups, small[2].in_channels, small[2].out_channels) == (3, 3, 3)
    assert (small[0].out_channels, small[4].in_channels) == (3, 3)


@torch.no_grad()
def test_sum_rule_where_features_are_concatenated_003_F13() -> None:
    """One wire is read by two layers, the other sits behind it in the second: columns by their blocks."""

    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.a(x).relu()
        return m.c(torch.cat([first, m.b(first).relu(), first], 1))

    model = ready(Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 6), c=nn.Linear(16, 2)))
    other = [(0, 5), (1, 2, 3)]
    folded = by_groups(model, ROWS, groups={"a": THREE, "b": other})
    assert folded.rules == {"a": "sum", "b": "sum"}
    add, mean = mixers(6, other)
    small: Any = folded.model
    assert same(small.a.weight, ADD @ model.a.weight)
    assert same(small.b.weight, add @ model.b.weight @ MEAN.T)
    assert same(small.b.bias, add @ model.b.bias)
    assert same(small.c.weight, model.c.weight @ torch.block_diag(MEAN, mean, MEAN).T)
    assert small.c.in_features == 9


@torch.no_grad()
def test_sum_rule_on_a_residual_wire_with_two_norms_003_F13() -> None:
    """Both writers are added, each with its norm; the layer of the branch has the wire on both sides."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.stem_norm(m.stem(x)).relu()
        return m.head((h + m.norm(m.branch(h))).relu())

    parts = {"stem": nn.Linear(4, 5), "stem_norm": nn.BatchNorm1d(5), "branch": nn.Linear(5, 5, bias=False)}
    model = ready(Net(forward, **parts, norm=nn.BatchNorm1d(5), head=nn.Linear(5, 2)))
    folded = by_groups(model, ROWS, groups={"stem": THREE})
    assert folded.rules == {"stem": "sum"}
    (one, first), (two, second) = affine(model.stem_norm), affine(model.norm)
    h = (ROWS @ (ADD @ (one[:, None] * model.stem.weight)).T + ADD @ (one * model.stem.bias + first)).relu()
    branch = h @ (ADD @ (two[:, None] * model.branch.weight) @ MEAN.T).T + ADD @ second
    assert same(folded.model(ROWS), (h + branch).relu() @ (model.head.weight @ MEAN.T).T + model.head.bias)
    small: Any = folded.model
    assert (small.branch.in_features, small.branch.out_features, small.norm.num_features) == (3, 3, 3)


@torch.no_grad()
def test_sum_rule_of_transposed_convolutions_and_embeddings_003_F08() -> None:
    model = ready(nn.Sequential(nn.ConvTranspose2d(3, 5, 3), nn.ReLU(), nn.ConvTranspose2d(5, 2, 3)))
    (name,) = fold(model, IMAGES, beta=1e-9).rules
    small: Any = by_groups(model, IMAGES, groups={name: THREE}).model
    assert same(small[0].weight, torch.einsum("kf,ifhw->ikhw", ADD, model[0].weight))
    assert same(small[2].weight, torch.einsum("kf,fohw->kohw", MEAN, model[2].weight))
    assert [(m.in_channels, m.out_channels) for m in (small[0], small[2])] == [(3, 3), (3, 2)]
    words = ready(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 2)))
    tokens = torch.tensor([[1, 2, 6]])
    less: Any = by_groups(words, tokens, groups={"0": THREE}).model
    assert same(less[0].weight, words[0].weight @ ADD.T)
    assert same(less[1].weight, words[1].weight @ MEAN.T)
    assert (less[0].embedding_dim, less[1].in_features) == (3, 3)


# -- rule "mean": rows averaged, columns added -------------------------------------------------------------------------


@torch.no_grad()
def test_mean_rule_through_a_chain_of_batch_norms_003_F12() -> None:
    """The second norm has no layer to go into: its scale and shift are two numbers per feature."""
    layers = (nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 3))
    model = ready(nn.Sequential(*layers))
    folded = by_groups(model, IMAGES, groups={"0": THREE})
    assert folded.rules == {"0": "mean"}
    (one, first), (two, second) = affine(model[1]), affine(model[3])
    rows = torch.einsum("kf,fihw->kihw", MEAN, one[:, None, None, None] * model[0].weight)
    hidden = F.conv2d(IMAGES, rows, MEAN @ (one * model[0].bias + first)).relu()
    hidden = (tall(MEAN @ two) * hidden + tall(MEAN @ second)).relu()
    expected = F.conv2d(hidden, torch.einsum("ofhw,kf->okhw", model[5].weight, ADD), model[5].bias)
    assert same(folded.model(IMAGES), expected)
    small: Any = folded.model
    assert same(small[3].running_mean, MEAN @ model[3].running_mean)
    assert same(small[3].running_var, MEAN @ model[3].running_var)


@torch.no_grad()
def test_mean_rule_through_depthwise_convolution_with_norms_003_F12() -> None:
    layers = (nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 5, 3, groups=5, bias=False))
    model = ready(nn.Sequential(*layers, nn.BatchNorm2d(5), nn.ReLU6(), nn.Conv2d(5, 2, 1)))
    folded = by_groups(model, IMAGES, groups={"0": THREE})
    assert folded.rules == {"0": "mean"}
    (one, first), (two, second) = affine(model[1]), affine(model[4])
    rows = torch.einsum("kf,fihw->kihw", MEAN, one[:, None, None, None] * model[0].weight)
    kernels = torch.einsum("kf,fihw->kihw", MEAN, two[:, None, None, None] * model[3].weight)
    hidden = F.conv2d(IMAGES, rows, MEAN @ first).relu()
    hidden = F.conv2d(hidden, kernels, MEAN @ second, groups=3).clamp(0, 6)
    expected = F.conv2d(hidden, torch.einsum("ofhw,kf->okhw", model[6].weight, ADD), model[6].bias)
    assert same(folded.model(IMAGES), expected)


@torch.no_grad()
def test_mean_rule_behind_instance_norm_003_D14() -> None:
    layers = (nn.Conv2d(3, 5, 3), nn.InstanceNorm2d(5, affine=True), nn.Tanh(), nn.Conv2d(5, 2, 3))
    model = ready(nn.Sequential(*layers))
    folded = by_groups(model, IMAGES, groups={"0": THREE})
    small: Any = folded.model
    assert folded.rules == {"0": "mean"}
    assert same(small[0].weight, torch.einsum("kf,fihw->kihw", MEAN, model[0].weight))
    assert same(small[1].weight, MEAN @ model[1].weight)
    assert same(small[3].weight, torch.einsum("ofhw,kf->okhw", model[3].weight, ADD))
    assert small[1].num_features == 3


#: Parts that a network uses beside its head, and its forward.
NORM_SHARED: dict[str, tuple[str, Any]] = {
    "the layer's output is read beside its norm": ("an", lambda m, x: m.c((m.n(y := m.a(x)) + 0.3 * y).relu())),
    "the same with a norm without γ": ("ak", lambda m, x: m.c((m.k(y := m.a(x)) + 0.3 * y).relu())),
    "one norm behind two layers": ("abn", lambda m, x: m.c(m.n(m.a(x)).relu() + m.n(m.b(x)).relu())),
    "one layer before two norms": ("ank", lambda m, x: m.c(m.n(m.a(x)).relu() + m.k(m.a(x.flip(1))).relu())),
}


@pytest.mark.parametrize("how", NORM_SHARED)
@torch.no_grad()
def test_a_norm_that_is_not_its_layers_alone_is_not_folded_into_it_003_F12(how: str) -> None:
    """Two features made equal: whatever is shared, the function stays."""
    parts = {"a": nn.Linear(4, 5), "b": nn.Linear(4, 5), "n": nn.BatchNorm1d(5), "k": nn.BatchNorm1d(5, affine=False)}
    used, forward = NORM_SHARED[how]
    model = ready(Net(forward, **{name: parts[name] for name in used}, c=nn.Linear(5, 2)))
    for name in used:
        for tensor in (*getattr(model, name).parameters(), *getattr(model, name).buffers()):
            if tensor.ndim:
                tensor.data[1] = tensor.data[4]
    folded = fold(model, ROWS, beta=1e-7, rows="mean")
    assert [g for g in folded.groups["a"] if len(g) > 1] == [(1, 4)]
    assert same(folded.model(ROWS), model(ROWS))
    assert same(fold(model, ROWS, beta=1e-7).model(ROWS), model(ROWS))


def twins(act: nn.Module, copies: int = 2) -> Any:
    """Eight features in groups of equal ones, each read by other columns."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 8), act, nn.Linear(8, 2)).double()
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias):
            tensor.copy_(tensor[: 8 // copies].repeat_interleave(copies, 0))
    return model


@torch.no_grad()
def test_the_sum_rule_is_wrong_for_tanh_and_fold_does_not_use_it_003_D14() -> None:
    model = twins(nn.Tanh())
    add, mean = mixers(8, [(0, 1), (2, 3), (4, 5), (6, 7)])
    exact = model(ROWS)
    printed = torch.tanh(ROWS @ (add @ model[0].weight).T + add @ model[0].bias) @ (model[2].weight @ mean.T).T
    assert float((printed + model[2].bias - exact).norm() / exact.norm()) > 0.1
    folded = fold(model, ROWS, beta=1e-7, rows="mean")
    assert folded.widths["0"].after == 4
    assert same(folded.model(ROWS), exact)
    relu = twins(nn.ReLU())
    assert same(fold(relu, ROWS, beta=1e-7, rows="mean").model(ROWS), relu(ROWS))


# -- decisions ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_counts_that_start_anew_at_every_merge_are_not_exact_003_D11() -> None:
    """Four equal features merged one after the other: shares of a half each time, as printed, against shares kept."""
    model = twins(nn.ReLU(), copies=4)
    exact = model(ROWS)
    rows, columns = model[0].weight[::4], model[2].weight
    halves = torch.tensor([1 / 8, 1 / 8, 1 / 4, 1 / 2], dtype=torch.float64)  # ((c₀ + c₁)/2 + c₂)/2 …
    hidden = (ROWS @ (4 * rows).T + 4 * model[0].bias[::4]).relu()
    printed = hidden @ torch.stack([columns[:, :4] @ halves, columns[:, 4:] @ halves]) + model[2].bias
    assert float((printed - exact).norm() / exact.norm()) > 0.1
    folded = fold(model, ROWS, beta=1e-7, rows="mean")
    assert folded.widths["0"].after == 2
    assert same(folded.model(ROWS), exact)
    small: Any = folded.model
    assert same(small[2].weight, torch.stack([columns[:, :4].mean(1), columns[:, 4:].mean(1)], 1))
    pairs = by_groups(model, ROWS, groups={"0": [(0, 1, 2, 3), (4, 7)]}).model
    assert same(pairs(ROWS), exact)


def test_a_sum_is_as_far_from_its_like_as_that_is_long_003_D12() -> None:
    """After one merge of three equal features: D = ‖w‖² as printed, 0 once the sum is divided by its count."""
    model = twins(nn.ReLU(), copies=4)
    length = float((model[0].weight[0].square().sum() + model[0].bias[0].square()).detach())
    found = {}
    for rows in ("sum", "mean"):
        merging = MergeState(prepare(model, ((ROWS,), {})).wires, Options(rows=rows))
        merging.distances(0)
        merging.merge(0, 0, 1)
        found[rows] = float(merging.distances(0).table[0, 2])
    assert found["sum"] == pytest.approx(length, rel=1e-12)
    assert abs(found["mean"]) < 1e-12 * length


def normed(k: int, layers: int = 1, shift: float = 0.0) -> Any:
    """Layers with BatchNorm whose features all come k times, without eps; behind the first layer with no shifts."""
    torch.manual_seed(2)
    parts: list[nn.Module] = []
    for i in range(layers):
        linear, norm = nn.Linear(3 * k if i else 4, 3 * k), nn.BatchNorm1d(3 * k, eps=0.0)
        far = shift if i else 1.0
        with torch.no_grad():
            linear.weight.copy_(torch.randn(3, linear.in_features).repeat_interleave(k, 0))
            linear.bias.copy_(far * torch.randn(3).repeat_interleave(k))
            norm.weight.copy_((torch.rand(3) + 0.5).repeat_interleave(k))
            norm.bias.fill_(shift)
            for tensor, values in ((norm.running_mean, far * torch.randn(3)), (norm.running_var, torch.rand(3) + 0.5)):
                assert tensor is not None
                tensor.copy_(values.repeat_interleave(k))
        parts += [linear, norm, nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(3 * k, 2, bias=False)).eval()


@pytest.mark.parametrize("k", [2, 3, 5])
@torch.no_grad()
def test_the_papers_batch_norm_rule_gives_k_to_the_one_and_a_half_003_D13(k: int) -> None:
    """k equal features: scale k^1.5 with every vector of the norm added up, k with the norm folded in."""
    model = normed(k).double()
    groups = {"0": [tuple(range(i, i + k)) for i in range(0, 3 * k, k)]}
    single = model[:2](ROWS)[:, ::k]  # each feature once, before the ReLU
    summed: Any = by_groups(model, ROWS, groups=groups, norm="sum").model
    exact: Any = by_groups(model, ROWS, groups=groups).model
    assert same(summed[:2](ROWS), k**1.5 * single)
    assert same(exact[:2](ROWS), k * single)
    assert same(summed(ROWS), k**0.5 * model(ROWS))
    assert same(exact(ROWS), model(ROWS))


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.99999, 1.00001), (0.3, 0.4, 2.0)])
@torch.no_grad()
def test_the_papers_batch_norm_rule_is_off_by_as_much_as_the_outputs_003_D13(
    shift: float, low: float, high: float
) -> None:
    """Two layers of pairs: outputs are twice too large where nothing is shifted, a relative error of 1, and about as
    much with shifts. Folded into the layer the norm is exact to the digits of single precision."""
    model, rows = normed(2, layers=2, shift=shift), ROWS.float()
    groups = {name: [(0, 1), (2, 3), (4, 5)] for name in ("0", "3")}
    expected = model(rows)
    summed = by_groups(model, rows, groups=groups, norm="sum").model(rows)
    assert low < float((summed - expected).norm() / expected.norm()) < high
    exact = by_groups(model, rows, groups=groups).model(rows)
    assert float((exact - expected).norm() / expected.norm()) < 5e-7


@torch.no_grad()
def test_the_papers_code_leaves_norms_out_of_distances_003_D13() -> None:
    """Two features with the same rows and other norms are one to the paper's code, and two once norms are folded in."""
    model = normed(2).double()
    model[1].weight[0] = 3.0
    model[3].weight[:, 1] = model[3].weight[:, 0]  # Eq. 6 looks at columns too
    model[3].weight[:, 5] = model[3].weight[:, 4]
    published = fold(model, ROWS, beta=1e-7, **PAPER_CODE)
    assert {g for g in published.groups["0"] if len(g) > 1} == {(0, 1), (4, 5)}
    exact = fold(model, ROWS, beta=1e-7, rows="mean")
    assert {g for g in exact.groups["0"] if len(g) > 1} == {(2, 3), (4, 5)}
    assert same(exact.model(ROWS), model(ROWS))


@pytest.mark.parametrize("what", ["layer", "norm", "mean"])
@torch.no_grad()
def test_whatever_shifts_a_feature_before_its_norm_or_behind_counts_003_F07(what: str) -> None:
    """The layer's bias, β or the running mean of one of a pair moved: two features, but to bias=False."""
    model = normed(2).double()
    {"layer": model[0].bias, "norm": model[1].bias, "mean": model[1].running_mean}[what][2] += 0.5
    found = fold(model, ROWS, beta=1e-7, rows="mean")
    assert {g for g in found.groups["0"] if len(g) > 1} == {(0, 1), (4, 5)}
    blind = fold(model, ROWS, beta=1e-7, rows="mean", bias=False)
    assert {g for g in blind.groups["0"] if len(g) > 1} == {(0, 1), (2, 3), (4, 5)}


# -- when a wire stops -------------------------------------------------------------------------------------------------


def line(*values: float) -> Any:
    """Features of one number each, read alike."""
    model: Any = nn.Sequential(nn.Linear(1, len(values), bias=False), nn.ReLU(), nn.Linear(len(values), 1)).double()
    with torch.no_grad():
        model[0].weight[:, 0] = torch.tensor(values)
        model[2].weight.fill_(1.0)
    return model


ONE = torch.ones(2, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("values", "beta", "maximum", "groups"),
    [
        # sums grow: (5 + 5.1 − 1)² = 82.81 lets 1 and 2 meet where 4.1² = 16.81, the largest at the start, does not
        ((5.0, 5.1, 1.0, 2.0), 0.05, "fixed", ((0, 1), (2,), (3,))),
        ((5.0, 5.1, 1.0, 2.0), 0.05, "recompute", ((0, 1), (2, 3))),
        # two are left: their distance is the largest now, and 1.9² = 3.61 of 3² = 9 at the start
        ((1.0, 1.1, 4.0), 0.5, "fixed", ((0, 1, 2),)),
        ((1.0, 1.1, 4.0), 0.5, "recompute", ((0, 1), (2,))),
    ],
)
def test_largest_distance_fixed_or_recomputed_003_F10(
    values: tuple[float, ...], beta: float, maximum: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    found = fold(line(*values), ONE, beta=beta, rows="sum", maximum=maximum)
    assert found.groups["0"] == groups


def test_a_wire_stops_above_beta_times_the_largest_and_not_at_it_003_F10() -> None:
    """Distances 1, 9 and 16 (0, 1 and 4): the first pair is merged from 1/16 on."""
    for beta, left in ((0.0624, 3), (0.0625, 2)):
        assert fold(line(2.0, 3.0, 6.0), ONE, beta=beta, rows="mean", maximum="fixed").widths["0"].after == left


def test_a_wire_stops_above_beta_times_the_usual_distance_003_F10() -> None:
    """Distances 1, 4, 9, 36, 64 and 81: the middle of 9 and 36 is 22.5, and 1 is merged from 1/22.5 on."""
    found = [fold(line(2.0, 3.0, 5.0, 11.0), ONE, beta=b / 22.5, rows="mean").widths["0"].after for b in (0.99, 1.01)]
    assert found == [4, 3]


def test_one_feature_far_away_changes_little_where_the_usual_distance_counts_003_F10() -> None:
    torch.manual_seed(0)
    rows = torch.randn(30, dtype=torch.float64).abs().tolist()
    for maximum, same in (("typical", True), ("fixed", False)):
        near, far = (
            fold(line(*rows, last), ONE, beta=0.01, rows="mean", maximum=maximum).widths["0"].after
            for last in (3.0, 300.0)
        )
        assert (abs(near - far) <= 1) is same, maximum


@torch.no_grad()
def test_copies_have_no_part_in_the_usual_distance_003_F10() -> None:
    """Most pairs are copies: the median of all is zero, and by it nothing but copies would be merged."""
    found = fold(line(*[1.0] * 30, 5.0, 5.2), ONE, beta=0.1, rows="mean")
    assert found.groups["0"] == (tuple(range(30)), (30, 31))


@pytest.mark.parametrize("rows", ["ward", "mean"])
@torch.no_grad()
def test_features_that_are_all_the_same_become_one_in_spite_of_rounding_003_F10(rows: str) -> None:
    """The largest distance is rounding then, and a small share of it would keep them apart."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(33, 23), nn.ReLU(), nn.Linear(23, 2)).double()
    for tensor in (model[0].weight, model[0].bias):
        tensor.copy_(100 * tensor[:1].expand_as(tensor))
    x = torch.randn(3, 33, dtype=torch.float64)
    folded = fold(model, x, beta=1e-7, rows=rows)
    assert folded.widths["0"].after == 1
    assert same(folded.model(x), model(x))


@pytest.mark.parametrize(("share", "left"), [(0.2, 4), (0.39, 4), (0.4, 3), (0.5, 3), (0.8, 1), (1, 1), (None, 1)])
def test_max_ratio_counts_features_of_the_wire_003_F11(share: float | None, left: int) -> None:
    model = line(1.0, 1.01, 1.02, 1.04, 9.0)
    for schedule in CHOICES["schedule"]:
        found = fold(model, ONE, beta=0.99999, rows="mean", maximum="fixed", max_ratio=share, schedule=schedule)
        assert found.widths["0"].after == left


def test_max_ratio_is_of_every_wire_on_its_own_003_F11() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    for schedule in CHOICES["schedule"]:
        found = fold(model, ROWS, beta=0.99, rows="mean", max_ratio=0.3, schedule=schedule)
        assert {name: width.after for name, width in found.widths.items()} == {"0": 7, "2": 5}


def test_schedules_differ_where_layers_shorten_each_other_003_F11() -> None:
    """Layerwise: merging the first wire makes two rows of the second alike (their inputs become one). Round-robin: the
    second wire has merged another pair by then. Rows of the second: (6, 0), (0, 6) and (3.5, 1)."""
    model: Any = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[0].weight[:], model[0].bias[:] = 1.0, 0.0
        model[2].weight[:] = torch.tensor([[6.0, 0.0], [0.0, 6.0], [3.5, 1.0]])
        model[2].bias[:] = 0.0
    options: dict[str, Any] = {"beta": 0.2, "rows": "mean"}
    assert fold(model, ONE, schedule="layerwise", **options).groups == {"0": ((0, 1),), "2": ((0, 1), (2,))}
    turns = fold(model, ONE, schedule="round-robin", **options)
    assert turns.groups == {"0": ((0, 1),), "2": ((0, 1, 2),)}


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOICES)
def test_every_word_is_checked_and_known_ones_are_named(name: str) -> None:
    known = ", ".join(CHOICES[name])
    near = CHOICES[name][-1] + "s"
    asked: dict[str, Any] = {name: near}
    with pytest.raises(InputError) as said:
        Options(**asked)
    assert f"Unknown {name} {near!r}. Did you mean {CHOICES[name][-1]!r}? Choose one of: {known}." in str(said.value)
    for word in CHOICES[name]:
        asked[name] = word
        assert getattr(Options(**asked), name) == word
    assert getattr(Options(), name) == CHOICES[name][0]


@pytest.mark.parametrize("share", [0, 0.0, -0.5, 1.5, 2, float("nan")])
def test_max_ratio_is_a_share(share: float) -> None:
    with pytest.raises(InputError, match=r"max_ratio must be above 0 and at most 1, or None, but is"):
        Options(max_ratio=share)
    assert Options(max_ratio=1).most(5) == 4
    assert Options(max_ratio=0.5).most(5) == 2
    assert Options().most(5) == 4


def test_a_beta_for_every_wire() -> None:
    options = Options(beta={"a": 0.3})
    assert (options.beta_of("a"), options.beta_of("b"), Options(beta=0.2).beta_of("b")) == (0.3, None, 0.2)
    options.check_wires(["a", "b"])
    Options(beta=0.2).check_wires([])
    many = [f"w{i}" for i in range(9)]
    with pytest.raises(InputError) as said:
        options.check_wires(many)
    assert str(said.value).endswith(
        "which is no wire that can be folded. Choose one of: w0, w1, w2, w3, w4, w5, w6, w7 …."
    )
    with pytest.raises(InputError, match=r"given for 'a'.*Choose one of: none\.$"):
        options.check_wires([])
    with pytest.raises(InputError, match=r"Did you mean 'aa'\? Choose one of: aa\.$"):
        options.check_wires(["aa"])
    with pytest.raises(InputError, match=r"beta for 'a' must be above 0 and below 1, but is 1.0\. .* Try 0\.1\."):
        Options(beta={"b": 0.5, "a": 1.0})


# -- features that are seen together -----------------------------------------------------------------------------------


def channel_norm(x: Tensor) -> Tensor:
    """LayerNorm over channels without numbers of its own: no parameter tells that it is there."""
    return F.layer_norm(x.movedim(1, -1), (x.shape[1],)).movedim(-1, 1)


def test_only_the_wire_that_is_seen_together_is_left_alone_003_F11() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.c(m.b(channel_norm(m.a(x))).relu())

    model = ready(Net(forward, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 8, 3), c=nn.Conv2d(8, 2, 3)))
    folded = fold(model, IMAGES, beta=0.95, rows="mean")
    assert list(folded.groups) == ["b"]
    assert folded.removed > 0
    small: Any = folded.model
    assert torch.equal(small.a.weight, model.a.weight)
    assert "looks at them together (a norm over channels" in {skip.what: skip.reason for skip in folded.skipped}["a"]
    # by hand: the norm over fewer features is another function
    merged = copy.deepcopy(model)
    twin = merged.a.weight.data.clone()
    twin[1] = twin[0]
    assert not same(channel_norm(F.conv2d(IMAGES, twin[:5]))[:, :1], channel_norm(F.conv2d(IMAGES, twin))[:, :1])


@pytest.mark.parametrize(
    "seen",
    [
        lambda x: F.normalize(x, dim=1),
        lambda x: x / x.abs().amax(1, keepdim=True),
        lambda x: F.group_norm(x, 1),
        lambda x: x * torch.sigmoid(x.mean(1, keepdim=True)),
    ],
    ids=["length", "largest", "group norm", "gate"],
)
def test_other_ways_of_seeing_features_together(seen: Any) -> None:
    model = ready(Net(lambda m, x: m.b(seen(m.a(x))), a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 2, 3)))
    assert fold(model, IMAGES, beta=0.95, rows="mean").removed == 0


# -- cutting -----------------------------------------------------------------------------------------------------------


class Shortcut(nn.Module):
    """Zeros around the features of a stream, as many as make it as wide as the layer beside it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.pads = (0, 0, 0, 0, before, after)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pads)


def padded() -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.head((m.pad(h) + m.b(h)).relu().mean((2, 3)))

    torch.manual_seed(0)
    parts = {"a": nn.Conv2d(3, 5, 3), "pad": Shortcut(2, 4), "b": nn.Conv2d(5, 11, 3, padding=1)}
    return ready(Net(forward, **parts, head=nn.Linear(11, 2)))


@torch.no_grad()
def test_zeros_around_features_follow_the_features_beside_them_003_F13() -> None:
    model = padded()
    wires = {wire.size: wire.name for wire in prepare(model, ((IMAGES,), {})).wires}
    assert sorted(wires) == [2, 4, 5]  # before, behind and in the middle
    groups = {wires[5]: THREE, wires[2]: [(0, 1)], wires[4]: [(0, 1, 3)]}
    folded = by_groups(model, IMAGES, groups=groups)
    small: Any = folded.model
    assert small.pad.pads == (0, 0, 0, 0, 1, 2)
    add = torch.block_diag(mixers(2, [(0, 1)])[0], ADD, mixers(4, [(0, 1, 3)])[0])
    assert small.b.out_channels == 6
    assert same(small.b.bias, add @ model.b.bias)
    assert same(small.b.weight, torch.einsum("kf,fihw,ci->kchw", add, model.b.weight, MEAN))
    assert same(small.head.weight, model.head.weight @ (add / add.sum(1, keepdim=True)).T)
    assert model.pad.pads == (0, 0, 0, 0, 2, 4)
    again: Any = shrink(padded(), IMAGES, widths={n: int(w.after) for n, w in folded.widths.items()})
    assert again.b.out_channels == 6


def test_tied_parameters_stay_one_and_frozen_ones_frozen() -> None:
    torch.manual_seed(0)
    model: Any = Net(
        lambda m, x: m.c(m.b(m.a(x).relu()).relu()) + m.c(m.twin(m.a(x).relu()).relu()),
        a=nn.Linear(4, 5), b=nn.Linear(5, 6), twin=nn.Linear(5, 6), c=nn.Linear(6, 2),
    ).double()  # fmt: skip
    model.twin.weight, model.twin.bias = model.b.weight, model.b.bias
    model.a.weight.requires_grad_(False)
    small: Any = fold(model, ROWS, beta=0.9, rows="mean").model
    assert small.b.weight is small.twin.weight
    assert small.b.out_features == small.twin.out_features == len(small.b.weight) < 6
    assert not small.a.weight.requires_grad
    assert small.a.bias.requires_grad
    assert isinstance(small.a.weight, nn.Parameter)
    assert small.a.weight.data_ptr() != model.a.weight.data_ptr()


def test_shrink_makes_room_and_says_what_does_not_fit() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.PReLU(6), nn.Linear(6, 2))
    model: Any = nn.Sequential(*layers)
    before = copy.deepcopy(model.state_dict())
    small: Any = shrink(model, ROWS.float(), widths={"0": 3})
    assert (small[0].out_features, small[1].num_features, small[3].in_features, small[3].out_features) == (3, 3, 3, 6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(small[3].weight, model[3].weight[:, :3])
    for widths, text in (
        ({"0": 0}, r"width of the wire '0' must be from 1 to 8, but is 0\. Pass a network of the architecture"),
        ({"3": 7}, r"width of the wire '3' must be from 1 to 6, but is 7"),
        ({"33": 3}, r"A width is given for '33', which is no wire that can be folded\. Did you mean"),
    ):
        with pytest.raises(InputError, match=text):
            shrink(model, ROWS.float(), widths=widths)


# -- the result is a network like any other ----------------------------------------------------------------------------


def mobile() -> Any:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8))
    return ready(nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))).float()


@pytest.mark.parametrize("make", [mobile, lambda: padded().float()], ids=["depthwise", "padded"])
def test_saved_loaded_exported_and_trained(make: Any, tmp_path: Path) -> None:
    model, images = make(), IMAGES.float()
    folded = fold(model, images, beta=0.8, rows="mean", maximum="fixed", max_ratio=0.5)
    assert folded.removed > 0
    small = folded.model
    save_file(small.state_dict(), tmp_path / "small.safetensors")
    widths = {name: int(width.after) for name, width in folded.widths.items()}
    again = shrink(make(), images, widths=widths)
    again.load_state_dict(load_file(tmp_path / "small.safetensors"))
    assert gap(small, again, images) == 0.0
    exported = torch.export.export(small, (images,))
    assert torch.allclose(exported.module()(images), small(images), atol=1e-6)
    assert sum(p.numel() for p in exported.parameters()) == folded.parameters.after
    before = {name: tensor.clone() for name, tensor in small.named_parameters()}
    small.train()
    F.cross_entropy(small(images), torch.tensor([0, 1])).backward()
    torch.optim.SGD(small.parameters(), 0.1).step()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    assert any(not torch.equal(before[name], tensor) for name, tensor in small.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_attributes_of_modules_state_the_new_sizes() -> None:
    """Whatever a module of torch says of its sizes is what its tensors have."""
    x = torch.zeros(1, 3, 32, 32)
    for name in ("resnet20", "vgg11_bn"):
        small = fold(zoo.build(name, width=0.25), x, beta=0.8, rows="mean", max_ratio=0.5).model
        for module in small.modules():
            if isinstance(module, nn.Conv2d):
                assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
            elif isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert len(module.weight) == len(module.running_mean) == module.num_features
            elif isinstance(module, nn.Linear):
                assert module.weight.shape == (module.out_features, module.in_features)
        assert bool(small(x).isfinite().all())
