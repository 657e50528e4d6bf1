"""Results of stitching: scores, the agreement table, penalties, the kind of matrix, tables and plots."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from scipy.stats import ortho_group
from torch import Tensor, nn
from torch.nn import functional

import intertwine as it
from intertwine.stitch.collection import Stitches
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.result import Stitch, closeness, curves, display_order, rank, sparsity
from intertwine.stitch.scores import Scorer, StitchScores
from intertwine.stitch.split import StitchPoint

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = StitchScores(100, 0.6, 1.25, 2.5, rr=50, rw=30, wr=10, ww=10)


def made(**changes: Any) -> Stitch:
    """A stitch with everything filled in."""
    n = changes.get("size", 3)
    what: dict[str, Any] = {
        "model": nn.Identity(),
        "point": StitchPoint(changes.pop("front", "layer2"), changes.pop("back", "layer2"), changes.pop("skip", "none"),
                   changes.pop("crossing", ()), n, n),
        "family": "relu", "fit": "task", "map": LinearMap(torch.eye(n)), "scores": SOME,
        "front_accuracy": 0.9, "back_accuracy": 0.8,
    }  # fmt: skip
    changes.pop("size", None)
    return Stitch(**(what | changes))


def scored(accuracy: float) -> StitchScores:
    """Scores of a thousand samples with this accuracy, the back network always right."""
    right = round(1000 * accuracy)
    return StitchScores(1000, accuracy, 1 - accuracy, 0.0, rr=right, rw=1000 - right, wr=0, ww=0)


def batches(copies: int, classes: int = 10) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Outputs of stitched networks, of the back network, and targets, in batches of different sizes."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for n in (7, 5, 20):
        back = 3 * torch.randn(n, classes, generator=generator)
        stitched = back.repeat(copies, 1) + 2 * torch.randn(copies * n, classes, generator=generator)
        found.append((stitched, back, torch.randint(classes, (n,), generator=generator)))
    return found


def together(copies: int, data: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same without batches: stitched (copies, samples, classes), back, targets; in float64."""
    stitched = torch.cat([one[0].view(copies, len(one[2]), -1) for one in data], 1)
    return (
        stitched.double().numpy(),
        torch.cat([d[1] for d in data]).double().numpy(),
        torch.cat([d[2] for d in data]).numpy(),
    )


# -- scores ------------------------------------------------------------------------------------------------------------


def test_001_c03_accuracy_and_mean_loss() -> None:
    data = batches(copies=3)
    scorer = Scorer(copies=3)
    for stitched, back, targets in data:
        scorer.add(stitched, back, targets)
    stitched, back, targets = together(3, data)
    for found, outputs in zip(scorer.scores(), stitched, strict=True):
        assert found.samples == 32
        assert found.accuracy == pytest.approx(np.mean(outputs.argmax(1) == targets), abs=1e-12)
        right = log_softmax(outputs, 1)[np.arange(32), targets]
        assert found.loss == pytest.approx(-right.mean(), rel=1e-6)
        assert found.back_accuracy == pytest.approx(np.mean(back.argmax(1) == targets), abs=1e-12)


def test_001_c11_cross_entropy_is_summed_over_classes() -> None:
    """Averaged over classes too, as one path of the published code has it, it would be ten times smaller."""
    data = batches(copies=2)
    scorer = Scorer(copies=2)
    for batch in data:
        scorer.add(*batch)
    stitched, back, _ = together(2, data)
    for found, outputs in zip(scorer.scores(), stitched, strict=True):
        terms = softmax(back, 1) * log_softmax(outputs, 1)
        assert found.cross_entropy == pytest.approx(-terms.sum(1).mean(), rel=1e-6)
        assert found.cross_entropy == pytest.approx(10 * -terms.mean(), rel=1e-6)
    # the back network itself: the entropy of its own answers, and no less is possible
    own = Scorer()
    own.add(data[0][1], data[0][1], data[0][2])
    p = softmax(data[0][1].double().numpy(), 1)
    assert own.scores()[0].cross_entropy == pytest.approx(-(p * np.log(p)).sum(1).mean(), rel=1e-6)


