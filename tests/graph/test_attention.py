"""Transformers: heads, grouped heads, rotary positions, relative tables, windows, and the norms around them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import (
    Net,
    certified,
    edited,
    element,
    gap,
    moved_by,
    parameter,
    permutation,
    prove,
    reasons,
    same_weights,
    wire_at,
)
from torch import Tensor, nn

import intertwine as it

HEADS, DIM, WIDTH = 3, 5, 7  # heads, dimensions of a head, width of the stream
INNER = HEADS * DIM


def tokens(width: int = 2, count: int = 11) -> Tensor:
    return torch.randn(2, count, width)


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    """(batch, token, head · dim) → (batch, head, token, dim)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def places(text: str, *names: str) -> str:
    """`text` with each name put in: places('{}.weight[0], {}.bias[0]', 'q', 'k')."""
    return ", ".join(text.replace("{}", name) for name in names)


def projections(width: int = WIDTH, kv: int = HEADS) -> dict[str, nn.Module]:
    return {
        "q": nn.Linear(width, INNER),
        "k": nn.Linear(width, kv * DIM),
        "v": nn.Linear(width, kv * DIM),
        "o": nn.Linear(INNER, 2),
    }


STREAM = f"S_{WIDTH} ⋉ (R*)^{WIDTH} on stem.weight[0], stem.bias[0], q.weight[1], k.weight[1], v.weight[1]"
ATTENTION = [
    STREAM,
    f"S_3 on {places('{}.weight[0 ×5], {}.bias[0 ×5]', 'q', 'k', 'v')}, o.weight[1 ×5]",
    f"(S_5 ⋉ (R*)^5)³ on {places('{}.weight[0], {}.bias[0]', 'q', 'k')}",
    "(S_5 ⋉ (R*)^5)³ on v.weight[0], v.bias[0], o.weight[1]",
]


def attention(causal: bool = False, mask: bool = False, by_hand: bool = False) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        q, k, v = heads(m.q(x)), heads(m.k(x)), heads(m.v(x))
        if by_hand:
            return m.o(merged((q @ k.mT / DIM**0.5).softmax(-1) @ v))
        only = torch.ones(11, 11, dtype=torch.bool).tril() if mask else None
        return m.o(merged(F.scaled_dot_product_attention(q, k, v, only, is_causal=causal)))

    return Net(forward, stem=nn.Linear(2, WIDTH), **projections())


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}, {"by_hand": True}], ids=str)
def test_scaled_dot_product_attention(options: dict[str, bool]) -> None:
    prove(attention(**options), tokens(), wires=ATTENTION)


def test_scaled_dot_product_attention_moved_by_hand() -> None:
    net, x = attention().double(), tokens().double()
    sym = prove(net, x, wires=ATTENTION)
    order, inside = torch.tensor([2, 0, 1]), permutation(DIM, HEADS)
    rows = torch.arange(INNER).reshape(HEADS, DIM)
    swap, within = rows[order].flatten(), rows.gather(1, inside).flatten()

    both = {f"{p}__{t}": lambda w: w[swap] for p in "qkv" for t in ("weight", "bias")}
    by_hand = edited(net, **both, o__weight=lambda w: w[:, swap])
    assert same_weights(sym.act(element(sym, "o.weight[1 ×5]", permutation=order), net), by_hand)
    queries = {f"{p}__{t}": lambda w: w[within] for p in "qk" for t in ("weight", "bias")}
    by_hand = edited(net, **queries)
    assert same_weights(sym.act(element(sym, "q.bias[0]", permutation=inside), net), by_hand)
    assert gap(net, by_hand, x) < 1e-12


def test_across_heads_is_no_symmetry() -> None:
    net, x = attention().double(), tokens().double()
    across = torch.arange(INNER).roll(1)  # the last dimension of each head becomes the first of the next
    wrong = {f"{p}__{t}": lambda w: w[across] for p in "qkv" for t in ("weight", "bias")}
    assert gap(net, edited(net, **wrong, o__weight=lambda w: w[:, across]), x) > 1e-3


