"""VGG networks for small images (Simonyan and Zisserman 2015): 3×3 convolutions in five stages, then a classifier."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.options import one_of, positive, scaled

#: Depth → how many convolutions each stage has.
STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (64, 128, 256, 512, 512)
HIDDEN = 4096


def vgg(
    depth: int = 16,
    norm: bool = False,
    classifier: str = "linear",
    width: int | float = 1,
    hidden: int = HIDDEN,
    dropout: float = 0.5,
    in_channels: int = 3,
    classes: int = 10,
    activation: Activation = "relu",
) -> nn.Sequential:
    """A VGG for 32 × 32 images: `features`, a Sequential of convolutions, and `classifier`. Initialised as torch does.

    Args:
        depth: 11, 13, 16 or 19.
        norm: BatchNorm between each convolution and its activation.
        classifier: "linear", one layer (Chen et al. 2024); "mlp", two hidden layers with dropout (Zhou et al. 2023).
        width: multiplies the channels of every convolution.
        hidden, dropout: of the classifier "mlp"; dropout acts in training mode alone.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "relu" or "leaky_relu:0.1", or a function that returns a module.

    >>> sum(p.numel() for p in vgg(16, norm=True).parameters())
    14728266
    """
    one_of("depth", depth, STAGES)
    one_of("classifier", classifier, ("linear", "mlp"))
    positive(hidden=hidden, in_channels=in_channels, classes=classes)
    last = scaled(WIDTHS[-1], width)
    head = nn.Linear(last, classes) if classifier == "linear" else _mlp(last, hidden, classes, dropout, activation)
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        features=_features(STAGES[depth], norm, width, in_channels, activation), flatten=nn.Flatten(), classifier=head
    )
    return nn.Sequential(parts)


def _features(
    stages: tuple[int, ...], norm: bool, width: int | float, inputs: int, activation: Activation
) -> nn.Sequential:
    act = maker(activation)
    layers: list[nn.Module] = []
    for count, base in zip(stages, WIDTHS, strict=True):
        outputs = scaled(base, width)
        for _ in range(count):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            layers += [nn.BatchNorm2d(outputs), act()] if norm else [act()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _mlp(inputs: int, hidden: int, classes: int, dropout: float, activation: Activation) -> nn.Sequential:
    act = maker(activation)
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), act(), nn.Dropout(dropout)),
        *(nn.Linear(hidden, hidden), act(), nn.Dropout(dropout)),
        nn.Linear(hidden, classes),
    )