def test_001_c36_agreement_table() -> None:
    """First letter the back network, second the stitched one."""
    answers = torch.eye(2) * 9
    right, wrong = answers[0], answers[1]
    targets = torch.zeros(10).long()
    back = torch.stack([right] * 7 + [wrong] * 3)
    stitched = torch.stack([right] * 5 + [wrong] * 2 + [right] + [wrong] * 2)
    scorer = Scorer(copies=2)
    scorer.add(torch.cat([stitched, back]), back, targets)
    first, second = scorer.scores()
    assert (first.rr, first.rw, first.wr, first.ww) == (5, 2, 1, 2)
    assert (second.rr, second.rw, second.wr, second.ww) == (7, 0, 0, 3)
    assert first.agreement == {"rr": 0.5, "rw": 0.2, "wr": 0.1, "ww": 0.2}
    assert (first.accuracy, first.back_accuracy) == (0.6, 0.7)


def test_001_c36_one_table_of_all_batches() -> None:
    data = batches(copies=2)
    scorer = Scorer(copies=2)
    for batch in data:
        scorer.add(*batch)
    stitched, back, targets = together(2, data)
    for found, outputs in zip(scorer.scores(), stitched, strict=True):
        pairs = list(zip(back.argmax(1) == targets, outputs.argmax(1) == targets, strict=True))
        names = {"rr": (True, True), "rw": (True, False), "wr": (False, True), "ww": (False, False)}
        assert {name: getattr(found, name) for name in names} == {n: pairs.count(pair) for n, pair in names.items()}


def test_outputs_with_logits_and_half_precision() -> None:
    stitched, back, targets = batches(copies=1)[2]
    plain, held = Scorer(), Scorer()
    plain.add(stitched.bfloat16().float(), back.bfloat16().float(), targets)
    held.add(SimpleNamespace(logits=stitched.bfloat16()), SimpleNamespace(logits=back.bfloat16()), targets)
    assert plain.scores() == held.scores()


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.bool])
def test_targets_of_any_whole_type(kind: torch.dtype) -> None:
    stitched, back, targets = batches(copies=1, classes=2)[2]
    plain, other = Scorer(), Scorer()
    plain.add(stitched, back, targets)
    other.add(stitched, back, targets.to(kind))
    assert plain.scores() == other.scores()


@pytest.mark.parametrize("last", [False, True])
def test_targets_per_token_with_some_ignored(last: bool) -> None:
    """Classes on the second axis as torch has them, or on the last as language models do."""
    generator = torch.Generator().manual_seed(0)
    back, stitched = torch.randn(4, 6, 5, generator=generator), torch.randn(8, 6, 5, generator=generator)
    targets = torch.randint(6, (4, 5), generator=generator)
    targets[0, 2:] = targets[3] = -100
    scorer = Scorer(copies=2)
    given, own = (x.movedim(1, -1) if last else x for x in (stitched, back))
    scorer.add(given, own, targets)
    for found, outputs in zip(scorer.scores(), stitched.double().view(2, 4, 6, 5), strict=True):
        kept = targets != -100
        assert found.samples == 4
        assert found.loss == pytest.approx(functional.cross_entropy(outputs, targets).item(), rel=1e-6)
        assert found.accuracy == pytest.approx((outputs.argmax(1) == targets)[kept].double().mean().item())
        terms = (back.double().softmax(1) * outputs.log_softmax(1)).sum(1)[kept]
        assert found.cross_entropy == pytest.approx(-terms.mean().item(), rel=1e-6)


def test_another_loss_and_targets_that_are_no_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    scorer = Scorer(copies=2, loss=functional.mse_loss)
    every = []
    for n in (3, 9):
        stitched, targets = torch.randn(2 * n, 4, generator=generator), torch.randn(n, 4, generator=generator)
        scorer.add(stitched, targets + 1, targets)
        every.append((stitched.view(2, n, 4) - targets).square())
    expected = torch.cat(every, 1).mean((1, 2)).tolist()
    found = scorer.scores()
    assert [one.loss for one in found] == pytest.approx(expected, rel=1e-6)
    assert [(one.accuracy, one.cross_entropy, one.rr, one.agreement, one.samples) for one in found] == [
        (None, None, None, None, 12)
    ] * 2


def test_another_loss_of_classes_keeps_the_accuracy() -> None:
    stitched, back, targets = batches(copies=1)[0]
    scorer = Scorer(loss=lambda outputs, targets: functional.multi_margin_loss(outputs, targets, reduction="none"))
    scorer.add(stitched, back, targets)
    (found,) = scorer.scores()
    assert found.loss == pytest.approx(functional.multi_margin_loss(stitched, targets).item(), rel=1e-6)
    assert found.accuracy == pytest.approx((stitched.argmax(1) == targets).double().mean().item())