def test_fused_qkv() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = m.qkv(m.stem(x)).reshape(b, n, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, INNER))

    net = Net(forward, stem=nn.Linear(2, WIDTH), qkv=nn.Linear(WIDTH, 3 * INNER), o=nn.Linear(INNER, 2)).double()
    x = tokens().double()
    stacked = [f"qkv.{t}[0{begin} ×5]" for t in ("weight", "bias") for begin in ("", " +15", " +30")]
    sym = prove(
        net,
        x,
        wires=[
            "S_7 ⋉ (R*)^7 on stem.weight[0], stem.bias[0], qkv.weight[1]",
            f"S_3 on {', '.join(stacked)}, o.weight[1 ×5]",
            "(S_5 ⋉ (R*)^5)³ on qkv.weight[0], qkv.bias[0], qkv.weight[0 +15], qkv.bias[0 +15]",
            "(S_5 ⋉ (R*)^5)³ on qkv.weight[0 +30], qkv.bias[0 +30], o.weight[1]",
        ],
    )
    order = torch.tensor([1, 2, 0])
    rows = torch.arange(45).reshape(3, HEADS, DIM)[:, order].flatten()
    columns = rows[:INNER]
    by_hand = edited(net, qkv__weight=lambda w: w[rows], qkv__bias=lambda b: b[rows], o__weight=lambda w: w[:, columns])
    assert same_weights(sym.act(element(sym, "o.weight[1 ×5]", permutation=order), net), by_hand)


def packed(prefix: str) -> list[str]:
    """The wires inside an `nn.MultiheadAttention` of 3 heads × 5."""
    thirds = [f"{prefix}in_proj_{t}[0{begin} ×5]" for t in ("weight", "bias") for begin in ("", " +15", " +30")]
    w, b, o = f"{prefix}in_proj_weight", f"{prefix}in_proj_bias", f"{prefix}out_proj.weight"
    return [
        f"S_3 on {', '.join(thirds)}, {o}[1 ×5]",
        f"(S_5 ⋉ (R*)^5)³ on {w}[0], {b}[0], {w}[0 +15], {b}[0 +15]",
        f"(S_5 ⋉ (R*)^5)³ on {w}[0 +30], {b}[0 +30], {o}[1]",
    ]


def test_multihead_attention() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(m.mha(x, x, x, need_weights=False)[0])

    mha = nn.MultiheadAttention(INNER, HEADS, batch_first=True)
    net = Net(forward, stem=nn.Linear(2, INNER), mha=mha, head=nn.Linear(INNER, 4))
    prove(
        net,
        tokens(),
        wires=[
            "S_15 ⋉ (R*)^15 on stem.weight[0], stem.bias[0], mha.in_proj_weight[1]",
            "S_15 ⋉ (R*)^15 on mha.out_proj.weight[0], mha.out_proj.bias[0], head.weight[1]",
            *packed("mha."),
        ],
    )


