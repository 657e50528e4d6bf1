"""Similarities of stitched features: traced from rows and from sums, driven by gradients, and what they do not see."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import ortho_group
from sklearn.cross_decomposition import CCA
from sklearn.datasets import load_digits
from stitch_similarity import similarity_baseline, trace_sums
from torch import Tensor, nn
from torch.nn import functional

import intertwine as it
from intertwine.errors import MismatchError
from intertwine.stitch.direct import LinearMap, PairMoments
from intertwine.stitch.interpolation import along, interpolate
from intertwine.stitch.network import BatchNormStatistics, PairBatchNormStatistics, StitchedNetwork
from intertwine.stitch.result import Stitch
from intertwine.stitch.scores import Scorer, StitchScores, differentiable_cka, feature_similarities
from intertwine.stitch.split import SplitPair, StitchPoint
from intertwine.stitch.stitch import stitches

pytestmark = pytest.mark.usefixtures("one_thread")


def features(rows: int = 200, first: int = 6, second: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of a front and of a back that have something in common, with means of their own; float64."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, first, generator=generator, dtype=torch.float64) + 2
    mix = torch.randn(first, second, generator=generator, dtype=torch.float64)
    return a, a @ mix + 3 * torch.randn(rows, second, generator=generator, dtype=torch.float64) - 1


def biased_cka(x: Tensor, y: Tensor) -> float:
    """tr(KHLH)/√(tr(KHKH) tr(LHLH)), as printed."""
    h = np.eye(len(x)) - 1 / len(x)
    k, m = (h @ (z @ z.T) @ h for z in (x.double().numpy(), y.double().numpy()))
    return float((k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum()))


# -- from rows and from sums -------------------------------------------------------------------------------------------


def test_001_c24_traced_values_are_those_of_their_formulas() -> None:
    a, b = features()
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mapped = LinearMap(matrix, torch.ones(4, dtype=torch.float64))(a)
    found = feature_similarities(b, mapped)
    assert set(found) == {"linear_cka", "linear_cka_biased", "cca", "r2"}
    assert found["linear_cka_biased"] == pytest.approx(biased_cka(mapped, b), rel=1e-9)
    x, y = (z.numpy() - z.numpy().mean(0) for z in (mapped, b))
    correlations = np.linalg.svd(np.linalg.qr(x)[0].T @ np.linalg.qr(y)[0], compute_uv=False)
    assert found["cca"] == pytest.approx(correlations.mean(), rel=1e-9)
    left, right = CCA(1, scale=False, tol=1e-12, max_iter=10000).fit_transform(x, y)
    assert correlations[0] == pytest.approx(np.corrcoef(left[:, 0], right[:, 0])[0, 1], rel=1e-6)  # the oracle itself
    rest = mapped.numpy() - b.numpy()
    expected = 1 - np.square(rest).sum() / (len(b) * b.numpy().var(0).sum())
    assert found["r2"] == pytest.approx(expected, rel=1e-9)
    assert found["linear_cka"] == pytest.approx(it.measure(mapped, b, "linear_cka").value)


def test_d19_r2_follows_the_map_where_a_refit_could_not() -> None:
    """A stitch that scales all features away is still perfectly predictable."""
    a, _ = features()
    assert feature_similarities(a, a)["r2"] == 1.0
    far = feature_similarities(a, 3 * a)
    spread = float((a - a.mean(0)).square().sum())
    assert far["r2"] == pytest.approx(1 - 4 * float(a.square().sum()) / spread)
    assert far["linear_cka"] == pytest.approx(1.0)
    assert it.measure(3 * a, a, "r2").value == pytest.approx(1.0)
    assert feature_similarities(a, a + 5)["r2"] < 0  # a bias counts


def test_001_c24_sums_give_what_rows_give() -> None:
    for bias in (None, torch.tensor([1.0, -2.0, 0.5, 3.0])):
        fitted = LinearMap(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), bias)
        moments, batches = PairMoments(), [features(rows, seed=seed) for seed, rows in enumerate((50, 120, 7))]
        for a, b in batches:
            moments.update(a, b)
        a, b = (torch.cat(side) for side in zip(*batches, strict=True))
        rows, sums = feature_similarities(b, fitted(a)), trace_sums(moments, fitted)
        assert set(sums) == {"linear_cka_biased", "cca", "r2"}
        for name, value in sums.items():
            assert value == pytest.approx(rows[name], rel=1e-6), name


def test_001_c24_a_training_is_traced_from_its_start(
    network: nn.Sequential, digits: list[tuple[Tensor, Tensor]]
) -> None:
    """The first record is that of the direct fit: for least squares, its R² on the data it was fitted on."""
    first = nn.Linear(64, 20)
    nn.init.constant_(first.bias, 0.5)  # all units live
    other = nn.Sequential(first, nn.ReLU(), nn.Linear(20, 10))
    batch = digits[0]
    (found,) = stitches(
        other, network, ("1", "3"), "affine", data=[batch], test=digits[1:], epochs=4, trace_every=1, rate=0.01,
        drops=False,
    )  # fmt: skip
    traced = [record for record in found.history if "r2" in record]
    assert [record["step"] for record in traced] == [0, 1, 2, 3]
    a, b = (net[:n](batch[0]).detach().double().numpy() for net, n in ((other, 2), (network, 4)))
    design = np.c_[a, np.ones(len(a))]
    rest = b - design @ np.linalg.lstsq(design, b, rcond=None)[0]
    assert traced[0]["r2"] == pytest.approx(1 - np.square(rest).sum() / (len(b) * b.var(0).sum()), rel=1e-4)
    expected = biased_cka(torch.from_numpy(b - rest), torch.from_numpy(b))
    assert traced[0]["linear_cka_biased"] == pytest.approx(expected, rel=1e-4)
    falls = [record["r2"] for record in traced]
    assert max(falls) == falls[0]  # no map explains more than the one it starts from
    assert falls[-1] < falls[0]
    losses = [record["loss"] for record in found.history if "loss" in record]
    assert losses[-1] < losses[0]


def test_sums_of_a_map_that_loses_directions() -> None:
    a, b = features(300, 6, 5)
    moments = PairMoments()
    moments.update(a, b)
    fitted = LinearMap(torch.ones(5, 1).double() @ torch.linspace(1, 2, 6).double()[None])
    rows, sums = feature_similarities(b, fitted(a)), trace_sums(moments, fitted)
    assert sums["cca"] == pytest.approx(rows["cca"], rel=1e-6)
    assert sums["linear_cka_biased"] == pytest.approx(rows["linear_cka_biased"], rel=1e-6)


def test_sums_have_no_value_where_a_mean_leaves_single_precision_no_room_for_the_features() -> None:
    """As rows in single precision have none: beside 3e7 their differences are rounding."""
    a, b = features()
    moments = PairMoments()
    moments.update(a, b)
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for far, known in ((1e3, True), (3e7, False)):
        fitted = LinearMap(matrix, torch.tensor([far, 0, 0, 0], dtype=torch.float64))
        values = trace_sums(moments, fitted)["cca"], feature_similarities(b.float(), fitted(a).float())["cca"]
        assert values == pytest.approx((0.39963,) * 2, abs=1e-5) if known else np.isnan(values).all()


def test_positions_are_rows_and_broken_stitches_have_no_value() -> None:
    a, b = features(60, 4, 4)
    assert feature_similarities(b.view(5, 12, 4), a.view(5, 12, 4)) == feature_similarities(b, a)
    assert all(np.isnan(value) for value in feature_similarities(b, torch.full_like(a, torch.nan)).values())
    assert np.isnan(feature_similarities(b[:4], a[:4])["cca"])  # as many rows as features
    assert np.isnan(feature_similarities(torch.ones_like(b), a)["r2"])
    with pytest.raises(MismatchError, match=r"back network are \(60, 4\), but those of the stitch \(60, 3\)"):
        feature_similarities(b, a[:, :3])


# -- CKA with gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_001_c25_cka_with_gradients_is_the_measure(size: float) -> None:
    a, b = features()
    assert float(differentiable_cka(a, b)) == pytest.approx(it.measure(a, b, "linear_cka_biased").value, rel=1e-10)
    x, y = (size * a).float(), b.float()
    assert float(differentiable_cka(x, y)) == pytest.approx(biased_cka(a, b), rel=1e-5)


def test_001_c25_its_gradient_is_right() -> None:
    a, b = features(12, 3, 2)
    assert torch.autograd.gradcheck(differentiable_cka, (a.requires_grad_(), b.requires_grad_()))


def test_001_c25_stacks_are_compared_one_by_one() -> None:
    a, b = features()
    many = torch.stack([a, a.flip(0), a.square()])
    assert torch.allclose(
        differentiable_cka(many, b), torch.stack([differentiable_cka(one, b) for one in many]), rtol=1e-12
    )


def test_001_c25_cka_can_be_driven_down_at_no_cost_to_the_task() -> None:
    """A self-stitch from the identity: loss + w·CKA. What the task does not read is free to move."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 8, generator=generator)
    rows[:, 4:] *= 3  # the head reads nothing of these
    labels = (rows[:, 0] > 0).long()
    head = torch.zeros(2, 8)
    head[1, 0], head[0, 0] = 4.0, -4.0
    matrix = torch.eye(8, requires_grad=True)
    optimizer = torch.optim.Adam([matrix], lr=0.05)
    for _ in range(150):
        moved = rows @ matrix.T
        loss = functional.cross_entropy(moved @ head.T, labels) + differentiable_cka(moved, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = (rows @ matrix.T).detach()
    assert float(differentiable_cka(moved, rows)) < 0.7
    assert float(((moved @ head.T).argmax(1) == labels).double().mean()) > 0.98


# -- over many stitches ------------------------------------------------------------------------------------------------


def traced(*values: float | None, measure: str = "linear_cka_biased") -> Stitch:
    history = tuple({"step": i, "loss": 1.0} | ({} if v is None else {measure: v}) for i, v in enumerate(values))
    scores = StitchScores(10, 0.5, 1.0, 1.0, rr=5, rw=3, wr=0, ww=2)
    point = StitchPoint("a", "a", "none", (), 2, 2)
    return Stitch(nn.Identity(), point, "linear", "task", LinearMap(torch.eye(2)), scores, 0.8, 0.8, history)


def test_001_c26_baseline_over_pairs_and_layers() -> None:
    last = [0.9, 0.8, 0.95, 0.85]
    found = similarity_baseline([traced(0.1, value, None) for value in last])
    assert (found.mean, found.deviation) == pytest.approx((np.mean(last), np.std(last, ddof=1)))
    assert repr(found) == "Baseline(linear_cka_biased 0.875 ± 0.065 over 4 stitches)"
    assert similarity_baseline([traced(0.3)]).deviation == 0.0
    with pytest.raises(it.InputError, match=r"baseline of 'r2'.*has linear_cka_biased, loss, step. Fit.*trace_every"):
        similarity_baseline([traced(0.3)], "r2")
    with pytest.raises(it.InputError, match=r"has nothing\. Fit the stitches"):
        similarity_baseline([traced()])
    with pytest.raises(it.InputError, match="over no stitches"):
        similarity_baseline([])


# -- what similarity does not see --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> list[tuple[Tensor, Tensor]]:
    """The digits with labels, in three batches."""
    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.from_numpy(x).float() / 16, torch.from_numpy(y).long()
    return list(zip(inputs.split(700), labels.split(700), strict=True))


@pytest.fixture(scope="module")
def network(digits: list[tuple[Tensor, Tensor]]) -> nn.Sequential:
    """A small network that reads digits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(25):
        for x, y in digits:
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.eval().requires_grad_(False)


def test_001_c27_a_rotation_has_cka_one_and_breaks_the_network(
    network: nn.Sequential, digits: list[tuple[Tensor, Tensor]]
) -> None:
    """CKA cannot tell features from rotated ones; the rest of the network can."""
    rotation = LinearMap(torch.from_numpy(ortho_group.rvs(32, random_state=0)).float())
    scorer = Scorer(copies=2)
    for x, y in digits:
        hidden = network[:4](x)
        scorer.add(network[4:](torch.cat([hidden, rotation(hidden)])), network(x), y)
    whole, turned = scorer.scores()
    hidden = network[:4](torch.cat([x for x, _ in digits]))
    found = feature_similarities(hidden, rotation(hidden))
    assert found["linear_cka"] == pytest.approx(1.0, abs=1e-5)
    assert found["linear_cka_biased"] == pytest.approx(1.0, abs=1e-5)
    assert found["cca"] == pytest.approx(1.0, abs=1e-5)
    assert found["r2"] < 0  # the map as it is shows it
    assert whole.accuracy is not None
    assert turned.accuracy is not None
    assert whole.accuracy > 0.97
    assert turned.accuracy < 0.4


# -- between two stitches ----------------------------------------------------------------------------------------------


def stitched(
    network: nn.Sequential, fitted: LinearMap, family: str, at: str = "3", front: nn.Sequential | None = None
) -> Stitch:
    """A stitch of a network with itself or another front, by hand."""
    split = SplitPair(front or network, network, at, ((torch.zeros(2, 64),), {}))
    scores = StitchScores(10, 0.5, 1.0, 1.0, rr=5, rw=3, wr=0, ww=2)
    return Stitch(StitchedNetwork(split, 0, fitted), split.points[0], family, "task", fitted, scores, 0.8, 0.8)


def test_001_c30_maps_on_the_line_have_their_biases_too() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (LinearMap(torch.randn(3, 5, generator=generator), torch.randn(3, generator=generator)) for _ in range(2))
    x = torch.randn(20, 5, generator=generator)
    for share in (1.0, 0.3, 0.0):
        assert torch.allclose(interpolate(a, b, share)(x), share * a(x) + (1 - share) * b(x), atol=1e-6)
    plain = LinearMap(b.matrix)
    assert torch.allclose(interpolate(a, plain, 0.3)(x), 0.3 * a(x) + 0.7 * plain(x), atol=1e-6)
    assert interpolate(plain, plain, 0.5).bias is None
    with pytest.raises(
        MismatchError, match=r"LinearMap\(5 → 3, with bias\) and LinearMap\(2 → 2\) cannot be interpolated"
    ):
        interpolate(a, LinearMap(torch.eye(2)), 0.5)


@pytest.mark.parametrize("together", [1, 4])
def test_001_c30_relative_accuracy_along_the_line(
    network: nn.Sequential, digits: list[tuple[Tensor, Tensor]], together: int
) -> None:
    """From the identity to a reordering of all channels: the ends work, the middle need not."""
    identity = LinearMap(torch.eye(32), torch.zeros(32))
    other = LinearMap(torch.eye(32).roll(7, 0), torch.full((32,), 0.2))
    first, second = stitched(network, identity, "identity"), stitched(network, other, "permutation")
    found = along(first, second, digits, points=5, together=together)
    assert found.shares == (1.0, 0.75, 0.5, 0.25, 0.0)
    x, y = (torch.cat(side) for side in zip(*digits, strict=True))
    whole = (network(x).argmax(1) == y).double().mean()
    for share, relative, scores in zip(found.shares, found.relative_accuracy, found.scores, strict=True):
        mixed = share * torch.eye(32) + (1 - share) * other.matrix
        hidden = network[:4](x) @ mixed.T + (1 - share) * 0.2
        right = (network[4:](hidden).argmax(1) == y).double().mean()
        assert relative == pytest.approx(float(right / whole), abs=2e-3)
        assert scores.samples == len(y)
    assert found.relative_accuracy[0] == 1.0
    assert found.lowest == min(value for value in found.relative_accuracy if value is not None)
    assert found.lowest is not None
    assert found.lowest < 0.8
    assert (
        repr(found) == f"StitchPath(identity and permutation: 5 points, relative accuracy at least {found.lowest:.4f})"
    )
    (axes,) = found.plot().axes
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == list(found.relative_accuracy)
    rows = found.to_rows()
    assert (rows[0]["share"], rows[0]["relative_accuracy"], rows[0]["rr"]) == (1.0, 1.0, round(float(whole) * len(y)))


def test_lines_that_are_refused(network: nn.Sequential, digits: list[tuple[Tensor, Tensor]]) -> None:
    identity = LinearMap(torch.eye(32))
    first = stitched(network, identity, "identity")
    with pytest.raises(MismatchError, match=r"A stitch at 3 and one at 1 cannot be interpolated"):
        along(first, stitched(network, identity, "identity", at="1"), digits)
    other = nn.Sequential(*[nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)])
    with pytest.raises(MismatchError, match="the same two networks at the same point"):
        along(first, stitched(network, identity, "identity", front=other), digits)
    with pytest.raises(it.InputError, match="points must be at least 2 and together at least 1, but they are 1 and 4"):
        along(first, first, digits, points=1)
    with pytest.raises(it.InputError, match="found StitchedNetwork and Identity"):
        along(first, replace(first, model=nn.Identity()), digits)
    assert isinstance(first.model, StitchedNetwork)
    own = PairBatchNormStatistics(BatchNormStatistics(network), BatchNormStatistics(network))
    adapted = replace(first, model=StitchedNetwork(first.model.split, 0, identity, own))
    with pytest.raises(it.InputError, match=r"statistics of their own \(norm='adapt'\)"):
        along(first, adapted, digits)