def test_another_loss_is_a_mean_over_samples_also_where_targets_are_ignored() -> None:
    scorer, targets = Scorer(loss=lambda outputs, targets: outputs.square().mean()), torch.tensor([[0, 1], [0, -100]])
    for size in (1.0, 3.0):
        scorer.add(torch.full((2, 3, 2), size), torch.zeros(2, 3, 2), targets)
    assert scorer.scores()[0].loss == pytest.approx((1.0 + 9.0) / 2)


def test_an_answer_that_is_not_a_number_is_wrong() -> None:
    """argmax would call it class 0, and a network that gives nothing else would be right one time in ten."""
    back = torch.eye(3)
    scorer = Scorer()
    scorer.add(torch.full((3, 3), torch.nan), back, torch.tensor([0, 0, 2]))
    (found,) = scorer.scores()
    assert (found.accuracy, found.rr, found.rw, found.wr, found.ww) == (0.0, 0, 2, 0, 1)
    assert math.isnan(found.loss)
    assert found.to_dict()["loss"] is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_class_the_back_network_rules_out_adds_nothing() -> None:
    back = torch.tensor([[0.0, 1.0, -torch.inf]])
    scorer = Scorer()
    scorer.add(back, back, torch.tensor([0]))
    p = softmax([0.0, 1.0])
    assert scorer.scores()[0].cross_entropy == pytest.approx(-(p * np.log(p)).sum())


@pytest.mark.parametrize(("wrong", "word"), [(12, "12"), (-3, "-3")])
def test_targets_that_the_back_network_does_not_know(wrong: int, word: str) -> None:
    targets, outputs = torch.tensor([1, wrong, 3]), torch.zeros(3, 10)
    text = f"The data has the class {word}, but the back network has 10 classes, 0 to 9. Give data with its"
    with pytest.raises(it.InputError, match=text):
        Scorer().add(outputs, outputs, targets)
    Scorer().add(outputs, outputs, torch.tensor([0, 9, -100]))


def test_refused_outputs_and_targets() -> None:
    with pytest.raises(it.InputError, match=r"outputs with one axis more.*found outputs float32 \(3, 2\).*Pass loss="):
        Scorer().add(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(it.InputError, match=r"outputs of 2 stitched networks.*\(3, 2\).*but are \(3, 2\)"):
        Scorer(copies=2).add(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3).long())
    with pytest.raises(it.InputError, match="No batch has been scored"):
        Scorer().scores()
    with pytest.raises(it.InputError, match="copies must be at least 1, but is 0"):
        Scorer(copies=0)
    scorer = Scorer()
    scorer.add(torch.zeros(3, 2), torch.zeros(3, 2), torch.full((3,), -100))
    with pytest.raises(it.InputError, match="Every target of the data is ignored"):
        scorer.scores()
    mixed = Scorer(loss=functional.mse_loss)
    mixed.add(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2))
    with pytest.raises(it.InputError, match="Some batches have classes as targets, others do not"):
        mixed.add(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3).long())
    with pytest.raises(it.InputError, match=r"The loss must give a tensor.*found float"):
        Scorer(loss=lambda outputs, targets: 0.5).add(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2))  # pyrefly: ignore


# -- one stitch --------------------------------------------------------------------------------------------------------


def test_000_g27_penalty_is_the_mean_of_both_networks_minus_the_stitched_one() -> None:
    """(Acc f + Acc f̃)/2 − Acc S, equation 4.3."""
    found = made(front_accuracy=0.913, back_accuracy=0.911, scores=scored(0.882))
    assert found.penalty == pytest.approx(0.912 - 0.882, abs=1e-12)
    better = made(front_accuracy=0.5, back_accuracy=0.7, scores=scored(0.9))
    assert better.penalty == pytest.approx(-0.3)
    for lacking in ({"front_accuracy": None}, {"back_accuracy": None}):
        assert made(**lacking).penalty is None


def test_001_c11_relative_accuracy_is_to_the_back_network() -> None:
    found = made(front_accuracy=0.9, back_accuracy=0.8, scores=scored(0.6))
    assert found.relative_accuracy == pytest.approx(0.75)
    assert made(back_accuracy=0.0).relative_accuracy is None
    assert made(back_accuracy=None).relative_accuracy is None


