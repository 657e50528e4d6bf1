"""The barrier between a network and itself with features swapped: none for equal features, high for random ones."""

import json
from typing import Any

import pytest
import torch
from digit_networks import IMAGE, accuracy, digits, normed_convolutions, perceptrons
from networks import gap
from torch import nn

import intertwine as it
from intertwine.errors import InputError
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.swaps import KINDS, swap_barrier, swap_element

pytestmark = pytest.mark.usefixtures("one_thread")


def twins() -> Any:
    """A trained perceptron with every unit of its first layer there twice, the two read with different weights."""
    model: Any = perceptrons(64, 64, 64, 10, count=1)[0]
    twin = it.zoo.build("mlp", widths=(64, 128, 64, 10)).eval()
    both = torch.arange(128) // 2
    share = torch.tensor([0.2, 0.8]).repeat(64)
    state = model.state_dict()
    state["3.weight"] = state["3.weight"][:, both] * share
    state |= {name: state[name][both] for name in ("1.weight", "1.bias")}
    twin.load_state_dict(state)
    return twin


def test_equal_features_are_flat_and_random_ones_are_not_003_F18() -> None:
    twin = twins()
    folded = fold(twin, IMAGE, beta={"1": 1e-6})
    found = swap_barrier(folded, digits()[1], points=5)
    assert found.pairs == {"1": 64}
    for line in found.equivalent:
        assert max(line.loss) - min(line.loss) < 1e-5
    assert found.loss_barriers["random"] > 0.1
    for kind in KINDS:
        for line in getattr(found, kind):  # both ends are one function, and swapping turns the line around
            assert line.loss == pytest.approx(line.loss[::-1], rel=1e-4)


def test_near_features_are_nearly_flat_003_F18_F28() -> None:
    """A trained perceptron; beta such that folding merges a part of its features."""
    model = perceptrons(64, 64, 64, 10, count=1)[0]
    folded = fold(model, IMAGE, beta=0.1)
    assert 0 < folded.removed < 100
    found = swap_barrier(folded, digits()[1], points=3)
    assert found.error_barriers is not None
    assert found.error_barriers["equivalent"] < 0.02
    assert found.loss_barriers["equivalent"] < found.loss_barriers["random"] / 3
    more = swap_barrier(fold(model, IMAGE, beta=0.4), digits()[1], points=3)
    assert more.loss_barriers["equivalent"] > 3 * found.loss_barriers["equivalent"]  # far features are not equivalent


def test_lines_are_those_of_barrier_with_the_swapped_network_003_F18() -> None:
    model: Any = perceptrons(64, 64, 64, 10, count=1)[0]
    found = swap_barrier(fold_groups(model, IMAGE, groups={"1": [(3, 9)]}), digits()[1], points=3, seeds=(5,))
    other: Any = it.zoo.build("mlp", widths=(64, 64, 64, 10)).eval()
    other.load_state_dict(model.state_dict())
    order = torch.arange(64)
    order[3], order[9] = 9, 3
    with torch.no_grad():
        other[1].weight.copy_(model[1].weight[order])
        other[1].bias.copy_(model[1].bias[order])
        other[3].weight.copy_(model[3].weight[:, order])
    expected = it.barrier(model, other, digits()[1], points=3)
    assert found.equivalent[0].loss == pytest.approx(expected.loss, rel=1e-6)
    assert gap(model, other, digits()[1][0][0]) < 1e-5


def test_pairs_are_drawn_by_seed_as_many_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    from intertwine.fold import swaps

    seen: list[Any] = []

    def counted(symmetry: Any, pairs: Any) -> Any:
        seen.append({k: list(v) for k, v in pairs.items()})
        return swap_element(symmetry, pairs)

    monkeypatch.setattr(swaps, "swap_element", counted)
    model = perceptrons(64, 64, 64, 10, count=1)[0]
    groups = {"1": [(1, 2, 3, 4, 5), (10, 11)], "3": [(0, 63)]}
    found = swap_barrier(fold_groups(model, IMAGE, groups=groups), digits()[1], points=3, seeds=(0, 1))
    assert found.pairs == {"1": 3, "3": 1}
    within, anywhere = seen[:2], seen[2:]
    for pairs in seen:
        assert [len(pairs[s]) for s in sorted(pairs)] == [3, 1]
        flat = [i for pair in pairs[min(pairs)] for i in pair]
        assert len(set(flat)) == 6
    for pairs in within:
        first = pairs[min(pairs)]
        assert all({a, b} <= {1, 2, 3, 4, 5} or {a, b} == {10, 11} for a, b in first)
    assert within[0] != within[1]
    assert anywhere[0] != anywhere[1]
    again = swap_barrier(fold_groups(model, IMAGE, groups=groups), digits()[1], points=3, seeds=(0, 1))
    assert again.loss_barriers == found.loss_barriers


