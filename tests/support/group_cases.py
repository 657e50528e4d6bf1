"""Networks with every kind of group that the engine makes, each with inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from networks import Net, parameter
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A network, its inputs, and groups that must be among those of its wires."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    groups: tuple[str, ...]
    continuous: bool = False
    training: bool = False


def rows(width: int = 3) -> tuple[Tensor]:
    return (torch.randn(4, width, dtype=torch.float64),)


def tokens(width: int = 2) -> tuple[Tensor]:
    return (torch.randn(3, 5, width, dtype=torch.float64),)


def image(channels: int = 3) -> tuple[Tensor]:
    return (torch.randn(2, channels, 4, 5, dtype=torch.float64),)


def words() -> tuple[Tensor]:
    return (torch.randint(0, 7, (2, 5)),)


def mlp(activation: Callable[[Tensor], Tensor]) -> Net:
    return Net(lambda m, x: m.b(activation(m.a(x))), a=nn.Linear(3, 5), b=nn.Linear(5, 2))


def normed() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.fc(F.relu(m.bn2(m.conv2(F.relu(m.bn1(m.conv1(x)))))).mean((2, 3)))

    parts = {"conv1": nn.Conv2d(3, 4, 3, padding=1), "bn1": nn.BatchNorm2d(4, eps=0.1), "conv2": nn.Conv2d(4, 6, 3)}
    return Net(forward, **parts, bn2=nn.BatchNorm2d(6), fc=nn.Linear(6, 2))


def grouped() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.c(F.relu(m.b(F.relu(m.a(x))))).mean((2, 3))

    return Net(forward, a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 12, 3, groups=3), c=nn.Conv2d(12, 2, 1))


def group_normed() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.norm(m.a(x)))).mean((2, 3))

    return Net(forward, a=nn.Conv2d(3, 12, 3), norm=nn.GroupNorm(3, 12), b=nn.Conv2d(12, 2, 1))


def fused_attention(m: Net, x: Tensor) -> Tensor:
    q, k, v = m.qkv(m.stem(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    return m.head(m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def attention() -> Net:
    parts = {"stem": nn.Linear(2, 6), "qkv": nn.Linear(6, 24), "out": nn.Linear(8, 6), "head": nn.Linear(6, 2)}
    return Net(fused_attention, **parts)


def grouped_query() -> Net:
    """3 key heads of 2 dimensions, each read by 2 query heads."""

    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 2)).transpose(1, 2) for p in (m.q, m.k, m.v))
        return m.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

    return Net(forward, q=nn.Linear(2, 12), k=nn.Linear(2, 6), v=nn.Linear(2, 6), o=nn.Linear(12, 2))


def flattened() -> Net:
    return Net(lambda m, x: m.fc(F.relu(m.conv(x)).flatten(1)), conv=nn.Conv2d(3, 5, 3), fc=nn.Linear(30, 2))


def dense() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.a(x))
        x = torch.cat([x, F.relu(m.b(x))], 1)
        x = torch.cat([x, F.relu(m.c(x))], 1)
        return m.head(F.relu(m.norm(x)).mean((2, 3)))

    convolutions = {"a": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(4, 3, 1), "c": nn.Conv2d(7, 2, 1)}
    return Net(forward, **convolutions, norm=nn.BatchNorm2d(9), head=nn.Linear(9, 2))


def padded() -> Net:
    """A shortcut that drops every second pixel and pads the missing channels with zeros."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.b(F.relu(m.a(x)))
        return m.head(F.relu(y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))).mean((2, 3)))

    strided = nn.Conv2d(4, 5, 3, stride=2, padding=1)
    return Net(forward, stem=nn.Conv2d(3, 4, 1), a=strided, b=nn.Conv2d(5, 7, 1), head=nn.Linear(7, 2))


def gated() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        gate, value = m.up(x).chunk(2, -1)
        return m.down(F.silu(gate) * value)

    return Net(forward, up=nn.Linear(3, 10), down=nn.Linear(5, 2))


def recurrent(layer: nn.RNNBase) -> Net:
    return Net(lambda m, x: m.head(m.layer(x)[0]), layer=layer, head=nn.Linear(layer.hidden_size, 2))


def tied() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.embed(x)
        return m.out(x + m.down(F.relu(m.up(m.norm(x)))))

    inner = {"norm": nn.LayerNorm(6), "up": nn.Linear(6, 8), "down": nn.Linear(8, 6)}
    net = Net(forward, **inner, embed=nn.Embedding(7, 6), out=nn.Linear(6, 7, bias=False))
    net.out.weight = net.embed.weight
    return net