def test_d21_the_last_and_the_best_epoch_are_both_reported() -> None:
    found = made(scores=scored(0.7), best=scored(0.75))
    assert (found.accuracy, found.best_accuracy) == (0.7, 0.75)
    assert found.penalty == pytest.approx(0.15)
    assert found.best_penalty == pytest.approx(0.10)
    assert "accuracy 0.7000 (87.5% of the back network's), penalty 0.1500; best epoch 0.7500, penalty 0.1000" in repr(
        found
    )
    plain = found.to_dict()
    assert (plain["accuracy"], plain["best_accuracy"]) == (0.7, 0.75)
    assert made().best_penalty is None
    assert "best" not in repr(made())


def test_repr_and_plain_data() -> None:
    found = made(
        front="a", back="b", crossing=("add",), skip="back", settings={"seed": 3, "rate": 1e-3, "at": ("a", "b")},
        history=({"epoch": 1, "loss": float("nan")},), diverged="in epoch 2",
    )  # fmt: skip
    assert repr(found) == (
        "Stitch(a into b by relu, task; accuracy 0.6000 (75.0% of the back network's), penalty 0.2500; 3 → 3 channels; "
        "diverged: in epoch 2)"
    )
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["agreement"] == {"rr": 0.5, "rw": 0.3, "wr": 0.1, "ww": 0.1}
    assert plain["settings"] == {"seed": 3, "rate": 1e-3, "at": ["a", "b"]}
    assert plain["history"] == [{"epoch": 1, "loss": None}]
    assert (plain["front"], plain["back"], plain["skip"], plain["rank"], plain["cross_entropy"]) == (
        "a",
        "b",
        "back",
        3,
        2.5,
    )
    no_classes = made(scores=StitchScores(5, None, 0.25, None, None, None, None, None))
    assert "loss 0.25;" in repr(no_classes)
    assert no_classes.penalty is no_classes.agreement is None


def test_a_matrix_that_is_not_finite_still_has_a_record() -> None:
    found = made(map=LinearMap(torch.full((3, 3), torch.nan)))
    plain = found.to_dict()
    assert plain["rank"] is plain["closeness"] is None
    with pytest.raises(it.InputError, match="NaN or infinite entries, so it has no rank"):
        _ = found.rank
    found.plot()


def test_sparsity_counts_at_the_threshold_of_the_fit() -> None:
    matrix = torch.tensor([[1.0, 5e-4], [1e-5, 2e-3]])
    assert made(map=LinearMap(matrix)).sparsity == 0.5
    assert made(map=LinearMap(matrix), settings={"threshold": 1e-4}).sparsity == 0.25
    assert made(map=LinearMap(matrix), settings={"threshold": 5e-4}).sparsity == 0.5  # at the threshold is zero too


# -- what kind of matrix -----------------------------------------------------------------------------------------------


def test_members_of_the_group_are_at_distance_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(40, generator=generator)
    scales = torch.rand(40, generator=generator) + 0.1
    permutation = torch.eye(40)[order]
    member = closeness(permutation * scales)
    assert (member.relu, member.largest) == (0.0, 1.0)
    assert member.permutation is not None
    assert member.permutation > 0.1
    assert closeness(permutation).permutation == 0.0
    assert closeness(permutation[:25]).relu == closeness(permutation[:, :25]).permutation == 0.0
    rotation = torch.from_numpy(ortho_group.rvs(12, random_state=0))
    turned = closeness(rotation)
    assert turned.orthogonal == pytest.approx(0.0, abs=1e-14)
    assert turned.relu is not None
    assert turned.relu > 0.3
    assert closeness(-permutation).relu == 1.0  # a negative scale is not in the group: nothing is nearer than zero
    assert sparsity(permutation) == 1 - 1 / 40
    nothing = closeness(torch.zeros(3, 3))
    assert (nothing.relu, nothing.permutation, nothing.orthogonal, nothing.largest) == (None,) * 4


def test_nearest_members_by_trying_all() -> None:
    from itertools import permutations

    m = torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    norm = m.norm()
    plain, scaled = [], []
    for order in permutations(range(5)):
        p = torch.eye(5, dtype=torch.float64)[list(order)]
        plain.append(float((m - p).norm() / norm))
        scaled.append(float((m - p * (m * p).sum(0).clamp(min=0)).norm() / norm))
    found = closeness(m)
    assert found.permutation == pytest.approx(min(plain), abs=1e-12)
    assert found.relu == pytest.approx(min(scaled), abs=1e-12)
    u, _, vt = np.linalg.svd(m.numpy())
    assert found.orthogonal == pytest.approx(np.linalg.norm(m.numpy() - u @ vt) / np.linalg.norm(m.numpy()), abs=1e-12)


