"""Self-attention and the pre-norm block around it, as the ViT and the GPT use them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

from intertwine.errors import InputError
from intertwine.zoo.networks.traced import Traced

#: Norm layers by name. Only lengths pass an RMS norm, so a residual stream read through them may be rotated.
NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Attention(nn.Module):
    """Multi-head self-attention over (batch, tokens, dim); `qkv` holds the queries, keys and values of all heads.

    >>> import torch
    >>> Attention(8, heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, dim: int, heads: int, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        if dim % heads:
            raise InputError(
                f"dim={dim} and heads={heads} were asked for, but the heads share the dimensions evenly. Give a dim "
                f"that is a multiple of {heads}."
            )
        self.heads, self.size, self.causal = heads, dim // heads, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Traced) -> Traced:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(
        self, dim: int, heads: int, hidden: int, act: Callable[[], nn.Module], causal: bool = False, norm: str = "layer"
    ) -> None:
        super().__init__()
        self.norm1 = NORMS[norm](dim)
        self.attention = Attention(dim, heads, causal)
        self.norm2 = NORMS[norm](dim)
        self.linear1 = nn.Linear(dim, hidden)
        self.act = act()
        self.linear2 = nn.Linear(hidden, dim)

    def forward(self, x: Traced) -> Traced:
        x = x + self.attention(self.norm1(x))
        return x + self.linear2(self.act(self.linear1(self.norm2(x))))
