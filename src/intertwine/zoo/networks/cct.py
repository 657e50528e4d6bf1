"""The compact convolutional transformer CCT-6/3×1 (Hassani et al. 2021), without drop-path and without dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.attention import Attention
from intertwine.zoo.networks.options import positive
from intertwine.zoo.networks.traced import Traced

STD = 0.02


class Encoder(nn.Module):
    """A block of the published network: unlike in a pre-norm block, `norm1` acts on the stream of features itself."""

    def __init__(self, dim: int, heads: int, hidden: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, bias=False)
        self.norm1 = nn.LayerNorm(dim)
        self.linear1 = nn.Linear(dim, hidden)
        self.act = act()
        self.linear2 = nn.Linear(hidden, dim)

    def forward(self, x: Traced) -> Traced:
        x = self.norm1(x + self.attention(self.pre_norm(x)))
        return x + self.linear2(self.act(self.linear1(x)))


class CCT(nn.Module):
    """A convolution makes the tokens, encoders follow, and `pool` learns how much each token counts in the result."""

    def __init__(self, in_channels: int, tokens: int, dim: int, blocks: list[Encoder], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, dim, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        # Saved with the weights: a symmetry that reorders the features must reorder these as well.
        self.register_buffer("positions", sine_positions(tokens, dim))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(dim)
        self.pool = nn.Linear(dim, 1)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x: Traced) -> Traced:
        x = self.maxpool(self.relu(self.conv(x))).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x + self.positions))
        share = torch.softmax(self.pool(x), 1).transpose(1, 2)
        return self.fc((share @ x).flatten(1))


def sine_positions(tokens: int, dim: int) -> Tensor:
    """Sinusoids of falling frequency: sine in the even features, cosine in the odd ones.

    >>> sine_positions(2, 4)
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """
    place = torch.arange(tokens, dtype=torch.float64)[:, None]
    rate = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    waves = torch.stack((torch.sin(place * rate), torch.cos(place * rate)), 2)
    return waves.flatten(1)[None].float()


def cct(
    dim: int = 256,
    depth: int = 6,
    heads: int = 4,
    mlp_ratio: int = 2,
    side: int = 32,
    in_channels: int = 3,
    classes: int = 10,
    activation: Activation = "gelu",
) -> CCT:
    """The CCT that Godfrey et al. (2022) stitch: cct_6 with sine positions; as it stands, 3,168,267 parameters.

    Initialised as its published code does: linear weights normal with 0.02, cut off at ±2, biases zero, the convolution
    Kaiming normal. The attention dropout of the published recipe (0.1) is left out, like its drop-path.

    Args:
        dim, depth, heads: width of the tokens, number of encoders, attention heads of each.
        mlp_ratio: the hidden layer of an encoder has mlp_ratio × dim units.
        side: the images are side × side.
        in_channels, classes: of the images, and of the logits.
        activation: of the encoders: a name such as "gelu", or a function that returns a module. The tokenizer has a
            ReLU.

    >>> cct(dim=16, depth=1, heads=2)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    positive(
        dim=dim, depth=depth, heads=heads, mlp_ratio=mlp_ratio, side=side, in_channels=in_channels, classes=classes
    )
    if dim % 2:
        raise InputError(
            f"dim={dim} was asked for, but sine positions come in pairs of a sine and a cosine. Give an even dim."
        )
    act = maker(activation)
    blocks = [Encoder(dim, heads, mlp_ratio * dim, act) for _ in range(depth)]
    model = CCT(in_channels, ((side + 1) // 2) ** 2, dim, blocks, classes)
    model.apply(_initialise)
    return model


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