def test_the_largest_entry_does_not_see_scales() -> None:
    """Of P·D with P doubly stochastic it is that of P."""
    n = 6
    soft = 0.7 * torch.eye(n, dtype=torch.float64) + 0.3 / n
    found = closeness(soft * torch.linspace(0.1, 9.0, n, dtype=torch.float64)).largest
    assert found == pytest.approx(0.7 + 0.3 / n, abs=1e-12)
    assert closeness(torch.ones(8, 8)).largest == pytest.approx(1 / 8)
    for shape in ((4, 7), (7, 4)):
        m = np.random.default_rng(0).normal(size=shape)
        size = np.abs(m) / np.abs(m).sum(0)
        size = size / size.sum(1, keepdims=True)
        assert closeness(torch.from_numpy(m)).largest == pytest.approx(size.max(1).mean(), rel=1e-12)


def test_rank_and_its_tolerance() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(60, 4, generator=generator) @ torch.randn(4, 50, generator=generator)
    assert rank(low) == rank(1e-9 * low) == 4  # in single precision: what rounding leaves does not count
    values = torch.diag(torch.tensor([1.0, 1e-2, 1e-4, 1e-6]))
    assert [rank(values), rank(values, tolerance=1e-3), rank(values, tolerance=1e-8)] == [3, 2, 4]


def test_the_display_order_brings_a_permutation_to_the_diagonal() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(9, generator=generator) + 0.5
    m = torch.diag(scales)[torch.randperm(9, generator=generator)]
    rows, columns = display_order(m)
    assert torch.equal(m[rows][:, columns], torch.diag(scales.sort(descending=True).values))
    rows, columns = display_order(torch.randn(3, 7, generator=generator))
    assert (sorted(rows.tolist()), sorted(columns.tolist())) == (list(range(3)), list(range(7)))


# -- many stitches -----------------------------------------------------------------------------------------------------


@pytest.fixture
def several() -> Stitches:
    penalties = {
        ("c1", "relu"): (0.1, 0.2),
        ("c1", "linear"): (0.01, 0.02),
        ("c2", "relu"): (0.3, 0.4),
        ("c2", "linear"): (0.04, 0.02),
    }
    return Stitches(
        made(front=place, back=place, family=family, scores=scored(0.85 - penalty), settings={"seed": seed},
             skip="back" if place == "c2" else "none")
        for (place, family), values in penalties.items() for seed, penalty in enumerate(values)
    )  # fmt: skip


def test_the_table_of_places_and_families(several: Stitches) -> None:
    assert repr(several).splitlines() == [
        "Stitches(8 stitches; penalty, mean ± deviation)",
        "                relu           linear",
        "c1   0.1500 ± 0.0707  0.0150 ± 0.0071",
        "c2*  0.3500 ± 0.0707  0.0300 ± 0.0141",
        "* a skip connection goes around the stitch",
    ]
    single = several.select(seed=0)
    assert repr(single).splitlines()[0] == "Stitches(4 stitches; penalty)"
    assert repr(single).splitlines()[2].split() == ["c1", "0.1000", "0.0100"]
    broken = Stitches([made(diverged="in epoch 1")])
    assert repr(broken).splitlines()[2:] == ["layer2  0.2500!", "! training diverged: see .diverged"]
    assert repr(Stitches([])) == "Stitches(none)"


def test_what_differs_in_more_than_the_seed_is_not_averaged() -> None:
    settings = [{"seed": 0, "rate": 0.1}, {"seed": 1, "rate": 0.1}, {"seed": 0, "rate": 1.0}]
    trained = [made(scores=scored(x), settings=how) for x, how in zip((0.8, 0.6, 0.5), settings, strict=True)]
    found = Stitches([*trained, made(scores=scored(0.4), fit="direct")])
    assert found.kinds == ("relu task rate=0.1", "relu task rate=1.0", "relu direct")
    assert [len(values) for values in found.table().values()] == [2, 1, 1]
    assert repr(found).splitlines()[2].split() == "layer2 0.1500 ± 0.1414 0.3500 0.4500".split()
    assert found.select(fit="direct")["layer2", "relu"] is found[3]


