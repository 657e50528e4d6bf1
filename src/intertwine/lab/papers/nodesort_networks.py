"""Many one-hidden-layer MLPs as one batched stack: training, orders of hidden nodes, distances (Sorensen 2020).

A stack holds n networks in four tensors whose first axis counts the networks, so that one batched matrix product runs
them all. Networks stay independent: each has its own seed, initialisation and order of samples, and Adam works
elementwise.

    stack = train(MLPRecipe(inputs=784, hidden=512, outputs=10), seeds=range(4), images=x, labels=y)
    accuracy, loss = score(stack, test_x, test_y)

An order is a tensor (networks, hidden) of old positions: node i of a new network is node `order[:, i]` of the old one.
`reordered` applies any method by name:

    reordered("nodesort 1.1", b, onto=a, images=x)     # sorts b and ignores a
    reordered("weight matching", b, onto=a, images=x)  # the order of b's nodes that is nearest to a
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional

from intertwine.errors import InputError, unknown_name
from intertwine.files import write_tensors
from intertwine.lab.zoo.datasets.dataset import Dataset

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
MODULES: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
#: Hidden values in memory at once while scoring: 2^27 floats are half a GiB.
AT_ONCE = 2**27


@dataclass(frozen=True)
class MLPRecipe:
    """How one network is built and trained."""

    inputs: int
    hidden: int
    outputs: int
    activation: str = "relu"
    learning_rate: float = 1e-3
    epsilon: float = 1e-7
    epochs: int = 5
    batch_size: int = 32


@dataclass(frozen=True)
class MLPStack:
    """n networks y = activation(x w1 + b1) w2 + b2.

    Shapes: w1 (n, inputs, hidden), b1 (n, hidden), w2 (n, hidden, outputs), b2 (n, outputs).
    """

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    activation: str = "relu"

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}

    def each(self, change: Callable[[Tensor], Tensor]) -> MLPStack:
        """The stack with every tensor changed in the same way."""
        return MLPStack(*map(change, self.tensors.values()), activation=self.activation)

    def __len__(self) -> int:
        return len(self.w1)

    def __getitem__(self, which: slice | Tensor | list[int]) -> MLPStack:
        return self.each(lambda tensor: tensor[which])

    def hidden(self, x: Tensor) -> Tensor:
        """Hidden features of every network, (n, samples, hidden)."""
        batch = x.expand(len(self), *x.shape[-2:])
        return ACTIVATIONS[self.activation](torch.baddbmm(self.b1[:, None], batch, self.w1))

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs of every network for shared samples (samples, inputs) or its own (n, samples, inputs)."""
        return torch.baddbmm(self.b2[:, None], self.hidden(x), self.w2)

    def module(self, index: int) -> nn.Sequential:
        """One of the networks as an ordinary module, whose linear layers store the transposed matrices."""
        _, inputs, hidden = self.w1.shape
        net = nn.Sequential(nn.Linear(inputs, hidden), MODULES[self.activation](), nn.Linear(hidden, self.w2.shape[2]))
        values = (self.w1[index].T, self.b1[index], self.w2[index].T, self.b2[index])
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), values, strict=True):
                parameter.copy_(value)
        return net


def concatenated(stacks: Sequence[MLPStack]) -> MLPStack:
    """One stack of all networks, in order."""
    together = (torch.cat(tensors) for tensors in zip(*(s.tensors.values() for s in stacks), strict=True))
    return MLPStack(*together, activation=stacks[0].activation)


def fresh(recipe: MLPRecipe, generators: Sequence[torch.Generator]) -> MLPStack:
    """Networks at initialisation: Glorot-uniform weights, zero biases (the defaults of Keras)."""
    sizes = (recipe.inputs, recipe.hidden, recipe.outputs)
    layers: list[list[Tensor]] = [[], []]
    for generator in generators:
        for layer, fan_in, fan_out in zip(layers, sizes, sizes[1:], strict=False):
            limit = math.sqrt(6 / (fan_in + fan_out))
            layer.append((2 * torch.rand(fan_in, fan_out, generator=generator) - 1) * limit)
    w1, w2 = map(torch.stack, layers)
    return MLPStack(w1, torch.zeros_like(w1[:, 0]), w2, torch.zeros_like(w2[:, 0]), recipe.activation)


