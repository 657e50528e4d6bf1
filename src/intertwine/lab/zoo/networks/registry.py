"""The architectures by name, with their options and example inputs, and the module paths of their ReLUs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.errors import InputError, unknown_name
from intertwine.lab.zoo.networks.feedforward import VGG_STAGES, lenet, mlp, myrtle, tiny10, vgg
from intertwine.lab.zoo.networks.options import maker
from intertwine.lab.zoo.networks.resnet import RESNET_STAGES, resnet
from intertwine.lab.zoo.networks.transformers import CONTEXT, VOCAB, cct, gpt, vit

CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)
_LATER_STAGE = re.compile(r"layer(?!1$)\d+")


@dataclass(frozen=True)
class Architecture:
    """One entry of the zoo; `input_shape` is that of one example with the default options."""

    name: str
    factory: Callable[..., nn.Module]
    input_shape: tuple[int, ...]
    about: str
    vocabulary: int | None = None  # for token ids, which are below it

    @property
    def options(self) -> tuple[str, ...]:
        """The keywords that `build` takes for this network."""
        fixed = self.factory.keywords if isinstance(self.factory, partial) else {}
        names = [name for name in inspect.signature(self.factory).parameters if name not in fixed]
        return tuple(names + ["slope"] * ("activation" in names))

    def example(self, batch: int = 1) -> Tensor:
        """A random batch of inputs of the right shape.

        >>> architecture("myrtle").example(2).shape
        torch.Size([2, 3, 32, 32])
        """
        shape = (batch, *self.input_shape)
        return torch.randn(shape) if self.vocabulary is None else torch.randint(0, self.vocabulary, shape)


def _entries() -> list[Architecture]:
    entries = [
        Architecture("mlp", mlp, MNIST, "multilayer perceptron 784-512-10; any widths"),
        Architecture("lenet", lenet, MNIST, "LeNet-5 with ReLUs (LeCun et al. 1998), as in Zhou et al. 2023"),
        Architecture("myrtle", myrtle, CIFAR, "Myrtle CNN (Page 2018), as in Godfrey et al. 2022"),
        Architecture("tiny10", tiny10, CIFAR, "Tiny-10 of Csiszárik et al. 2021"),
    ]
    for depth in sorted(RESNET_STAGES, key=lambda depth: (len(RESNET_STAGES[depth][2]), depth)):
        _, base, counts, usual = RESNET_STAGES[depth]
        widths = "-".join(str(base * 2**i) for i in range(len(counts)))
        about = f"ResNet-{depth} for CIFAR (He et al. 2016), stages {widths}, shortcut {usual}"
        entries.append(Architecture(f"resnet{depth}", partial(resnet, depth=depth), CIFAR, about))
    for norm, end, words in ((False, "", ""), (True, "_bn", ", with BatchNorm")):
        for depth in VGG_STAGES:
            about = f"VGG-{depth} for CIFAR (Simonyan and Zisserman 2015){words}"
            factory = partial(vgg, depth=depth, norm=True) if norm else partial(vgg, depth=depth)
            entries.append(Architecture(f"vgg{depth}{end}", factory, CIFAR, about))
    return [
        *entries,
        Architecture("cct", cct, CIFAR, "compact convolutional transformer CCT-6/3×1 (Hassani et al. 2021)"),
        Architecture("vit", vit, CIFAR, "small vision transformer (Dosovitskiy et al. 2021), patches of 4"),
        Architecture("gpt", gpt, (CONTEXT,), "small GPT-style language model (Radford et al. 2019)", VOCAB),
    ]


_ALL = {entry.name: entry for entry in _entries()}


def architectures() -> tuple[str, ...]:
    """The names that `build` accepts.

    >>> "resnet20" in architectures()
    True
    """
    return tuple(_ALL)


def architecture(name: str) -> Architecture:
    """The entry of that name, with its options and example inputs.

    >>> architecture("tiny10").options
    ('width', 'in_channels', 'classes', 'activation', 'slope')
    """
    if name not in _ALL:
        raise InputError(unknown_name("zoo network", name, _ALL))
    return _ALL[name]


def build(name: str, **options: Any) -> nn.Module:
    """A new network with random weights, in training mode.

    Args:
        name: one of `architectures()`.
        options: of that network, see `architecture(name).options`. Networks with an activation also take `slope`, the
            negative slope of `activation="leaky_relu"`.

    Raises:
        InputError: an unknown name or option, or an invalid value.

    >>> sum(p.numel() for p in build("mlp", widths=(784, 512, 10)).parameters())
    407050
    >>> build("mlp", widths=(4, 3, 2), activation="leaky_relu", slope=0.1)[2]
    LeakyReLU(negative_slope=0.1)
    """
    entry = architecture(name)
    for option in options:
        if option not in entry.options:
            raise InputError(unknown_name(f"option of {name}", option, entry.options))
    slope = options.pop("slope", None)
    if slope is not None:
        default = inspect.signature(entry.factory).parameters["activation"].default
        options["activation"] = maker(options.get("activation", default), slope)
    return entry.factory(**options)


def relu_paths(model: nn.Module, kind: type[nn.Module] = nn.ReLU) -> tuple[str, ...]:
    """The module paths of the ReLUs (or of another kind of module), in the order in which the network applies them.

    >>> relu_paths(build("myrtle"))
    ('2', '5', '9', '13')
    """
    return tuple(path for path, module in model.named_modules() if isinstance(module, kind))


def figure_numbers(model: nn.Module, kind: type[nn.Module] = nn.ReLU) -> dict[str, int]:
    """The path of every ReLU and its number in the figures of Godfrey et al. (2022).

    The number is the position of the ReLU in `model.modules()`, where the model itself is number 0. Their Myrtle CNN is
    a Sequential, so the ReLUs 3, 6, 10, 14 of figure 26a are the paths 2, 5, 9, 13. Their ResNets keep all blocks in
    one Sequential and register the shortcut of a block after its second ReLU; here the blocks are grouped into layer1,
    layer2, …, of which only the first is counted. ResNet20 then has the numbers 3, 8*, 11, 16*, …, 75 and ResNet18
    3, 8*, 11, …, 70*, 73 of the paper, where a star marks a ReLU inside a residual block.

    >>> figure_numbers(build("myrtle"))
    {'2': 3, '5': 6, '9': 10, '13': 14}
    >>> list(figure_numbers(build("resnet20")).items())[:3]
    [('relu', 3), ('layer1.0.relu1', 8), ('layer1.0.relu2', 11)]
    """
    counted = [(path, module) for path, module in model.named_modules() if not _LATER_STAGE.fullmatch(path)]
    return {path: number for number, (path, module) in enumerate(counted) if isinstance(module, kind)}
