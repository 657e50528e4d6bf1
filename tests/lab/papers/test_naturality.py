"""Naturality squares close for exact twins, and a disturbed weight opens the square of the arrow that reads it."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Net, edited, parameter
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import InputError, MismatchError
from intertwine.lab.papers.feature_duality import feature_classes, self_transformations
from intertwine.lab.papers.linear_equivalence import linear_equivalence
from intertwine.lab.papers.naturality import Arrow, Gap, Naturality, batches, naturality
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

# -- networks ----------------------------------------------------------------------------------------------------------


def rows(width: int = 3) -> Tensor:
    return torch.randn(6, width)


def image() -> Tensor:
    return torch.randn(2, 3, 6, 6)


def tokens() -> Tensor:
    return torch.randn(3, 5, 2)


def residual() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.b(F.relu(m.a(x)))
        x = x + m.d(torch.tanh(m.c(m.norm(x))))
        return m.head(x)

    outer = {"stem": nn.Linear(3, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 2)}
    return Net(forward, **outer, a=nn.Linear(6, 7), b=nn.Linear(7, 6), c=nn.Linear(6, 5), d=nn.Linear(5, 6))


def convolutional() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.relu(m.bn1(m.conv1(x)))
        return m.fc(F.max_pool2d(F.relu(m.bn2(m.conv2(x))), 2).flatten(1))

    parts = {"conv1": nn.Conv2d(3, 4, 3, padding=1), "bn1": nn.BatchNorm2d(4), "relu": nn.ReLU(inplace=True)}
    net = Net(forward, **parts, conv2=nn.Conv2d(4, 5, 3), bn2=nn.BatchNorm2d(5), fc=nn.Linear(20, 2)).eval()
    with torch.no_grad():
        for norm in (net.bn1, net.bn2):
            norm.running_var.uniform_(0.5, 2)
            norm.running_mean.normal_()
    return net


def attention() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT / 2).masked_fill(~mask, float("-inf")).softmax(-1)
        return m.head(x + m.out((scores @ v).transpose(1, 2).flatten(2)))

    return Net(forward, stem=nn.Linear(2, 6), qkv=nn.Linear(6, 24), out=nn.Linear(8, 6), head=nn.Linear(6, 2))


def rms() -> Net:
    """Lengths written by hand: the squares inside them do not rotate, their sum does."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.down(F.silu(m.up(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.gain)))
        return m.head(x)

    parts = {"stem": nn.Linear(2, 6), "up": nn.Linear(6, 5), "down": nn.Linear(5, 6), "head": nn.Linear(6, 2)}
    return Net(forward, **parts, gain=nn.Parameter(torch.rand(6) + 0.5))


def recurrent() -> Net:
    return Net(lambda m, x: m.head(m.layer(x)[0]), layer=nn.LSTM(2, 4, batch_first=True), head=nn.Linear(4, 2))


