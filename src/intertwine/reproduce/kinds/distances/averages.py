"""How good averaged networks are: plain, after sorting, after matching, and next to an ensemble of predictions.

The thesis proposes the average of sorted networks and gives no numbers; here they are. The two functions that measure
take a stack of networks and give rows of the result file, one per method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intertwine.reproduce.kinds.distances.apart import methods, picked_pairs, summary
from intertwine.reproduce.kinds.distances.settings import Distances
from intertwine.reproduce.kinds.distances.stacked_mlp import Stack, concatenated, parts, score
from intertwine.reproduce.kinds.distances.stacked_order import moved
from intertwine.reproduce.kinds.distances.store import Images
from intertwine.reproduce.kinds.registry import Row


def picked_groups(nets: int, size: int, count: int, seed: int) -> Tensor:
    """Random groups (count, size) of distinct networks: pairs as above, larger groups disjoint."""
    if size == 2:
        return picked_pairs(nets, count, seed)
    shuffled = torch.randperm(nets, generator=torch.Generator().manual_seed(seed))
    return shuffled[: nets // size * size].reshape(-1, size)[:count]


def averages(stack: Stack, plan: Distances, images: Images) -> list[Row]:
    """Test accuracy of single networks, of the mean of several after each method, and of their mean prediction."""
    rows: list[Row] = [{"networks": 1, "method": "single"} | summary(score(stack, images.test_x, images.test_y)[0])]
    some = images.train_x[: plan.matching_images]
    for size in sorted({min(size, len(stack)) for size in plan.average_sizes}):
        groups = picked_groups(len(stack), size, plan.average_groups, plan.seed)
        for method in methods(plan):
            means = concatenated([averaged(method, stack[group], some) for group in groups])
            accuracy = score(means, images.test_x, images.test_y)[0]
            rows.append({"networks": size, "method": method} | summary(accuracy))
        together = torch.stack([ensemble(stack[group], images) for group in groups])
        rows.append({"networks": size, "method": "ensemble"} | summary(together))
    return rows


def averaged(method: str, group: Stack, images: Tensor) -> Stack:
    """One network: the mean of the group after a method; matchings match every network to the first."""
    first = group[torch.zeros(len(group), dtype=torch.int64)]
    return moved(method, group, first, images).each(lambda tensor: tensor.mean(0, keepdim=True))


@torch.no_grad()
def ensemble(group: Stack, images: Images) -> Tensor:
    """Accuracy of the mean of the predicted probabilities."""
    sums = [part(images.test_x).softmax(-1).sum(0) for part in parts(group, len(images.test_x))]
    return (torch.stack(sums).sum(0).argmax(-1) == images.test_y).double().mean().cpu()


def curves(stack: Stack, plan: Distances, images: Images) -> list[Row]:
    """Accuracy and loss on the straight line between two networks after each method, over some pairs."""
    pairs = picked_pairs(len(stack), plan.curve_pairs, plan.seed)
    a, b = stack[pairs[:, 0]], stack[pairs[:, 1]]
    steps = torch.linspace(0, 1, plan.curve_points, dtype=torch.float64).tolist()
    some = images.train_x[: plan.matching_images]
    rows = []
    for method in methods(plan):
        ends = moved(method, a, a, some), moved(method, b, a, some)
        scores = [score(between(*ends, t), images.test_x, images.test_y) for t in steps]
        accuracy, loss = (torch.stack(values) for values in zip(*scores, strict=True))
        rows.append(
            {
                "method": method, "t": steps, "pairs": len(pairs), "accuracy": _band(accuracy), "loss": _band(loss),
                "loss_barrier": summary(_height(loss)), "error_barrier": summary(_height(1 - accuracy)),
            }
        )  # fmt: skip
    return rows


def between(a: Stack, b: Stack, t: float) -> Stack:
    """The networks (1 - t) a + t b."""
    mixed = (torch.lerp(x, y, t) for x, y in zip(a.tensors.values(), b.tensors.values(), strict=True))
    return Stack(*mixed, activation=a.activation)


def _band(values: Tensor) -> dict[str, list[float]]:
    return {"mean": values.mean(1).tolist(), "min": values.amin(1).tolist(), "max": values.amax(1).tolist()}


def _height(values: Tensor) -> Tensor:
    """How far a curve (points, pairs) rises above the chord between its ends."""
    t = torch.linspace(0, 1, len(values), dtype=values.dtype)[:, None]
    return (values - (1 - t) * values[0] - t * values[-1]).amax(0)
