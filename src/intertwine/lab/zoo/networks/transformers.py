"""Transformers: self-attention and the pre-norm block, and the ViT, GPT and CCT built from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.lab.zoo.networks.options import Activation, Traced, maker, one_of, positive

#: Norm layers by name. An RMS norm commutes with rotations, so a residual stream read through it may be rotated.
NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
#: Standard deviation of new embeddings, positions and class tokens, as in the code of the papers.
INIT_STD = 0.02
VOCAB, CONTEXT = 256, 64


class Attention(nn.Module):
    """Multi-head self-attention over (batch, tokens, dim); `qkv` holds the queries, keys and values of all heads.

    >>> import torch
    >>> Attention(8, heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, dim: int, heads: int, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        if dim % heads:
            raise InputError(f"dim must be a multiple of heads, but they are dim={dim}, heads={heads}.")
        self.heads, self.size, self.causal = heads, dim // heads, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Traced) -> Traced:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        return self.proj(out.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
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


class ViT(nn.Module):
    """Patches as tokens plus learned positions, pre-norm blocks, and a linear `head` on one pooled vector."""

    def __init__(
        self, embed: nn.Conv2d, tokens: int, blocks: list[TransformerBlock], norm: str, pool: str, classes: int
    ) -> None:
        super().__init__()
        dim = embed.out_channels
        self.pool = pool
        self.embed = embed
        if pool == "token":
            self.token = nn.Parameter(torch.randn(1, 1, dim) * INIT_STD)
            tokens += 1
        self.positions = nn.Parameter(torch.randn(1, tokens, dim) * INIT_STD)
        self.blocks = nn.Sequential(*blocks)
        self.norm = NORMS[norm](dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Traced) -> Traced:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.pool == "token":
            x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1)
        x = self.norm(self.blocks(x + self.positions))
        return self.head(x[:, 0] if self.pool == "token" else x.mean(1))


def vit(
    dim: int = 192, depth: int = 6, heads: int = 3, patch: int = 4, side: int = 32, mlp_ratio: int = 4,
    pool: str = "token", in_channels: int = 3, classes: int = 10, activation: Activation = "gelu", norm: str = "layer",
) -> ViT:  # fmt: skip
    """A small vision transformer (Dosovitskiy et al. 2021) without dropout.

    Initialised as in torch, positions and class token normal with 0.02.

    Args:
        dim, depth, heads: width of the tokens, number of blocks, attention heads of each.
        patch, side: the images are side × side, in patches of patch × patch.
        mlp_ratio: the hidden layer of a block has mlp_ratio × dim units.
        pool: the head reads the class token ("token") or the average of all tokens ("mean").
        in_channels, classes: of the images, and of the logits.
        activation: a name such as "gelu", or a function that returns a module.
        norm: "layer" or "rms"; through RMS norms tokens may be rotated (`symmetry(..., continuous=True)`).

    >>> vit(dim=32, depth=1, heads=2)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    one_of("pool", pool, ("token", "mean"))
    one_of("norm", norm, tuple(NORMS))
    positive(dim=dim, depth=depth, heads=heads, patch=patch, side=side, mlp_ratio=mlp_ratio)
    positive(in_channels=in_channels, classes=classes)
    if side % patch:
        raise InputError(f"side must be a multiple of patch, but they are side={side}, patch={patch}.")
    act = maker(activation)
    blocks = [TransformerBlock(dim, heads, mlp_ratio * dim, act, norm=norm) for _ in range(depth)]
    return ViT(nn.Conv2d(in_channels, dim, patch, patch), (side // patch) ** 2, blocks, norm, pool, classes)


class GPT(nn.Module):
    """Token embeddings plus learned positions, causal pre-norm blocks, a final norm and the `head`."""

    def __init__(
        self, vocab: int, context: int, dim: int, blocks: list[TransformerBlock], norm: str, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(torch.randn(context, dim) * INIT_STD)
        self.blocks = nn.Sequential(*blocks)
        self.norm = NORMS[norm](dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=INIT_STD)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Traced) -> Traced:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def gpt(
    vocab: int = VOCAB, context: int = CONTEXT, dim: int = 128, depth: int = 4, heads: int = 4, mlp_ratio: int = 4,
    tied: bool = True, activation: Activation = "gelu", norm: str = "layer",
) -> GPT:  # fmt: skip
    """A small GPT-style language model (Radford et al. 2019) without dropout: a row of logits per token.

    Initialised as in torch, embeddings and positions normal with 0.02.

    Args:
        vocab, context: number of token ids, and the largest number of tokens in a text.
        dim, depth, heads: width of the tokens, number of blocks, attention heads of each.
        mlp_ratio: the hidden layer of a block has mlp_ratio × dim units.
        tied: whether the head shares its weight with the token embeddings.
        activation: a name such as "gelu", or a function that returns a module.
        norm: "layer" or "rms". Through RMS norms the tokens may be rotated (`symmetry(..., continuous=True)`) unless
            the head is tied: the weight of the final norm can be folded only into a separate head.

    >>> gpt(vocab=11, context=8, dim=16, depth=1, heads=2)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """
    positive(vocab=vocab, context=context, dim=dim, depth=depth, heads=heads, mlp_ratio=mlp_ratio)
    one_of("norm", norm, tuple(NORMS))
    act = maker(activation)
    blocks = [TransformerBlock(dim, heads, mlp_ratio * dim, act, causal=True, norm=norm) for _ in range(depth)]
    return GPT(vocab, context, dim, blocks, norm, tied)


class CCTEncoder(nn.Module):
    """A block of the published network: unlike in a pre-norm block, `norm1` acts on the residual stream itself."""

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
    """A convolution makes the tokens, encoders follow, and `pool` weights the tokens for the linear layer `fc`."""

    def __init__(self, in_channels: int, tokens: int, dim: int, blocks: list[CCTEncoder], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, dim, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        # a buffer in the state dict: a permutation of the features also permutes it
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
    dim: int = 256, depth: int = 6, heads: int = 4, mlp_ratio: int = 2, side: int = 32, in_channels: int = 3,
    classes: int = 10, activation: Activation = "gelu",
) -> CCT:  # fmt: skip
    """The compact convolutional transformer CCT-6/3×1 (Hassani et al. 2021) that Godfrey et al. (2022) stitch.

    By default it has sine positions and 3,168,267 parameters. Initialised as its published code: linear weights normal
    with 0.02, truncated at ±2, biases zero, the convolution Kaiming normal. The published recipe's attention dropout
    (0.1) and drop-path are left out.

    Args:
        dim, depth, heads: width of the tokens, number of encoders, attention heads of each.
        mlp_ratio: the hidden layer of an encoder has mlp_ratio × dim units.
        side: the images are side × side.
        in_channels, classes: of the images, and of the logits.
        activation: of the encoders; the tokenizer has a ReLU. A name such as "gelu", or a function of a module.

    >>> cct(dim=16, depth=1, heads=2)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    positive(dim=dim, depth=depth, heads=heads, mlp_ratio=mlp_ratio, side=side)
    positive(in_channels=in_channels, classes=classes)
    if dim % 2:
        raise InputError(f"dim must be even for sine positions, but is {dim}.")
    act = maker(activation)
    blocks = [CCTEncoder(dim, heads, mlp_ratio * dim, act) for _ in range(depth)]
    model = CCT(in_channels, ((side + 1) // 2) ** 2, dim, blocks, classes)
    model.apply(_initialise)
    return model


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
