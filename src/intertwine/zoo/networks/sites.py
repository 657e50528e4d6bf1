"""Where the ReLUs of a network are: their module paths in order, and their numbers in the papers' figures.

Godfrey et al. (2022) name a hidden layer by a number: the place of its ReLU in `model.modules()`, the model itself
being number 0. Their Myrtle CNN is a Sequential, so the ReLUs 3, 6, 10, 14 of figure 26a are the paths 2, 5, 9, 13.
Their ResNets keep all blocks in one Sequential and register the shortcut of a block after its second ReLU; here the
blocks are grouped into layer1, layer2, …, of which only the first is counted. ResNet20 then has the numbers 3, 8*, 11,
16*, …, 75 and ResNet18 3, 8*, 11, …, 70*, 73 of the paper, where a star marks a ReLU inside a residual block.
"""

from __future__ import annotations

import re

from torch import nn

_LATER_STAGE = re.compile(r"layer(?!1$)\d+")


def relu_paths(model: nn.Module, kind: type[nn.Module] = nn.ReLU) -> tuple[str, ...]:
    """The module paths of the ReLUs (or of another kind of module), in the order in which the network applies them.

    >>> from intertwine.zoo.networks.registry import build
    >>> relu_paths(build("myrtle"))
    ('2', '5', '9', '13')
    """
    return tuple(path for path, module in model.named_modules() if isinstance(module, kind))


def figure_numbers(model: nn.Module, kind: type[nn.Module] = nn.ReLU) -> dict[str, int]:
    """The path of every ReLU and its number in the figures of Godfrey et al. (2022).

    >>> from intertwine.zoo.networks.registry import build
    >>> figure_numbers(build("myrtle"))
    {'2': 3, '5': 6, '9': 10, '13': 14}
    >>> list(figure_numbers(build("resnet20")).items())[:3]
    [('relu', 3), ('layer1.0.relu1', 8), ('layer1.0.relu2', 11)]
    """
    counted = [(path, module) for path, module in model.named_modules() if not _LATER_STAGE.fullmatch(path)]
    return {path: number for number, (path, module) in enumerate(counted) if isinstance(module, kind)}