def pinned() -> Net:
    """A running sum keeps the hidden units in order; a gain in front of it can still trade its scales."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head((m.a(x) * m.gain).cumsum(-1))

    return Net(forward, a=nn.Linear(3, 5), gain=parameter(5), head=nn.Linear(5, 2))


def rms_normed() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.down(F.silu(m.up(m.norm(x))))
        return m.head(m.last(x))

    sides = {"stem": nn.Linear(2, 6), "norm": nn.RMSNorm(6), "last": nn.RMSNorm(6), "head": nn.Linear(6, 2)}
    return Net(forward, **sides, up=nn.Linear(6, 5), down=nn.Linear(5, 6))


def experts() -> Net:
    """Every expert has hidden units of its own: two levels, the inner with a scale."""

    def forward(m: Net, x: Tensor) -> Tensor:
        weight = m.router(x).softmax(-1)
        hidden = F.relu(torch.einsum("bd,edh->beh", x, m.up))
        return torch.einsum("beh,eho,be->bo", hidden, m.down, weight)

    return Net(forward, router=nn.Linear(3, 4), up=parameter(4, 3, 5), down=parameter(4, 5, 2))


def nested() -> Net:
    """Units in heads in experts: wreath products of three floors."""

    def forward(m: Net, x: Tensor) -> Tensor:
        hidden = F.relu(torch.einsum("bd,ehdk->behk", x, m.up))
        heads = torch.tanh(torch.einsum("behk,ehko->beho", hidden, m.middle))
        return m.head(F.relu(torch.einsum("beho,ehoc->bec", heads, m.down)).sum(1))

    weights = {"up": parameter(3, 2, 3, 5), "middle": parameter(3, 2, 5, 4), "down": parameter(3, 2, 4, 6)}
    return Net(forward, **weights, head=nn.Linear(6, 2))


CASES = {
    "permutations": Case(lambda: mlp(F.gelu), rows, ("S_5",)),
    "positive scales": Case(lambda: mlp(F.relu), rows, ("S_5 ⋉ (R₊)^5",)),
    "signs": Case(lambda: mlp(torch.tanh), rows, ("S_5 ⋉ {±1}^5",)),
    "nonzero |x|": Case(lambda: mlp(torch.abs), rows, ("S_5 ⋉ (R*)^5",)),
    "nonzero x²": Case(lambda: mlp(lambda x: x**2), rows, ("S_5 ⋉ (R*)^5",)),
    "nonzero x³": Case(lambda: mlp(lambda x: x**3), rows, ("S_5 ⋉ (R*)^5",)),
    "two scales and eps": Case(normed, image, ("S_4 ⋉ (R*)^4 ⋉ (R₊)^4", "S_6 ⋉ (R*)^6 ⋉ (R₊)^6")),
    "training mode": Case(normed, image, ("S_4 ⋉ (R*)^4", "S_6 ⋉ (R*)^6"), training=True),
    "grouped convolution": Case(grouped, image, ("S_3", "(S_2 ⋉ (R₊)^2)³", "(S_4 ⋉ (R₊)^4)³")),
    "group norm": Case(group_normed, image, ("S_3 ⋉ {±1}^3", "(S_4 ⋉ {±1}^4)³")),
    "fused attention": Case(attention, tokens, ("S_2", "(S_4 ⋉ (R*)^4)²", "S_6 ⋉ (R*)^6")),
    "grouped queries": Case(grouped_query, tokens, ("S_3", "(S_2)³", "(S_2 ⋉ (R*)^2)³")),
    "flatten": Case(flattened, image, ("S_5 ⋉ (R₊)^5",)),
    "concatenation": Case(dense, image, ("S_4 ⋉ (R₊)^2·4", "S_3 ⋉ (R₊)^2·3", "S_2 ⋉ (R₊)^2·2")),
    "padded shortcut": Case(padded, image, ("S_4 ⋉ (R₊)^4", "(R₊)^1", "S_2 ⋉ (R₊)^2")),
    "gated unit": Case(gated, rows, ("S_5 ⋉ (R*)^5",)),
    "GRU": Case(lambda: recurrent(nn.GRU(2, 5, batch_first=True)), tokens, ("S_5 ⋉ {±1}^5",)),
    "LSTM": Case(lambda: recurrent(nn.LSTM(2, 4, 2, batch_first=True)), tokens, ("S_4 ⋉ {±1}^4",)),
    "tied embedding": Case(tied, words, ("S_6 ⋉ (R*)^6", "S_8 ⋉ (R₊)^8")),
    "scales alone": Case(pinned, rows, ("(R*)^5",)),
    "RMS norm": Case(rms_normed, tokens, ("S_6 ⋉ (R*)^2·6 ⋉ {±1}^6", "S_5")),
    "experts": Case(experts, rows, ("S_4", "(S_5 ⋉ (R₊)^5)⁴")),
    "three floors": Case(nested, rows, ("S_3", "(S_2)³", "(S_5 ⋉ (R₊)^5)⁶", "(S_4 ⋉ {±1}^4)⁶")),
    "GL per head": Case(attention, tokens, ("S_2", "(GL(4))²", "GL(6)"), continuous=True),
    "GL of grouped queries": Case(grouped_query, tokens, ("(S_2)³", "(GL(2))³"), continuous=True),
    "O of a residual stream": Case(rms_normed, tokens, ("O(6)", "S_5"), continuous=True),
    "nothing": Case(lambda: nn.Linear(3, 2), rows, ()),
}