def train(
    recipe: MLPRecipe,
    seeds: Sequence[int],
    images: Tensor,
    labels: Tensor,
    progress: Callable[[str], None] = lambda step: None,
) -> MLPStack:
    """Train one network per seed, on the device of the images. The other networks of the stack affect only rounding."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    stack = fresh(recipe, generators).each(lambda tensor: tensor.to(images.device).requires_grad_())
    optimiser = torch.optim.Adam(stack.tensors.values(), lr=recipe.learning_rate, eps=recipe.epsilon, fused=True)
    for epoch in range(recipe.epochs):
        orders = torch.stack([torch.randperm(len(images), generator=g) for g in generators]).to(images.device)
        loss = torch.zeros(())
        for batch in orders.split(recipe.batch_size, dim=1):
            loss = functional.cross_entropy(stack(images[batch]).flatten(0, 1), labels[batch].flatten())
            optimiser.zero_grad()
            (loss * len(stack)).backward()  # the sum of the networks' mean losses keeps their gradients independent
            optimiser.step()
        step = f"networks {seeds[0]} to {seeds[-1]}: epoch {epoch + 1} of {recipe.epochs}, last loss {loss.item():.4f}"
        progress(step)
    return stack.each(Tensor.detach)


@torch.no_grad()
def score(stack: MLPStack, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy and mean cross-entropy of every network, as float64 on the CPU."""
    accuracy, loss = [], []
    for part in parts(stack, len(images)):
        outputs = part(images)
        losses = functional.cross_entropy(outputs.mT, labels.expand(len(part), -1), reduction="none")
        accuracy.append((outputs.argmax(-1) == labels).double().mean(1))
        loss.append(losses.double().mean(1))
    return torch.cat(accuracy).cpu(), torch.cat(loss).cpu()


def parts(stack: MLPStack, samples: int) -> list[MLPStack]:
    """The stack in slices whose hidden features on so many samples fit in memory."""
    size = max(1, AT_ONCE // (samples * stack.b1.shape[1]))
    return [stack[start : start + size] for start in range(0, len(stack), size)]


# -- Orders of hidden nodes --


UNSORTED, LEXICOGRAPHIC = "unsorted", "lexicographic"
WEIGHT_MATCHING, ACTIVATION_MATCHING = "weight matching", "activation matching"
MATCHINGS = (WEIGHT_MATCHING, ACTIVATION_MATCHING)
#: Columns multiplied at once in a Gram matrix: 1,000 networks then need half a GiB of float64.
COLUMNS = 2**16


def orders(bases: list[float]) -> list[str]:
    """Names of the methods that need no second network."""
    return [UNSORTED, *(f"nodesort {base:g}" for base in bases), LEXICOGRAPHIC]


def nodesort_order(w2: Tensor, base: float) -> Tensor:
    """The thesis's order (8): nodes by the inner product of their outgoing weights with (p^0, ..., p^(m-1))."""
    powers = base ** torch.arange(w2.shape[2], dtype=torch.float64, device=w2.device)
    return torch.argsort((w2.double() * powers).sum(-1), dim=1, stable=True)


def lexicographic_order(w2: Tensor) -> Tensor:
    """The thesis's description of order (8): by the first outgoing weight, then the second, and so on."""
    order = torch.arange(w2.shape[1], device=w2.device).expand(w2.shape[:2])
    for column in reversed(w2.unbind(-1)):  # stable sorts, from the least to the most significant column
        order = order.gather(1, torch.argsort(column.gather(1, order), dim=1, stable=True))
    return order


def matching_order(scores: Tensor) -> Tensor:
    """For score matrices (pairs, nodes of a, nodes of b): the order of the nodes of b with the largest total."""
    found = [linear_sum_assignment(matrix.numpy(), maximize=True)[1] for matrix in scores.cpu()]
    return torch.stack([torch.as_tensor(columns) for columns in found]).to(scores.device)


def permuted(stack: MLPStack, order: Tensor) -> MLPStack:
    """The same functions with permuted hidden nodes."""
    w1 = stack.w1.gather(2, order[:, None, :].expand_as(stack.w1))
    w2 = stack.w2.gather(1, order[:, :, None].expand_as(stack.w2))
    return MLPStack(w1, stack.b1.gather(1, order), w2, stack.b2, stack.activation)


def reordered(method: str, stack: MLPStack, onto: MLPStack, images: Tensor) -> MLPStack:
    """The stack after a method; matchings move network i of the stack near network i of `onto`."""
    if method == UNSORTED or (method in MATCHINGS and stack is onto):
        return stack
    return permuted(stack, order_of(method, stack, onto, images))


def order_of(method: str, stack: MLPStack, onto: MLPStack, images: Tensor) -> Tensor:
    """The order a method gives the nodes of each network."""
    if method == LEXICOGRAPHIC:
        return lexicographic_order(stack.w2)
    if method == WEIGHT_MATCHING:
        biases = onto.b1[:, :, None] * stack.b1[:, None, :]  # the largest total gives the least distance
        return matching_order(torch.bmm(onto.w1.mT, stack.w1) + biases + torch.bmm(onto.w2, stack.w2.mT))
    if method == ACTIVATION_MATCHING:
        return matching_order(torch.bmm(onto.hidden(images).mT, stack.hidden(images)))
    name, _, base = method.partition(" ")
    if name != "nodesort":
        raise InputError(unknown_name("method", method, ("nodesort BASE", UNSORTED, LEXICOGRAPHIC, *MATCHINGS)))
    return nodesort_order(stack.w2, float(base))


def pairwise_distances(tensor: Tensor) -> Tensor:
    """Euclidean distances of all pairs of networks, in float64, from a Gram matrix built a few columns at a time."""
    flat = tensor.flatten(1)
    gram = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat.device)
    for columns in flat.split(COLUMNS, dim=1):
        wide = columns.double()
        gram += wide @ wide.T
    squares = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    rows, columns = torch.triu_indices(len(flat), len(flat), offset=1, device=flat.device)
    return squares[rows, columns].clamp(min=0).sqrt()  # rounding makes some squares negative


