"""How good averaged networks are: plain, after sorting, after matching, and next to an ensemble of predictions.

The thesis proposes the average of sorted networks and gives no numbers; here they are. Every function takes a stack of
networks and gives plain numbers, ready for the result file.
"""

from __future__ import annotations

import torch
from stacked_mlp import Stack, concatenated, parts, score
from stacked_order import moved
from thesis_distances import Numbers, methods, picked_pairs, summary
from thesis_store import Images, Plan
from torch import Tensor


def picked_groups(nets: int, size: int, count: int, seed: int) -> Tensor:
    """Random groups (count, size) of distinct networks: pairs as above, larger groups disjoint."""
    if size == 2:
        return picked_pairs(nets, count, seed)
    shuffled = torch.randperm(nets, generator=torch.Generator().manual_seed(seed))
    return shuffled[: nets // size * size].reshape(-1, size)[:count]


def averages(stack: Stack, plan: Plan, images: Images) -> Numbers:
    """Test accuracy of single networks, of the mean of several after each method, and of their mean prediction."""
    results: Numbers = {"1": {"single": summary(score(stack, images.test_x, images.test_y)[0])}}
    some = images.train_x[: plan.matching_images]
    for size in sorted({min(size, len(stack)) for size in plan.average_sizes}):
        groups = picked_groups(len(stack), size, plan.average_groups, plan.seed)
        entry = results[str(size)] = {}
        for method in methods(plan):
            means = concatenated([averaged(method, stack[group], some) for group in groups])
            entry[method] = summary(score(means, images.test_x, images.test_y)[0])
        entry["ensemble"] = summary(torch.stack([ensemble(stack[group], images) for group in groups]))
    return results


def averaged(method: str, group: Stack, images: Tensor) -> Stack:
    """One network: the mean of the group after a method; matchings match every network to the first."""
    first = group[torch.zeros(len(group), dtype=torch.int64)]
    return moved(method, group, first, images).each(lambda tensor: tensor.mean(0, keepdim=True))


@torch.no_grad()
def ensemble(group: Stack, images: Images) -> Tensor:
    """Accuracy of the mean of the predicted probabilities."""
    sums = [part(images.test_x).softmax(-1).sum(0) for part in parts(group, len(images.test_x))]
    return (torch.stack(sums).sum(0).argmax(-1) == images.test_y).double().mean().cpu()


def curves(stack: Stack, plan: Plan, images: Images) -> Numbers:
    """Accuracy and loss on the straight line between two networks after each method, over some pairs."""
    pairs = picked_pairs(len(stack), plan.curve_pairs, plan.seed)
    a, b = stack[pairs[:, 0]], stack[pairs[:, 1]]
    steps = torch.linspace(0, 1, plan.curve_points, dtype=torch.float64).tolist()
    some = images.train_x[: plan.matching_images]
    results: Numbers = {"t": steps, "pairs": len(pairs)}
    for method in methods(plan):
        ends = moved(method, a, a, some), moved(method, b, a, some)
        scores = [score(between(*ends, t), images.test_x, images.test_y) for t in steps]
        accuracy, loss = (torch.stack(values) for values in zip(*scores, strict=True))
        results[method] = {
            "accuracy": _band(accuracy),
            "loss": _band(loss),
            "loss_barrier": summary(_height(loss)),
            "error_barrier": summary(_height(1 - accuracy)),
        }
    return results


def between(a: Stack, b: Stack, t: float) -> Stack:
    """The networks (1 - t) a + t b."""
    mixed = (torch.lerp(x, y, t) for x, y in zip(a.tensors.values(), b.tensors.values(), strict=True))
    return Stack(*mixed, activation=a.activation)


def _band(values: Tensor) -> Numbers:
    return {"mean": values.mean(1).tolist(), "min": values.amin(1).tolist(), "max": values.amax(1).tolist()}


def _height(values: Tensor) -> Tensor:
    """How far a curve (points, pairs) rises above the chord between its ends."""
    t = torch.linspace(0, 1, len(values), dtype=values.dtype)[:, None]
    return (values - (1 - t) * values[0] - t * values[-1]).amax(0)