def test_multihead_attention_with_padding() -> None:
    def forward(m: Net, x: Tensor, padding: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(m.mha(x, x, x, key_padding_mask=padding, need_weights=False)[0])

    mha = nn.MultiheadAttention(INNER, HEADS, batch_first=True)
    net = Net(forward, stem=nn.Linear(2, INNER), mha=mha, head=nn.Linear(INNER, 4))
    padding = torch.arange(11) >= torch.tensor([[9], [11]])
    # the mask is the same for every head, so the heads may still change places
    prove(
        net,
        tokens(),
        padding,
        wires=[
            "S_15 ⋉ (R*)^15 on stem.weight[0], stem.bias[0], mha.in_proj_weight[1]",
            "S_15 ⋉ (R*)^15 on mha.out_proj.weight[0], mha.out_proj.bias[0], head.weight[1]",
            *packed("mha."),
        ],
    )


def test_multihead_attention_that_returns_its_weights() -> None:
    def forward(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = m.mha(m.stem(x), m.stem(x), m.stem(x), average_attn_weights=False)
        return m.head(y), weights

    mha = nn.MultiheadAttention(INNER, HEADS, batch_first=True)
    net = Net(forward, stem=nn.Linear(2, INNER), mha=mha, head=nn.Linear(INNER, 4))
    # the heads stand in the output now, so they keep their places; their dimensions do not
    prove(
        net,
        tokens(),
        wires=[
            "S_15 ⋉ (R*)^15 on stem.weight[0], stem.bias[0], mha.in_proj_weight[1]",
            "S_15 ⋉ (R*)^15 on mha.out_proj.weight[0], mha.out_proj.bias[0], head.weight[1]",
            *packed("mha.")[1:],
        ],
    )


@pytest.mark.parametrize(("activation", "inner"), [("relu", "S_4 ⋉ (R₊)^4"), ("gelu", "S_4")])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(activation: str, inner: str, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(INNER, HEADS, 4, 0.0, activation, batch_first=True, norm_first=norm_first)
    net = Net(lambda m, x: m.head(m.layer(m.stem(x))), stem=nn.Linear(2, INNER), layer=layer, head=nn.Linear(INNER, 6))
    stream = (
        "stem.weight[0], stem.bias[0], layer.self_attn.in_proj_weight[1], layer.self_attn.out_proj.weight[0], "
        "layer.self_attn.out_proj.bias[0], layer.linear1.weight[1], layer.linear2.weight[0], layer.linear2.bias[0], "
        f"{places('layer.{}.weight[0], layer.{}.bias[0]', 'norm1', 'norm2')}, head.weight[1]"
    )
    # factors live between a norm's weight and its readers: behind the last norm, or in front of both branches
    factors = "(R*)^2·15" if norm_first else "(R*)^15"
    prove(
        net.eval(),
        tokens(),
        wires=[
            f"S_15 ⋉ {factors} on {stream}",
            f"{inner} on layer.linear1.weight[0], layer.linear1.bias[0], layer.linear2.weight[1]",
            *packed("layer.self_attn."),
        ],
    )


def grouped(how: str) -> Net:
    """3 key heads, each read by 2 query heads, of dimension 5."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        q, k, v = heads(m.q(x), 6), heads(m.k(x)), heads(m.v(x))
        if how == "repeat_interleave":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        elif how == "expand":
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for t in (k, v))
        return m.o(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=how == "enable_gqa")))

    stem, q, o = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 30), nn.Linear(30, 4)
    return Net(forward, stem=stem, q=q, k=nn.Linear(WIDTH, 15), v=nn.Linear(WIDTH, 15), o=o)


GROUPED = [
    STREAM,
    f"S_3 on {places('{}.weight[0 ×5], {}.bias[0 ×5]', 'k', 'v')}, q.weight[0 ×10], q.bias[0 ×10], o.weight[1 ×10]",
    "(S_2)³ on q.weight[0 ×5], q.bias[0 ×5], o.weight[1 ×5]",
    f"(S_5 ⋉ (R*)^5)³ on {places('{}.weight[0], {}.bias[0]', 'q', 'k')}",
    "(S_5 ⋉ (R*)^5)³ on v.weight[0], v.bias[0], o.weight[1]",
]


@pytest.mark.parametrize("how", ["enable_gqa", "repeat_interleave", "expand"])
def test_grouped_query_attention(how: str) -> None:
    prove(grouped(how), tokens(), wires=GROUPED)


def test_grouped_query_attention_moved_by_hand() -> None:
    net, x = grouped("enable_gqa").double(), tokens().double()
    sym = prove(net, x, wires=GROUPED)
    order = torch.tensor([[1, 0], [0, 1], [1, 0]])  # the query heads of a group, in three groups
    rows = torch.arange(30).reshape(3, 2, 5)
    rows = torch.stack([rows[g, order[g]] for g in range(3)]).flatten()
    by_hand = edited(net, q__weight=lambda w: w[rows], q__bias=lambda b: b[rows], o__weight=lambda w: w[:, rows])
    assert same_weights(sym.act(element(sym, "q.weight[0 ×5]", permutation=order), net), by_hand)
    assert gap(net, by_hand, x) < 1e-12
    # a query head that changes its group reads other keys
    across = torch.arange(30).reshape(6, 5).roll(1, 0).flatten()
    wrong = edited(net, q__weight=lambda w: w[across], q__bias=lambda b: b[across], o__weight=lambda w: w[:, across])
    assert gap(net, wrong, x) > 1e-3


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def rotary(turn: Callable[..., Tensor]) -> Net:
    """2 heads of 3 frequencies, and values of dimension 5."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        angle = torch.arange(11.0, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3, 0.09], dtype=x.dtype)
        q, k = (turn(heads(p(x), 2), angle.cos(), angle.sin()) for p in (m.q, m.k))
        return m.o(merged(F.scaled_dot_product_attention(q, k, heads(m.v(x), 2))))

    stem, q, k = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
    return Net(forward, stem=stem, q=q, k=k, v=nn.Linear(WIDTH, 10), o=nn.Linear(10, 4))


def rotated(frequencies: str) -> list[str]:
    return [
        STREAM,
        f"S_2 on {places('{}.weight[0 ×6], {}.bias[0 ×6]', 'q', 'k')}, v.weight[0 ×5], v.bias[0 ×5], o.weight[1 ×5]",
        f"((R*)^3)² on {frequencies}",
        "(S_5 ⋉ (R*)^5)² on v.weight[0], v.bias[0], o.weight[1]",
    ]


@pytest.mark.parametrize("turn", [half_split, rotate_half])
def test_rotary_positions_half_split(turn: Callable[..., Tensor]) -> None:
    halves = places("{}.weight[0], {}.bias[0], {}.weight[0 +3], {}.bias[0 +3]", "q", "k")
    sym = prove(rotary(turn), tokens(), wires=rotated(halves))
    assert wire_at(sym, "q.weight[0]").pinned, "each frequency turns at its own speed"


def test_rotary_positions_interleaved() -> None:
    pairs = places("{}.weight[0 ×2], {}.bias[0 ×2]", "q", "k")
    prove(rotary(interleaved), tokens(), wires=rotated(pairs))


def test_rotary_positions_as_complex_numbers() -> None:
    def turn(x: Tensor, speeds: Tensor) -> Tensor:
        angle = torch.arange(11.0)[:, None] * speeds
        pairs = torch.view_as_complex(x.unflatten(-1, (3, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def forward(m: Net, x: Tensor) -> Tensor:
        x, speeds = m.stem(x), torch.tensor([1.0, 0.3, 0.09])
        q, k = (turn(heads(p(x), 2), speeds) for p in (m.q, m.k))
        return m.o(merged(F.scaled_dot_product_attention(q, k, heads(m.v(x), 2))))

    net, x = rotary(half_split), tokens()
    net._forward = forward
    # queries and keys may be frozen with a reason; what the turning does not touch stays free
    sym = certified(it.symmetry(net, x), net, x)
    assert str(wire_at(sym, "v.weight[0]").group) == "(S_5 ⋉ (R*)^5)²"
    assert str(wire_at(sym, "v.weight[1]").group) == "S_7 ⋉ (R*)^7"


def test_rotary_frequencies_in_another_order_are_no_symmetry() -> None:
    net = rotary(half_split).double()
    order = torch.tensor([1, 0, 2, 4, 3, 5, 7, 6, 8, 10, 9, 11])  # two frequencies change places in both heads
    wrong = {f"{p}__{t}": lambda w: w[order] for p in "qk" for t in ("weight", "bias")}
    assert gap(net, edited(net, **wrong), tokens().double()) > 1e-4


def test_relative_position_table() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        place = torch.arange(11)
        bias = m.table[place[:, None] - place + 10].permute(2, 0, 1)  # looked up: (token, token, head)
        mask = bias + m.embedded((place[:, None] - place).abs()).permute(2, 0, 1)
        return m.o(merged(F.scaled_dot_product_attention(heads(m.q(x)), heads(m.k(x)), heads(m.v(x)), mask[None])))

    tables = {"table": parameter(21, HEADS), "embedded": nn.Embedding(11, HEADS)}
    net = Net(forward, stem=nn.Linear(2, WIDTH), **projections(), **tables)
    swapped = [ATTENTION[1] + ", table[1], embedded.weight[1]"]
    sym = prove(net, tokens(), wires=[*ATTENTION[:1], *swapped, *ATTENTION[2:]])
    assert "index" in reasons(sym, "embedded.weight")


def test_window_partition_and_roll() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)  # (batch, 4, 6, channels), windows of 2 × 3
        y = x.roll((-1, -1), (1, 2)).reshape(2, 2, 2, 2, 3, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(8, 6, WIDTH)
        y = m.o(merged(F.scaled_dot_product_attention(heads(m.q(y)), heads(m.k(y)), heads(m.v(y)))))
        y = y.reshape(2, 2, 2, 2, 3, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(2, 4, 6, WIDTH).roll((1, 1), (1, 2))
        return m.head(x + y)

    parts = projections() | {"o": nn.Linear(INNER, WIDTH), "head": nn.Linear(WIDTH, 4)}
    net = Net(forward, stem=nn.Linear(2, WIDTH), **parts)
    prove(net, torch.randn(2, 4, 6, 2), wires=[f"{STREAM}, o.weight[0], o.bias[0], head.weight[1]", *ATTENTION[1:]])


# -- Token models around their attention -------------------------------------------------------------------------------


def test_embedding() -> None:
    net = Net(lambda m, x: m.fc(m.table(x)), table=nn.Embedding(11, 5, padding_idx=0), fc=nn.Linear(5, 2))
    sym = prove(net, torch.randint(0, 11, (2, 7)), wires=["S_5 ⋉ (R*)^5 on table.weight[1], fc.weight[1]"])
    assert "looked up by index" in reasons(sym, "table.weight")


def tied() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.table(x)
        return m.head(x + m.b(m.a(x).relu()))

    net = Net(
        forward, table=nn.Embedding(11, 5), a=nn.Linear(5, 7), b=nn.Linear(7, 5), head=nn.Linear(5, 11, bias=False)
    )
    net.head.weight = net.table.weight
    return net.double()


def test_tied_embedding_and_output() -> None:
    net, x = tied(), torch.randint(0, 11, (2, 7))
    # the stream is written and read by one table: a factor a must also be 1/a, so that only signs are left
    sym = prove(
        net,
        x,
        wires=[
            "S_5 ⋉ {±1}^5 on table.weight[1], a.weight[1], b.weight[0], b.bias[0]",
            "S_7 ⋉ (R₊)^7 on a.weight[0], a.bias[0], b.weight[1]",
        ],
    )
    p, sign = permutation(5), torch.tensor([1, -1, -1, 1, 1]).double()
    moved = moved_by(element(sym, "table.weight[1]", permutation=p, sign=sign[None]), sym, net)
    assert moved.head.weight is moved.table.weight
    by_hand = edited(
        net,
        table__weight=lambda w: (w * sign)[:, p],
        a__weight=lambda w: (w * sign)[:, p],
        b__weight=lambda w: (w * sign[:, None])[p],
        b__bias=lambda b: (b * sign)[p],
    )
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, x) < 1e-12


def test_position_and_class_tokens() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1) + m.position
        return m.head(m.norm(x + m.mix(x.transpose(1, 2)).transpose(1, 2))[:, 0])

    parts = {"stem": nn.Linear(2, 7), "mix": nn.Linear(12, 12), "norm": nn.LayerNorm(7), "head": nn.Linear(7, 3)}
    net = Net(forward, **parts, token=parameter(1, 1, 7), position=parameter(1, 12, 7))
    where = "stem.weight[0], stem.bias[0], token[2], position[2], norm.weight[0], norm.bias[0], head.weight[1]"
    prove(net, tokens(), wires=[f"S_7 ⋉ (R*)^7 on {where}"])


def test_gated_linear_unit() -> None:
    net = Net(lambda m, x: m.b(F.glu(m.a(x))), a=nn.Linear(2, 14), b=nn.Linear(7, 3)).double()
    # value and gate share one order; only the value carries a factor
    where = "a.weight[0], a.bias[0], a.weight[0 +7], a.bias[0 +7], b.weight[1]"
    sym = prove(net, tokens().double(), wires=[f"S_7 ⋉ (R*)^7 on {where}"])
    p, s = permutation(7), torch.linspace(0.5, 2, 7).double()
    rows, factor = torch.cat([p, 7 + p]), torch.cat([s, torch.ones(7)])
    by_hand = edited(
        net,
        a__weight=lambda w: (w * factor[:, None])[rows],
        a__bias=lambda b: (b * factor)[rows],
        b__weight=lambda w: (w / s)[:, p],
    )
    assert same_weights(sym.act(element(sym, "b.weight[1]", permutation=p, scale=s[None]), net), by_hand)
    assert gap(net, by_hand, tokens().double()) < 1e-12


def test_swiglu() -> None:
    forward = lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x))  # noqa: E731
    net = Net(forward, gate=nn.Linear(2, 7), up=nn.Linear(2, 7), down=nn.Linear(7, 3))
    where = "gate.weight[0], gate.bias[0], up.weight[0], up.bias[0], down.weight[1]"
    sym = prove(net, tokens(), wires=[f"S_7 ⋉ (R*)^7 on {where}"])
    assert {s.role for s in sym.wires[0].slots if s.parameter.startswith("gate")} == {"permuted"}