def in_place() -> Net:
    """A gain is multiplied into a tensor that was named before and is read again under that name."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.a(x)
        kept = m.same(y)
        y.mul_(m.gain)
        y.relu_()
        picked = (kept > kept.mean(-1, keepdim=True)).to(y.dtype)
        return m.b(kept) + m.c(picked)

    hidden = {"a": nn.Linear(3, 5), "same": nn.Identity(), "gain": parameter(5)}
    return Net(forward, **hidden, b=nn.Linear(5, 2), c=nn.Linear(5, 2))


def made_of_weights() -> Net:
    """The weight that meets the data is computed from two parameters, so both belong to that arrow."""

    def forward(m: Net, x: Tensor) -> Tensor:
        direction = m.direction / m.direction.norm(dim=1, keepdim=True)
        return m.b(F.relu(F.linear(x, direction * m.length[:, None])))

    return Net(forward, direction=parameter(5, 3), length=parameter(5), b=nn.Linear(5, 2))


NETWORKS: dict[str, tuple[Callable[[], Net], Callable[[], Tensor], bool]] = {
    "residual": (residual, rows, False),
    "convolutional": (convolutional, image, False),
    "attention": (attention, tokens, False),
    "attention with matrices": (attention, tokens, True),
    "rotations": (rms, tokens, True),
    "recurrent": (recurrent, tokens, False),
    "in place": (in_place, rows, False),
    "made of weights": (made_of_weights, rows, False),
}


@cache
def twins(name: str) -> tuple[nn.Module, nn.Module, Element, Tensor, Symmetry]:
    """(a, b, the element that takes b to a, data, symmetry); a is folded where matrices need it."""
    torch.manual_seed(0)
    make, data, continuous = NETWORKS[name]
    b, x = make().double(), data().double()
    sym = it.symmetry(b, x, continuous=continuous)
    assert sym.wires
    g = sym.random(seed=1)
    return sym.act(g, b), b, g, x, sym


# -- twins -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_twins_are_natural(name: str) -> None:
    a, b, g, x, sym = twins(name)
    found = naturality(a, b, g, x, symmetry=sym)
    assert found.ok
    assert found.max < 1e-12
    assert any(arrow.from_input for arrow in found.arrows)
    assert {w for arrow in found.arrows for w in arrow.weights} >= {n for n, _ in a.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
def test_another_element_is_not_natural(name: str) -> None:
    a, b, _, x, sym = twins(name)
    assert not naturality(a, b, sym.random(seed=2), x, symmetry=sym).ok
    assert not naturality(a, b, None, x, symmetry=sym).ok
    assert naturality(a, a, None, x, symmetry=sym).max < 1e-15  # sums may be taken in another order


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "rotations"])
def test_a_disturbed_weight_opens_the_square_that_reads_it(name: str) -> None:
    a, b, g, x, sym = twins(name)
    for parameter_name, _ in a.named_parameters():
        spoilt = edited(a, **{parameter_name.replace(".", "__"): lambda w: 1.01 * w + 0.01})
        found = naturality(spoilt, b, g, x, symmetry=sym)
        opened = {arrow.name for arrow in found.arrows if arrow.residual > found.tolerance}
        assert opened == {arrow.name for arrow in found.arrows if parameter_name in arrow.weights}
        assert opened, parameter_name
        assert found.worst is not None
        assert parameter_name in found.worst.weights


def test_the_order_of_a_and_b() -> None:
    a, b, g, x, sym = twins("residual")
    assert naturality(b, a, g.inverse(), x, symmetry=sym).ok
    assert not naturality(b, a, g, x, symmetry=sym).ok


def test_natural_transformations_compose() -> None:
    a, b, g, x, sym = twins("attention")
    h = sym.random(seed=5)
    top = sym.act(h, a)
    assert naturality(top, a, h, x, symmetry=sym).ok
    assert naturality(top, b, h @ g, x, symmetry=sym).ok
    assert not naturality(top, b, g @ h, x, symmetry=sym).ok


def test_a_trained_pair_has_a_score() -> None:
    """Two networks with nothing in common are far from natural, one that was trained on for a little is near."""
    torch.manual_seed(0)
    x = rows()
    a, far = residual(), residual()
    near = copy.deepcopy(a)
    optimizer = torch.optim.SGD(near.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        near(x).square().sum().backward()
        optimizer.step()
    close, apart = (naturality(a, b, None, x) for b in (near, far))
    assert 1e-6 < close.max < 0.5 < apart.max <= 2


# -- results -----------------------------------------------------------------------------------------------------------


def test_what_is_returned() -> None:
    a, b, g, x, sym = twins("convolutional")
    spoilt = edited(a, conv2__weight=lambda w: 2 * w)
    found = naturality(spoilt, b, g, x, symmetry=sym, tolerance=1e-8)
    assert isinstance(found, Naturality)
    worst = found.worst
    assert isinstance(worst, Arrow)
    assert worst.op == "aten.conv2d.default"
    assert worst.place.endswith("in conv2")
    assert set(worst.weights) == {"conv2.weight", "conv2.bias"}
    assert worst.residual == found.max
    assert repr(found).startswith("Naturality(not natural: ")
    assert "1 batches, largest residual" in repr(found)
    assert repr(found).endswith("in conv2))")
    entry = found.to_dict()
    assert entry["ok"] is False
    assert entry["tolerance"] == 1e-8
    assert len(entry["arrows"]) == len(found.arrows)
    assert entry["arrows"][0]["name"] == found.arrows[0].name


def test_the_models_are_not_touched() -> None:
    a, b, g, x, sym = twins("in place")
    before = [copy.deepcopy(m.state_dict()) for m in (a, b)]
    kept = x.clone()
    naturality(a, b, g, x, symmetry=sym)
    for model, state in zip((a, b), before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert torch.equal(x, kept)


def test_a_residual_is_bounded_and_judged_by_what_went_in() -> None:
    one, none = torch.ones(3), torch.zeros(3)
    assert Gap.between(one, -one, 1.0).residual == 2
    assert Gap.between(one, none, 1.0).residual == 1
    assert Gap.between(none, none, 0.0).residual == 0
    assert Gap.between(1e-17 * one, -1e-17 * one, 1.0).residual < 1e-9, "both are rounding of something of size 1"
    assert Gap.between(one, torch.tensor([1.0, 1.0, float("inf")]), 1.0).residual == float("inf")
    masked = torch.tensor([1.0, 1.0, torch.finfo(torch.float64).min], dtype=torch.float64)
    moved = torch.tensor([1.0, 2.0, torch.finfo(torch.float64).min], dtype=torch.float64)
    assert Gap.between(masked, moved, 1.0).residual == pytest.approx(1 / 5**0.5)


# -- data --------------------------------------------------------------------------------------------------------------


def loader(*sizes: int) -> Iterator[list[Tensor]]:
    for size in sizes:
        yield [torch.randn(size, 3, dtype=torch.float64), torch.zeros(size)]


def test_data_in_every_form() -> None:
    a, b, g, x, _ = twins("residual")
    y = torch.zeros(len(x))
    forms: list[Any] = [x, (x,), [(x, y)], [[x, y], [x, y]], [x], [((x,), y)], [[x]]]
    for data in forms:
        assert naturality(a, b, g, data).ok
    assert naturality(a, b, g, forms[3]).batches == 2
    net = Net(lambda m, left, *, right: m.b(F.relu(m.a(left + right))), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    both = Net(lambda m, given: m.net(given["left"], right=given["right"]), net=net)
    given = {"left": rows(), "right": rows()}
    assert naturality(both, both, None, (given,)).ok
    named = Net(lambda m, left, right: m.net(left, right=right), net=net)
    assert naturality(named, named, None, given).ok
    assert naturality(named, named, None, [given, (given, y)]).batches == 2


def test_batches_of_several_sizes() -> None:
    """The last batch of a loader is smaller; residuals are those of all data together."""
    a, b, g, _, sym = twins("residual")
    assert naturality(a, b, g, loader(6, 6, 4), symmetry=sym).ok
    assert naturality(a, b, g, loader(6, 4)).batches == 2
    spoilt = edited(a, head__weight=lambda w: w + 0.1)
    torch.manual_seed(1)
    parts = list(loader(6, 4))
    whole = torch.cat([x for x, _ in parts])
    split, together = (naturality(spoilt, b, g, data, symmetry=sym).max for data in (parts, whole))
    assert split == pytest.approx(together, rel=1e-12)


def test_float32_models_and_data() -> None:
    _, b, g, x, _ = twins("residual")
    low = copy.deepcopy(b).float()
    high = copy.deepcopy(low).double()
    sym = it.symmetry(low, x.float())
    moved = sym.act(g, high)  # acts in float64 on the very numbers that float32 holds
    assert naturality(moved, low, g, [x.float()], symmetry=sym).max < 1e-12
    assert 1e-12 < naturality(moved.float(), low, g, x.float()).max < 1e-5


def test_another_program_for_another_shape() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = F.relu(m.a(x))
        return m.b(y if len(x) < 5 else y + 1)

    net = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    message = r"shapes \[\(6, 3\)\] the model runs a different program .* separately"
    with pytest.raises(MismatchError, match=message):
        naturality(net, net, None, [rows()[:4], rows()])


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "has no batches"),
        (3, "The data is a int. Pass a tensor"),
        ("digits", "The data is a str"),
        ([(1, 2, 3)], "A batch is a tuple of 3, so its inputs are not clear"),
        ([None], "A batch is a NoneType"),
    ],
)
def test_data_that_is_none(data: Any, message: str) -> None:
    with pytest.raises(it.InputError, match=message):
        list(batches(data))


def test_an_element_of_another_architecture() -> None:
    a, b, _, x, _ = twins("residual")
    foreign = twins("in place")[2]
    with pytest.raises(MismatchError, match="The element belongs to the symmetry of another architecture"):
        naturality(a, b, foreign, x)


def test_a_model_of_another_architecture() -> None:
    a, _, g, x, _ = twins("residual")
    narrow = Net(lambda m, x: m.b(m.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    with pytest.raises(MismatchError, match=r"Call intertwine.symmetry on this model"):
        naturality(a, narrow, g, x)


def test_no_model(unchecked: None) -> None:
    a, _, g, x, _ = twins("residual")
    with pytest.raises(it.InputError, match=r"must be a torch.nn.Module"):
        naturality(a, a.state_dict(), g, x)  # type: ignore[arg-type]


# -- swaps, classes, linear maps ---------------------------------------------------------------------------------------


def test_swaps_at_a_convolution() -> None:
    """Channels of an image are features, their pixels samples; the copy of a channel can be swapped with it."""
    torch.manual_seed(0)
    net = convolutional().double()
    copied = edited(net, conv1__weight=lambda w: w[[0, 1, 2, 0]], conv1__bias=lambda b: b[[0, 1, 2, 0]])
    x = image().double()
    found = self_transformations(copied, "conv1", x)
    assert found.swaps == found.equal == ((0, 3),)
    assert found.dual
    assert found.multiple
    assert self_transformations(copied, "bn1", x).swaps == (), "the norm tells them apart"
    assert not self_transformations(net, "conv1", [(x, None), (x, None)]).multiple
    assert repr(found) == (
        "SelfTransformations(4 features at 'conv1': 1 natural swaps with the input arrow, 1 pairs of equal features)"
    )
    assert found.to_dict()["swaps"] == ((0, 3),)


def test_swaps_of_tokens() -> None:
    net = twins("attention")[1]
    assert self_transformations(net, "stem", twins("attention")[3]).width == 6
    assert self_transformations(net, "stem", twins("attention")[3], axis=1).width == 5


def test_swaps_that_cannot_be_tried() -> None:
    wide = nn.Sequential(nn.Linear(3, 80), nn.ReLU(), nn.Linear(80, 2))
    with pytest.raises(it.InputError, match=r"The 80 features .* have 3160 swaps.* the maximum is 2048"):
        self_transformations(wide, "0", rows(), input_arrow=False)
    with pytest.raises(it.InputError, match=r"Unknown module 'hidden'. Choose one of: 0, 1, 2"):
        self_transformations(wide, "hidden", rows())
    with pytest.raises(it.InputError, match=r"have no axis 4. Pass the axis"):
        self_transformations(wide, "0", rows(), axis=4)
    shared = Net(lambda m, x: m.a(F.relu(m.a(x))), a=nn.Linear(3, 3))
    with pytest.raises(it.InputError, match=r"runs 2 times in one forward pass, but must run once"):
        self_transformations(shared, "a", rows())


def test_classes_of_features() -> None:
    z = torch.randn(50, 6, dtype=torch.float64)
    z[:, 4] = z[:, 1]
    z[:, 5] = z[:, 2] * (1 + 1e-7)
    assert feature_classes(z).labels == (0, 1, 2, 3, 1, 4)
    assert feature_classes(z, tolerance=1e-6).groups == ((0,), (1, 4), (2, 5), (3,))
    assert feature_classes(z, tolerance=0.0).count == 5
    assert feature_classes(z, tolerance=10.0).count == 1
    assert repr(feature_classes(z)) == "FeatureClasses(5 classes of 6 features, tolerance 1e-09)"
    assert feature_classes(z).to_dict() == {"count": 5, "labels": [0, 1, 2, 3, 1, 4], "tolerance": 1e-9}


def test_zero_features_are_one_class() -> None:
    z = torch.zeros(5, 4)
    z[:, 2] = 1
    assert feature_classes(z).groups == ((0, 1, 3), (2,))
    assert feature_classes(torch.zeros(5, 0)).count == 0


def test_a_chain_of_neighbours_is_one_class() -> None:
    z = 1 + 1e-3 * torch.arange(4, dtype=torch.float64).expand(7, 4)
    assert feature_classes(z, tolerance=1.1e-3).count == 1
    assert feature_classes(z[:, ::2], tolerance=1.1e-3).count == 2


def test_classes_agree_with_one_pair_at_a_time() -> None:
    torch.manual_seed(0)
    base = torch.randn(30, 12, dtype=torch.float64)
    z = base[:, torch.randint(0, 12, (40,))] + 1e-8 * torch.randn(30, 40, dtype=torch.float64)
    found = feature_classes(z, tolerance=1e-7).labels
    same = [[float((z[:, i] - z[:, j]).norm() / z[:, i].norm()) < 1e-7 for j in range(40)] for i in range(40)]
    assert all((found[i] == found[j]) == same[i][j] for i in range(40) for j in range(40))


def test_classes_of_wide_layers_are_quick() -> None:
    """Columns that differ by rounding alone cannot be told by a Gram matrix, which loses half of the digits."""
    torch.manual_seed(0)
    z = torch.randn(64, 1024, dtype=torch.float64).repeat(1, 2)
    z[:, 1024:] *= 1 + 1e-10 * torch.arange(1024, dtype=torch.float64)
    assert feature_classes(z, tolerance=1.005e-8).count == 1024 + 1024 - 101


@pytest.mark.parametrize(
    ("features", "tolerance", "message"),
    [
        (torch.zeros(3), 0.1, r"The features are a tensor of shape \(3,\)"),
        (torch.full((2, 2), float("nan")), 0.1, "a tensor with infinite entries or NaN"),
        (torch.zeros(2, 2), -1.0, "tolerance must be 0 or more, but is -1.0"),
    ],
)
def test_features_that_cannot_be_sorted(features: Tensor, tolerance: float, message: str, unchecked: None) -> None:
    with pytest.raises(it.InputError, match=message):
        feature_classes(features, tolerance)


def test_linear_maps_between_features() -> None:
    torch.manual_seed(0)
    z = torch.randn(30, 4, dtype=torch.float64)
    z[:, 3] = z[:, 0] + z[:, 1]  # rank 3, so that the map is not unique
    matrix = torch.randn(4, 4, dtype=torch.float64)
    found = linear_equivalence(z @ matrix.mT, z)
    assert found.ok
    assert (found.rank_a, found.rank_b) == (3, 3)
    assert found.matrix is not None
    assert torch.allclose(z @ found.matrix.mT, z @ matrix.mT)
    assert float(torch.linalg.cond(found.matrix)) < 1e6, "it is invertible although the features do not force it"
    assert repr(found).startswith("LinearEquivalence(equivalent: residual ")


def test_a_map_that_forgets_is_no_equivalence() -> None:
    """Least squares finds a perfect fit in one direction; the other shows that it has no inverse."""
    z = torch.randn(30, 3, dtype=torch.float64)
    less = z * torch.tensor([1.0, 1.0, 0.0])
    found = linear_equivalence(less, z)
    assert found.forward < 1e-12
    assert found.backward > 0.1
    assert not found.ok
    assert found.matrix is None
    assert found.to_dict()["rank_a"] == 2
    few = linear_equivalence(z[:2], z[:2] @ torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)))
    assert few.ok
    assert few.matrix is not None
    assert few.matrix.shape == (3, 3)
    assert linear_equivalence(0 * z, 0 * z).ok
    assert linear_equivalence(0 * z, z).backward == 1


def test_features_that_cannot_be_mapped(unchecked: None) -> None:
    with pytest.raises(MismatchError, match=r"The features have shapes \(5, 3\) and \(5, 4\)"):
        linear_equivalence(torch.zeros(5, 3), torch.zeros(5, 4))
    with pytest.raises(it.InputError, match="have infinite entries or NaN"):
        linear_equivalence(torch.full((5, 3), float("inf")), torch.zeros(5, 3))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_exact_twins_are_natural_in_the_numbers_they_have(kind: torch.dtype) -> None:
    """By default the rounding of a twin's weights is no difference, and a disturbance of ten times as much is one."""
    b = residual().to(kind)
    sym = it.symmetry(b.float(), rows())
    b = b.to(kind)
    g = sym.random(seed=0)
    a = sym.act(g, b)
    found = naturality(a, b, g, rows(), symmetry=sym)
    assert found.ok
    weight = a.get_parameter("a.weight")
    with torch.no_grad():
        weight.mul_(1 + 10 * found.tolerance * torch.randn(weight.shape).to(kind))
    assert not naturality(a, b, g, rows(), symmetry=sym).ok


def test_a_batch_of_three_parts_is_not_guessed_at() -> None:
    a = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with pytest.raises(InputError, match="A batch is a tuple of 3, so its inputs are not clear"):
        naturality(a, a, it.symmetry(a, x).identity(), [(x, x, x)])
