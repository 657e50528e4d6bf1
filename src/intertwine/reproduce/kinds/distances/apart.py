"""How far apart trained networks are: unsorted, sorted, matched (Table 1 of the thesis), and under a little noise.

Every function takes a stack of networks and gives rows of the result file, one per method. The controls are here too:
networks before training, and permuted copies, whose distance must become 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from intertwine.reproduce.kinds.distances.settings import Distances
from intertwine.reproduce.kinds.distances.stacked_mlp import Stack, fresh
from intertwine.reproduce.kinds.distances.stacked_order import (
    MATCHINGS,
    UNSORTED,
    WEIGHTS,
    apart,
    moved,
    order_of,
    orders,
    pairwise,
    permuted,
)
from intertwine.reproduce.kinds.distances.store import Images, recipe_of
from intertwine.reproduce.kinds.registry import Row

#: Pairs handled at once; a pair of thesis-sized networks and its score matrix take about 5 MiB.
PAIRS_AT_ONCE = 50
#: Two networks coincide if their distance is this small a part of the mean. Gram matrices resolve about 1e-7.
SAME = 1e-4


def summary(values: Tensor) -> dict[str, Any]:
    """Minimum, maximum, mean, deviation (None of one value) and count.

    >>> summary(torch.tensor([1.0, 2.0, 3.0]))
    {'min': 1.0, 'max': 3.0, 'mean': 2.0, 'deviation': 1.0, 'count': 3}
    """
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": float(values.mean()),
        "deviation": float(values.std()) if values.numel() > 1 else None,
        "count": values.numel(),
    }


def methods(plan: Distances) -> list[str]:
    """Everything that is compared, the unsorted networks first."""
    return [*orders(plan.bases), *MATCHINGS]


def picked_pairs(nets: int, count: int, seed: int) -> Tensor:
    """Distinct random pairs (count, 2), all of them where there are no more."""
    pairs = torch.triu_indices(nets, nets, offset=1).T
    return pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:count]]


# -- distances ---------------------------------------------------------------------------------------------------------


def all_distances(stack: Stack, plan: Distances, images: Tensor) -> list[Row]:
    """Distances of all pairs, unsorted and after each order, as in Table 1; and pairs that coincide."""
    rows = []
    for method in orders(plan.bases):
        now = moved(method, stack, stack, images)
        found = {"w1": pairwise(now.w1), "w2": pairwise(now.w2)}
        same = {name: values <= SAME * values.mean() for name, values in found.items()}
        row: Row = {"method": method} | {name: summary(values) for name, values in found.items()}
        rows.append(row | {"coinciding_pairs": int((same["w1"] & same["w2"]).sum())})
    return _with_changes(rows)


def pair_distances(stack: Stack, plan: Distances, images: Tensor) -> list[Row]:
    """Distances of some pairs after every method; matching is work per pair, so not all pairs are taken."""
    pairs = picked_pairs(len(stack), plan.matched_pairs, plan.seed)
    found: dict[str, list[dict[str, Tensor]]] = {method: [] for method in methods(plan)}
    for block in pairs.split(PAIRS_AT_ONCE):
        a, b = stack[block[:, 0]], stack[block[:, 1]]
        for method, blocks in found.items():
            blocks.append(apart(moved(method, a, a, images), moved(method, b, a, images)))
    return _with_changes(
        [
            {"method": method}
            | {name: summary(torch.cat([block[name] for block in blocks])) for name in ("w1", "w2", "all")}
            for method, blocks in found.items()
        ]
    )


def _with_changes(rows: list[Row]) -> list[Row]:
    """Add the relative change of each mean against the first row, that of the unsorted networks."""
    for row in rows:
        for name, numbers in row.items():
            if isinstance(numbers, dict):
                numbers["change"] = numbers["mean"] / rows[0][name]["mean"] - 1
    return rows


def start_distances(plan: Distances, images: Images) -> list[Row]:
    """Mean distances before training, of a few networks."""
    seeds = range(plan.first_seed, plan.first_seed + min(plan.nets, 20))
    stack = fresh(recipe_of(plan, images), [torch.Generator().manual_seed(seed) for seed in seeds])
    return [{"method": UNSORTED, "w1": summary(pairwise(stack.w1)), "w2": summary(pairwise(stack.w2))}]


def control(stack: Stack, plan: Distances, images: Tensor) -> list[Row]:
    """Permuted copies: far from their originals, and at distance 0 after every order and after weight matching.

    Activation matching may leave a distance: nodes that are dead on all its images look alike to it.
    """
    some = stack[: plan.control_nets]
    generator = torch.Generator().manual_seed(plan.seed)
    shuffles = torch.stack([torch.randperm(some.b1.shape[1], generator=generator) for _ in range(len(some))])
    copies = permuted(some, shuffles.to(some.b1.device))
    rows = []
    for method in methods(plan):
        left = apart(moved(method, some, some, images), moved(method, copies, some, images))["all"]
        rows.append({"method": method, "distance": float(left.max())})
    return rows


# -- noise -------------------------------------------------------------------------------------------------------------


def stability(stack: Stack, plan: Distances, images: Tensor) -> list[Row]:
    """A little noise, then each method: is the order the same, and how far are the results apart?

    Noise of level r adds to every tensor a normal one with r times its norm. A stable method leaves `distance` what it
    is without sorting; `growth` is the ratio of the two.
    """
    some = stack[: plan.noise_nets].each(Tensor.double)  # float32 would round the smallest noise away
    generator = torch.Generator().manual_seed(plan.seed)
    noisy = ((level, _noisy(some, level, generator)) for level in plan.noise)
    return [{"noise": level} | row for level, stack in noisy for row in _under_noise(some, stack, plan, images)]


def _under_noise(some: Stack, noisy: Stack, plan: Distances, images: Tensor) -> Iterator[Row]:
    before = apart(some, noisy)["all"]
    yield {"method": UNSORTED, "distance": summary(before)}
    for method in [*orders(plan.bases)[1:], WEIGHTS]:
        old, new = (order_of(method, stack, some, images) for stack in (some, noisy))
        after = apart(permuted(some, old), permuted(noisy, new))["all"]
        changed = old != new
        yield {
            "method": method,
            "order_changed": float(changed.any(1).double().mean()),
            "nodes_moved": float(changed.double().mean()),
            "distance": summary(after),
            "growth": summary(after / before),
        }


def _noisy(stack: Stack, level: float, generator: torch.Generator) -> Stack:
    def shaken(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        size, noise_size = (x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1)) for x in (tensor, noise))
        return tensor + level * size / noise_size * noise

    return stack.each(shaken)