def stack_distances(a: MLPStack, b: MLPStack) -> dict[str, Tensor]:
    """Distance of network i of one stack to network i of the other: of w1, of w2, and of all parameters."""
    squares = {
        name: (left.double() - right.double()).square().flatten(1).sum(1)
        for (name, left), right in zip(a.tensors.items(), b.tensors.values(), strict=True)
    }
    total = sum(squares.values(), torch.zeros_like(squares["w1"]))
    return {"w1": squares["w1"].sqrt(), "w2": squares["w2"].sqrt(), "all": total.sqrt()}


# -- The networks of a plan --


@dataclass(frozen=True)
class DistancesSettings:
    """The table [distances]. Network i has the seed `first_seed` + i, of its initialisation and its order of samples.

    Attributes:
        bases: values of p in the thesis's order. matched_pairs: the number of pairs for methods that work pair by pair.
        matching_images: training images for activation matching.
        average_sizes, average_groups: networks in an average, and how many averages.
        curve_pairs, curve_points: straight lines between two networks, and the points on each.
        noise: relative to the norm of each tensor, on `noise_nets` networks.
        control_nets: networks with a permuted copy. seed: picks pairs, groups, noise and the copies.
    """

    hidden: int
    nets: int
    activation: str
    learning_rate: float
    epsilon: float
    epochs: int
    batch_size: int
    bases: list[float]
    matched_pairs: int
    matching_images: int
    average_sizes: list[int]
    average_groups: int
    curve_pairs: int
    curve_points: int
    noise: list[float]
    noise_nets: int
    control_nets: int
    first_seed: int = 0
    seed: int = 0

    def check(self, plan: Any, file: str) -> None:
        """Refuse too few networks, unknown activations, and plans without data."""
        if self.nets < 2:
            raise InputError(f"{file}: nets must be at least 2, but is {self.nets}.")
        if self.activation not in ACTIVATIONS:
            raise InputError(f"{file}: {unknown_name('activation', self.activation, ACTIVATIONS)}")
        if plan.data is None:
            raise InputError(f"{file}: the table [data] is missing; the networks are trained on images.")


#: Networks trained at once: many on a GPU; on a CPU small chunks cost nothing and lose less when a run is stopped.
CHUNKS = {"cuda": 250, "cpu": 2}


@dataclass(frozen=True)
class FlatImages:
    """Images (samples, pixels) with values in [0, 1] and their labels, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    checksum: str
    classes: int


def read_images(data: Dataset, device: torch.device) -> FlatImages:
    """The images of a data set on the device, the brightest pixel of its training part being 1."""
    brightest = float(data.images.max())  # divided on the CPU, since a GPU would multiply by the rounded 1/255
    train, test = (images.flatten(1).float() / brightest for images in (data.images, data.test_images))
    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in (train, data.labels, test, data.test_labels))
    return FlatImages(train_x, train_y, test_x, test_y, data.checksum, len(data.classes))


def recipe_of(plan: DistancesSettings, images: FlatImages) -> MLPRecipe:
    """The recipe of one network for these images and classes."""
    return MLPRecipe(
        images.train_x.shape[1], plan.hidden, images.classes, plan.activation, plan.learning_rate, plan.epsilon,
        plan.epochs, plan.batch_size,
    )  # fmt: skip


def trained(plan: DistancesSettings, images: FlatImages, place: Path, progress: Callable[[str], None]) -> MLPStack:
    """All networks of the plan, on the device of the images. Every chunk is written as soon as it is trained.

    Their folder is named after everything that they depend on; chunks of an earlier run are read from it.
    """
    recipe, device = recipe_of(plan, images), images.train_x.device
    made_of = {"recipe": asdict(recipe), "first_seed": plan.first_seed, "images": images.checksum}
    folder = place / hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
    chunk = CHUNKS.get(device.type, CHUNKS["cpu"])
    stacks = []
    for start in range(0, plan.nets, chunk):
        stop = min(start + chunk, plan.nets)
        file = folder / f"nets-{start:05d}-{stop - 1:05d}.safetensors"
        if not file.is_file():
            seeds = range(plan.first_seed + start, plan.first_seed + stop)
            write_tensors(file, train(recipe, seeds, images.train_x, images.train_y, progress).tensors)
        stacks.append(MLPStack(**load_file(file), activation=plan.activation))
    return concatenated(stacks).each(lambda tensor: tensor.to(device))
