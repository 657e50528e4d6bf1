"""A small vision transformer (Dosovitskiy et al. 2021) for 32 × 32 images."""

from __future__ import annotations

import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.attention import NORMS, Block
from intertwine.zoo.networks.options import one_of, positive
from intertwine.zoo.networks.traced import Traced

STD = 0.02  # of the learned positions and of the class token, as in the paper's code


class ViT(nn.Module):
    """Patches become tokens, learned positions are added, pre-norm blocks follow, and one vector is read by `head`."""

    def __init__(self, embed: nn.Conv2d, tokens: int, blocks: list[Block], norm: str, pool: str, classes: int) -> None:
        super().__init__()
        dim = embed.out_channels
        self.pool = pool
        self.embed = embed
        extra = 1 if pool == "token" else 0
        if extra:
            self.token = nn.Parameter(torch.randn(1, 1, dim) * STD)
        self.positions = nn.Parameter(torch.randn(1, tokens + extra, dim) * STD)
        self.blocks = nn.Sequential(*blocks)
        self.norm = NORMS[norm](dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Traced) -> Traced:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.pool == "token":  # a choice made when the network was built, not one that depends on the images
            x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1)
        x = self.norm(self.blocks(x + self.positions))
        return self.head(x[:, 0] if self.pool == "token" else x.mean(1))


def vit(
    dim: int = 192,
    depth: int = 6,
    heads: int = 3,
    patch: int = 4,
    side: int = 32,
    mlp_ratio: int = 4,
    pool: str = "token",
    in_channels: int = 3,
    classes: int = 10,
    activation: Activation = "gelu",
    norm: str = "layer",
) -> ViT:
    """A vision transformer without dropout. Initialised as torch does, positions and class token normal with 0.02.

    Args:
        dim, depth, heads: width of the tokens, number of blocks, attention heads of each.
        patch, side: the images are side × side, cut into squares of patch × patch.
        mlp_ratio: the hidden layer of a block has mlp_ratio × dim units.
        pool: "token", the class token is read; "mean", the average of all tokens.
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "gelu", or a function that returns a module.
        norm: "layer" or "rms"; through RMS norms the tokens may be rotated (`symmetry(..., continuous=True)`).

    >>> vit(dim=32, depth=1, heads=2)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    one_of("pool", pool, ("token", "mean"))
    one_of("norm", norm, tuple(NORMS))
    positive(dim=dim, depth=depth, heads=heads, patch=patch, side=side, mlp_ratio=mlp_ratio)
    positive(in_channels=in_channels, classes=classes)
    if side % patch:
        raise InputError(
            f"side={side} and patch={patch} were asked for, but the patches must tile the image. Give a patch that "
            f"divides {side}."
        )
    act = maker(activation)
    blocks = [Block(dim, heads, mlp_ratio * dim, act, norm=norm) for _ in range(depth)]
    return ViT(nn.Conv2d(in_channels, dim, patch, patch), (side // patch) ** 2, blocks, norm, pool, classes)
