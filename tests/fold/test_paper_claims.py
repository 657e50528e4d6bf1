"""Claims of the paper on folding, as far as small trained networks can show them."""

from functools import cache
from typing import Any

import pytest
import torch
from digit_networks import IMAGE, Batches, digits, perceptrons
from torch import nn

from intertwine.fold.budget import fold_to
from intertwine.fold.fold import fold
from intertwine.fold.prune import prune
from intertwine.fold.result import Fold

pytestmark = pytest.mark.usefixtures("one_thread")

#: The grid as printed.
BETAS = (0.01, 0.03, 0.05, 0.07, 0.1, 0.12, 0.14, 0.15, 0.18, 0.2)
#: The accuracy that a network must keep, relative to the whole one.
ENOUGH = 0.95
NARROW, WIDE = (64, 32, 32, 32, 10), (64, 128, 128, 128, 10)


def halves() -> tuple[Batches, Batches]:
    """The test digits as a validation and a test part."""
    ((images, labels),) = digits()[1]
    return [(images[::2], labels[::2])], [(images[1::2], labels[1::2])]


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    ((images, labels),) = batches
    return float((model(images).argmax(1) == labels).double().mean())


@cache
def along_the_grid(widths: tuple[int, ...], number: int) -> tuple[Fold, ...]:
    model = perceptrons(*widths, count=2)[number]
    return tuple(fold(model, IMAGE, beta=beta, rows="ward", maximum="fixed") for beta in BETAS)


@pytest.mark.parametrize("rows", ["ward", "mean", "sum"])
def test_parameters_fall_along_the_printed_grid_003_F16(rows: str) -> None:
    model = perceptrons(*NARROW, count=2)[0]
    sizes = [fold(model, IMAGE, beta=beta, rows=rows, maximum="fixed").parameters.after for beta in BETAS]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 5
    assert sizes[0] > 2 * sizes[-1]


def test_the_largest_beta_that_keeps_the_accuracy_is_chosen_on_held_out_data_003_F20() -> None:
    """By hand over the grid on one half of the test digits; the other half says what it is worth."""
    held_out, test = halves()
    model = perceptrons(*NARROW, count=2)[0]
    kept = [accuracy(one.model, held_out) >= ENOUGH * accuracy(model, held_out) for one in along_the_grid(NARROW, 0)]
    last = max(i for i, good in enumerate(kept) if good)
    assert 0 < last < len(BETAS) - 1  # the rule decides something
    chosen = along_the_grid(NARROW, 0)[last]
    assert chosen.parameters.share < 0.5
    assert accuracy(chosen.model, test) > 0.9 * accuracy(model, test)


@pytest.mark.parametrize("how", ["merge", "absorb"])
def test_the_smallest_network_above_a_floor_is_that_of_halving_by_hand_003_F20(how: str) -> None:
    """fold_to(floor=…) against a search written out here, which asks for sizes one by one."""
    held_out, test = halves()
    model = perceptrons(*NARROW, count=2)[0]
    floor = ENOUGH * accuracy(model, held_out)
    options: dict[str, Any] = {"how": how, "data": digits()[0] if how == "absorb" else None}
    found = fold_to(model, IMAGE, floor=floor, held_out=held_out, **options)
    assert accuracy(found.model, held_out) >= floor
    assert found.parameters.after < 0.5 * found.parameters.before
    assert accuracy(found.model, test) > 0.9 * accuracy(model, test)
    whole = sum(p.numel() for p in model.parameters())
    least = 65 + 2 + 2 + 20  # one feature in each of the three wires
    low, high, best = float(least), float(whole), float(whole)
    for _ in range(8):
        middle = (low + high) / 2
        trial = fold_to(model, IMAGE, parameters=int(middle), **options)
        good = accuracy(trial.model, held_out) >= floor
        best = trial.parameters.after if good else best
        low, high = (low, middle) if good else (middle, high)
    assert found.parameters.after == best


def smallest_share(widths: tuple[int, ...], number: int) -> float:
    """The share of the parameters that the rule of row 003-F20 leaves."""
    held_out, _ = halves()
    model = perceptrons(*widths, count=2)[number]
    return fold_to(
        model, IMAGE, floor=ENOUGH * accuracy(model, held_out), held_out=held_out, how="merge"
    ).parameters.share


@pytest.mark.slow
def test_wider_networks_can_lose_more_003_F28() -> None:
    """Claim 1, on perceptrons of 32 and 128 features in three layers: the wider keep a smaller share of themselves."""
    narrow, wide = ([smallest_share(widths, i) for i in range(2)] for widths in (NARROW, WIDE))
    assert sum(wide) < 0.8 * sum(narrow)


def test_folded_networks_need_no_training_003_F28() -> None:
    """Claim 2: more than a third of the parameters goes before a hundredth of the accuracy does, nothing is trained."""
    for number in range(2):
        model = perceptrons(*WIDE, count=2)[number]
        whole = accuracy(model, digits()[1])
        good = [one for one in along_the_grid(WIDE, number) if accuracy(one.model, digits()[1]) > whole - 0.01]
        assert min(one.parameters.share for one in good) < 0.7


def test_folding_keeps_more_than_pruning_at_the_same_widths_003_F22() -> None:
    """Against features of small rows, and features at random, taken out of the same layers."""
    folded = along_the_grid(WIDE, 0)[BETAS.index(0.12)]
    model = perceptrons(*WIDE, count=2)[0]
    widths = {name: int(width.after) for name, width in folded.widths.items()}
    assert folded.parameters.share < 0.5
    own = accuracy(folded.model, digits()[1])
    assert own > accuracy(model, digits()[1]) - 0.02
    pruned = {"l1": prune(model, IMAGE, widths=widths), "random": prune(model, IMAGE, widths=widths, score="random")}
    for one in pruned.values():
        assert one.parameters.after == folded.parameters.after
        assert own > accuracy(one.model, digits()[1]) + 0.02