def test_access(several: Stitches) -> None:
    assert len(several) == 8
    assert several[0].family == "relu"
    assert [s.place for s in several[4:]] == ["c2"] * 4
    assert several.select(seed=1)["c2", "linear"] is several[7]
    assert several.select(seed=1)[("c2", "c2"), "linear"] is several[7]
    assert (several.places, several.families) == (("c1", "c2"), ("relu", "linear"))
    with pytest.raises(it.InputError, match=r"2 stitches are at 'c1' by 'relu'.*with .select\(place='c1'"):
        _ = several["c1", "relu"]
    with pytest.raises(
        it.InputError, match=r"Unknown family 'rellu'. Did you mean 'relu'\? Choose one of: relu, linear"
    ):
        _ = several["c1", "rellu"]
    with pytest.raises(it.InputError, match="Unknown place 'c9'"):
        several.select(place="c9")
    with pytest.raises(it.InputError, match=r"None of the 8 stitches has {'fit': 'direct', 'seed': 1}"):
        several.select(fit="direct", seed=1)
    with pytest.raises(it.InputError, match=r"have no item 'c1'. Give a number, a slice, or \[place, family\]"):
        _ = several["c1"]  # pyrefly: ignore


def test_the_best(several: Stitches) -> None:
    assert several.best() is several[2]
    assert several.best("penalty") is several[2]
    assert several.best("loss") is several[2]
    with pytest.raises(it.InputError, match=r"Unknown number to rank by 'acuracy'\. Did you mean 'accuracy"):
        several.best("acuracy")
    with pytest.raises(it.InputError, match="None of the 8 stitches has a number for 'best_accuracy'"):
        several.best("best_accuracy")


def test_rows_and_frame(several: Stitches) -> None:
    rows = several.to_rows()
    assert rows[0] | {"front": "c1", "family": "relu", "seed": 0, "rr": 0.75, "closeness_relu": 0.0} == rows[0]
    assert "history" not in rows[0]
    frame = several.to_frame()
    assert frame.shape[0] == 8
    assert frame["penalty"].to_list() == pytest.approx([0.1, 0.2, 0.01, 0.02, 0.3, 0.4, 0.04, 0.02])
    json.dumps(several.to_dict(), allow_nan=False)


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_penalties_per_layer_with_whiskers(several: Stitches) -> None:
    (axes,) = several.plot().axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["c1", "c2*"]
    lines = {box.get_label(): box for box in axes.containers}
    assert set(lines) == {"relu", "linear"}
    points, _, (whiskers,) = lines["relu"]
    assert points.get_ydata().tolist() == pytest.approx([0.15, 0.35])
    spread = np.std([0.1, 0.2], ddof=1)
    assert whiskers.get_segments()[0][:, 1].tolist() == pytest.approx([0.15 - spread, 0.15 + spread])
    assert axes.get_ylabel() == "penalty"
    assert several.plot("relative_accuracy").axes[0].get_ylabel() == "relative accuracy"


def test_a_stitch_is_drawn_with_its_history() -> None:
    """Features are compared every few steps, losses are means of epochs."""
    history = [{"step": 10 * i, "linear_cka": 0.9 - i / 10, "note": "x"} for i in range(4)]
    history[2:2] = [{"epoch": 1, "loss": 2.0, "accuracy": 0.25}]
    history += [{"epoch": 2, "loss": 1.0, "accuracy": 0.5}]
    figure = made(map=LinearMap(torch.eye(3)[[2, 0, 1]]), history=tuple(history)).plot()
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["relu at layer2", "accuracy", "loss", "similarity"]
    drawn = torch.tensor(np.asarray(figure.axes[0].images[0].get_array()))
    assert torch.equal(drawn, torch.eye(3, dtype=torch.float64))
    lines = {axes.get_xlabel(): axes.lines[0] for axes in panels[2:]}
    assert np.asarray(lines["epoch"].get_xydata()).tolist() == [[1, 2.0], [2, 1.0]]
    assert np.asarray(lines["step"].get_xydata()) == pytest.approx(
        np.array([[0, 0.9], [10, 0.8], [20, 0.7], [30, 0.6]])
    )
    assert curves([{"epoch": 1, "loss": None}, {"epoch": 2, "loss": float("inf")}]) == {}
