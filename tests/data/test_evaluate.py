"""Scores of one batch: targets per token, losses without classes, no samples."""

import torch
from torch import nn
from torch.nn import functional

from intertwine.data.batches import on_device_of
from intertwine.data.evaluate import score
from intertwine.data.layouts import arrange


def test_arguments_are_placed_for_a_model_with_one_tensor() -> None:
    (x,), _ = on_device_of(((torch.zeros(2, 3),), {}), nn.Linear(3, 4, bias=False).double())
    assert x.dtype == torch.float64


def test_classes_on_the_last_axis_are_found_by_the_shape_of_the_targets() -> None:
    outputs, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    total, weight, wrong, answers = score(outputs, targets, 2, None).tolist()
    by_hand = functional.cross_entropy(outputs.reshape(10, 7), targets.reshape(10), reduction="sum")
    assert abs(total - by_hand.item()) < 1e-4
    assert (weight, answers) == (10, 10)
    assert wrong == (outputs.argmax(-1) != targets).sum()


def test_targets_that_are_no_classes_have_no_answers_to_be_wrong() -> None:
    outputs = torch.randn(4, 3)
    total, weight, wrong, answers = score(outputs, torch.zeros(4, 3), 4, nn.MSELoss()).tolist()
    assert abs(total - 4 * outputs.square().mean().item()) < 1e-5
    assert (weight, wrong, answers) == (4, 0, 0)


def test_classes_on_the_second_axis_stay_there() -> None:
    outputs, targets = torch.randn(2, 7, 5), torch.randint(7, (2, 5))
    total, _, wrong, _ = score(outputs, targets, 2, None).tolist()
    by_hand = functional.cross_entropy(outputs.transpose(1, 2).reshape(10, 7), targets.reshape(10), reduction="sum")
    assert abs(total - by_hand.item()) < 1e-4
    assert wrong == (outputs.argmax(1) != targets).sum()


def test_no_samples_keep_their_channels() -> None:
    assert arrange(torch.zeros(0, 3, 4, 4), "structured").shape == (0, 3, 16)
    assert arrange(torch.zeros(0, 3)).shape == (0, 3)
