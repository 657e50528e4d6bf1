"""Many small networks as one program: perceptrons with one hidden layer, stacked, trained and run together.

A stack holds n networks of one architecture in four tensors whose first axis counts the networks, so one batched matrix
product does the work of n. The networks stay strangers to one another: each has its own seed, its own Glorot start and
its own order of the training samples, and Adam works entry by entry.

    stack = train(Recipe(inputs=784, hidden=512, outputs=10), seeds=range(4), images=x, labels=y)
    accuracy, loss = score(stack, test_x, test_y)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
MODULES: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
#: Hidden values held at once while scoring: 2^27 floats are half a GiB.
AT_ONCE = 2**27


@dataclass(frozen=True)
class Recipe:
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
class Stack:
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

    def each(self, change: Callable[[Tensor], Tensor]) -> Stack:
        """The stack with every tensor changed in the same way."""
        return Stack(*map(change, self.tensors.values()), activation=self.activation)

    def __len__(self) -> int:
        return len(self.w1)

    def __getitem__(self, which: slice | Tensor | list[int]) -> Stack:
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


def concatenated(stacks: Sequence[Stack]) -> Stack:
    """One stack of all networks, in order."""
    together = (torch.cat(tensors) for tensors in zip(*(s.tensors.values() for s in stacks), strict=True))
    return Stack(*together, activation=stacks[0].activation)


def fresh(recipe: Recipe, generators: Sequence[torch.Generator]) -> Stack:
    """Networks as they are before training: Glorot-uniform weights, zero biases (the defaults of Keras)."""
    sizes = (recipe.inputs, recipe.hidden, recipe.outputs)
    layers: list[list[Tensor]] = [[], []]
    for generator in generators:
        for layer, fan_in, fan_out in zip(layers, sizes, sizes[1:], strict=False):
            limit = math.sqrt(6 / (fan_in + fan_out))
            layer.append((2 * torch.rand(fan_in, fan_out, generator=generator) - 1) * limit)
    w1, w2 = map(torch.stack, layers)
    return Stack(w1, torch.zeros_like(w1[:, 0]), w2, torch.zeros_like(w2[:, 0]), recipe.activation)


def train(
    recipe: Recipe,
    seeds: Sequence[int],
    images: Tensor,
    labels: Tensor,
    report: Callable[[str], None] = lambda line: None,
) -> Stack:
    """Train one network per seed, on the device of the images. Who shares the stack matters only to rounding."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    stack = fresh(recipe, generators).each(lambda tensor: tensor.to(images.device).requires_grad_())
    optimiser = torch.optim.Adam(stack.tensors.values(), lr=recipe.learning_rate, eps=recipe.epsilon, fused=True)
    for epoch in range(recipe.epochs):
        loss = _epoch(stack, optimiser, recipe.batch_size, generators, images, labels)
        report(f"networks {seeds[0]} to {seeds[-1]}: epoch {epoch + 1} of {recipe.epochs}, last loss {loss:.4f}")
    return stack.each(Tensor.detach)


def _epoch(
    stack: Stack,
    optimiser: torch.optim.Optimizer,
    batch_size: int,
    generators: Sequence[torch.Generator],
    images: Tensor,
    labels: Tensor,
) -> float:
    """One pass over the samples, each network in its own order; gives the mean loss of the last batch."""
    orders = torch.stack([torch.randperm(len(images), generator=g) for g in generators]).to(images.device)
    loss = torch.zeros(())
    for batch in orders.split(batch_size, dim=1):
        outputs = stack(images[batch]).flatten(0, 1)
        loss = functional.cross_entropy(outputs, labels[batch].flatten())
        optimiser.zero_grad()
        (loss * len(stack)).backward()  # the sum over networks of their mean losses: no network feels the others
        optimiser.step()
    return loss.item()


@torch.no_grad()
def score(stack: Stack, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy and mean cross-entropy of every network, in float64 on the CPU."""
    accuracy, loss = [], []
    for part in parts(stack, len(images)):
        outputs = part(images)
        losses = functional.cross_entropy(outputs.mT, labels.expand(len(part), -1), reduction="none")
        accuracy.append((outputs.argmax(-1) == labels).double().mean(1))
        loss.append(losses.double().mean(1))
    return torch.cat(accuracy).cpu(), torch.cat(loss).cpu()


def parts(stack: Stack, samples: int) -> list[Stack]:
    """The stack in slices whose hidden features on that many samples fit in memory."""
    size = max(1, AT_ONCE // (samples * stack.b1.shape[1]))
    return [stack[start : start + size] for start in range(0, len(stack), size)]