def test_dead_features_are_left_alone_003_F17() -> None:
    model = twins()
    with torch.no_grad():
        model[1].weight[:10], model[1].bias[:10] = 0.0, 0.0
    folded = fold(model, IMAGE, beta={"1": 1e-6})
    found = swap_barrier(folded, digits()[1], points=3, seeds=(0,))
    assert found.pairs == {"1": 59}
    assert found.dead == {"1": 10}
    taken = swap_barrier(folded, digits()[1], points=3, seeds=(0,), dead=None)
    assert taken.pairs == {"1": 64}
    only = fold_groups(model, IMAGE, groups={"1": [range(10)]})
    with pytest.raises(InputError, match=r"has two live features, .* larger beta, or pass dead=None"):
        swap_barrier(only, digits()[1])


def test_batch_norm_and_statistics_reset_003_F18() -> None:
    model = normed_convolutions(1)[0]
    folded = fold_groups(model, IMAGE, groups={"4": [(0, 1), (5, 9)]})
    train, test = digits()
    found = swap_barrier(folded, test, points=3, reset_statistics=train, seeds=(0,))
    line = found.equivalent[0]
    assert line.without_reset is not None
    assert line.without_reset.error is not None
    assert 1 - line.without_reset.error[0] == pytest.approx(accuracy(model))


def test_the_result_reads_and_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    model = perceptrons(64, 64, 64, 10, count=1)[0]
    folded = fold_groups(model, IMAGE, groups={"1": [(1, 2)], "3": [(3, 4)]})
    found = swap_barrier(folded, digits()[1], points=3)
    assert repr(found).startswith("SwapBarrier(2 pairs in 2 wires, 3 seeds; error barrier ")
    data = json.loads(json.dumps(found.to_dict()))
    assert data["pairs"] == {"1": 1, "3": 1}
    assert len(data["random"]) == 3
    (axes,) = found.plot().axes
    lines = [line for line in axes.get_lines() if str(line.get_label()).endswith("swapped")]
    assert [line.get_linestyle() for line in lines] == ["-", "--"]
    mean = [1 - sum(x.error[k] for x in found.random if x.error) / 3 for k in range(3)]
    assert list(map(float, lines[1].get_ydata())) == pytest.approx(mean)  # type: ignore[arg-type]
    assert axes.get_ylabel() == "accuracy"


def test_targets_that_are_no_classes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(20, 3)
    found = swap_barrier(
        fold_groups(model, x, groups={"0": [(0, 1)]}),
        [(x, x[:, :1])],
        points=3,
        loss=lambda y, z: (y - z).square().mean(),
    )
    assert found.error_barriers is None
    assert "loss barrier" in repr(found)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"seeds": ()}, "seeds is empty. Give one or more to draw pairs of features with"),
        ({"dead": 1.0}, "dead must be a share of the longest row, from 0 to below 1, but is 1.0"),
        ({"points": 2}, "points must be at least 3"),
    ],
)
def test_bad_input(options: dict[str, Any], why: str) -> None:
    folded = fold_groups(perceptrons(64, 64, 64, 10, count=1)[0], IMAGE, groups={"1": [(1, 2)]})
    with pytest.raises(InputError, match=why):
        swap_barrier(folded, digits()[1], **options)


def test_a_generator_and_nothing_to_swap_are_refused() -> None:
    model = perceptrons(64, 64, 64, 10, count=1)[0]
    with pytest.raises(InputError, match=r"a generator can be read once. Pass a list"):
        swap_barrier(fold_groups(model, IMAGE, groups={"1": [(1, 2)]}), iter(digits()[1]))
    with pytest.raises(InputError, match="No group of the 2 folded wires has two live features"):
        swap_barrier(fold_groups(model, IMAGE, groups={}), digits()[1])
