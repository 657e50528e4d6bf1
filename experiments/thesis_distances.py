"""How far apart trained networks are: unsorted, sorted, matched (Table 1 of the thesis), and under a little noise.

Every function takes a stack of networks and gives plain numbers, ready for the result file. The controls are here too:
networks before training, and permuted copies, whose distance must become 0.
"""

from __future__ import annotations

from typing import Any

import torch
from stacked_mlp import Stack, fresh
from stacked_order import MATCHINGS, UNSORTED, WEIGHTS, apart, moved, order_of, orders, pairwise, permuted
from thesis_store import Plan
from torch import Tensor

Numbers = dict[str, Any]
#: Pairs handled at once; a pair of thesis-sized networks and its score matrix take about 5 MiB.
PAIRS_AT_ONCE = 50
#: Two networks coincide if their distance is this small a part of the mean. Gram matrices resolve about 1e-7.
SAME = 1e-4


def summary(values: Tensor) -> Numbers:
    """Minimum, maximum, mean and count."""
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": float(values.mean()),
        "count": values.numel(),
    }


def methods(plan: Plan) -> list[str]:
    """Everything that is compared, the unsorted networks first."""
    return [*orders(plan.bases), *MATCHINGS]


def picked_pairs(nets: int, count: int, seed: int) -> Tensor:
    """Distinct random pairs (count, 2), all of them where there are no more."""
    pairs = torch.triu_indices(nets, nets, offset=1).T
    return pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:count]]


# -- distances ---------------------------------------------------------------------------------------------------------


def all_distances(stack: Stack, plan: Plan, images: Tensor) -> Numbers:
    """Distances of all pairs, unsorted and after each order, as in Table 1; and pairs that coincide."""
    results: Numbers = {}
    for method in orders(plan.bases):
        now = moved(method, stack, stack, images)
        found = {"w1": pairwise(now.w1), "w2": pairwise(now.w2)}
        same = {name: values <= SAME * values.mean() for name, values in found.items()}
        results[method] = {name: summary(values) for name, values in found.items()}
        results[method]["coinciding_pairs"] = int((same["w1"] & same["w2"]).sum())
    return _with_changes(results)


def pair_distances(stack: Stack, plan: Plan, images: Tensor) -> Numbers:
    """Distances of some pairs after every method; matching is work per pair, so not all pairs are taken."""
    pairs = picked_pairs(len(stack), plan.matched_pairs, plan.seed)
    found: dict[str, list[dict[str, Tensor]]] = {method: [] for method in methods(plan)}
    for block in pairs.split(PAIRS_AT_ONCE):
        a, b = stack[block[:, 0]], stack[block[:, 1]]
        for method, blocks in found.items():
            blocks.append(apart(moved(method, a, a, images), moved(method, b, a, images)))
    return _with_changes(
        {
            method: {name: summary(torch.cat([block[name] for block in blocks])) for name in ("w1", "w2", "all")}
            for method, blocks in found.items()
        }
    )


def _with_changes(results: Numbers) -> Numbers:
    """Add the relative change of each mean against the unsorted networks."""
    for entry in results.values():
        for name, numbers in entry.items():
            if isinstance(numbers, dict):
                numbers["change"] = numbers["mean"] / results[UNSORTED][name]["mean"] - 1
    return results


def start_distances(plan: Plan) -> Numbers:
    """Mean distances before training, of a few networks."""
    seeds = range(plan.first_seed, plan.first_seed + min(plan.nets, 20))
    stack = fresh(plan.recipe, [torch.Generator().manual_seed(seed) for seed in seeds])
    return {"w1": summary(pairwise(stack.w1)), "w2": summary(pairwise(stack.w2))}


def control(stack: Stack, plan: Plan, images: Tensor) -> Numbers:
    """Permuted copies: far from their originals, and at distance 0 after every order and after weight matching.

    Activation matching may leave a distance: nodes that are dead on all its images look alike to it.
    """
    some = stack[: plan.control_nets]
    generator = torch.Generator().manual_seed(plan.seed)
    shuffles = torch.stack([torch.randperm(some.b1.shape[1], generator=generator) for _ in range(len(some))])
    copies = permuted(some, shuffles.to(some.b1.device))
    return {
        method: float(apart(moved(method, some, some, images), moved(method, copies, some, images))["all"].max())
        for method in methods(plan)
    }


# -- noise -------------------------------------------------------------------------------------------------------------


def stability(stack: Stack, plan: Plan, images: Tensor) -> Numbers:
    """A little noise, then each method: is the order the same, and how far are the results apart?

    Noise of level r adds to every tensor a normal one with r times its norm. A stable method leaves `distance` what it
    is without sorting; `growth` is the ratio of the two.
    """
    some = stack[: plan.noise_nets].each(Tensor.double)  # float32 would round the smallest noise away
    generator = torch.Generator().manual_seed(plan.seed)
    return {f"{level:g}": _under_noise(some, _noisy(some, level, generator), plan, images) for level in plan.noise}


def _under_noise(some: Stack, noisy: Stack, plan: Plan, images: Tensor) -> Numbers:
    before = apart(some, noisy)["all"]
    entry: Numbers = {UNSORTED: {"distance": summary(before)}}
    for method in [*orders(plan.bases)[1:], WEIGHTS]:
        old, new = (order_of(method, stack, some, images) for stack in (some, noisy))
        after = apart(permuted(some, old), permuted(noisy, new))["all"]
        changed = old != new
        entry[method] = {
            "order_changed": float(changed.any(1).double().mean()),
            "nodes_moved": float(changed.double().mean()),
            "distance": summary(after),
            "growth": summary(after / before),
        }
    return entry


def _noisy(stack: Stack, level: float, generator: torch.Generator) -> Stack:
    def shaken(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        size, noise_size = (x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.dim() - 1)) for x in (tensor, noise))
        return tensor + level * size / noise_size * noise

    return stack.each(shaken)
