"""A small GPT-style language model (Radford et al. 2019): token ids in, a row of logits per token out."""

from __future__ import annotations

import torch
from torch import nn

from intertwine.zoo.networks.activations import Activation, maker
from intertwine.zoo.networks.attention import NORMS, Block
from intertwine.zoo.networks.options import one_of, positive
from intertwine.zoo.networks.traced import Traced

STD = 0.02  # of the embeddings, as in GPT-2: torch's own 1.0 would make the first logits of a tied head enormous
VOCAB, CONTEXT = 256, 64


class GPT(nn.Module):
    """Token embeddings plus learned positions, causal pre-norm blocks, a last norm and the `head`."""

    def __init__(self, vocab: int, context: int, dim: int, blocks: list[Block], norm: str, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.randn(context, dim) * STD)
        self.blocks = nn.Sequential(*blocks)
        self.norm = NORMS[norm](dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=STD)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Traced) -> Traced:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def gpt(
    vocab: int = VOCAB,
    context: int = CONTEXT,
    dim: int = 128,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: int = 4,
    tied: bool = True,
    activation: Activation = "gelu",
    norm: str = "layer",
) -> GPT:
    """A decoder without dropout. Initialised as torch does, embeddings and positions normal with 0.02.

    Args:
        vocab, context: ids run below vocab; a text is at most context tokens long.
        dim, depth, heads: width of the tokens, number of blocks, attention heads of each.
        mlp_ratio: the hidden layer of a block has mlp_ratio × dim units.
        tied: whether the head shares its weight with the token embeddings.
        activation: a name such as "gelu", or a function that returns a module.
        norm: "layer" or "rms". Through RMS norms the tokens may be rotated (`symmetry(..., continuous=True)`), if the
            head is not tied: the weight of the last norm can be folded only into a head of its own.

    >>> gpt(vocab=11, context=8, dim=16, depth=1, heads=2)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """
    positive(vocab=vocab, context=context, dim=dim, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
    one_of("norm", norm, tuple(NORMS))
    act = maker(activation)
    blocks = [Block(dim, heads, mlp_ratio * dim, act, causal=True, norm=norm) for _ in range(depth)]
    return GPT(vocab, context, dim, blocks, norm, tied)
