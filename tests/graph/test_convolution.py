"""Convolutions: every hazard that an image network holds for a symmetry, each with the group it must leave."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import Net, edited, element, gap, moved_by, permutation, prove, same_weights, wire_at
from torch import Tensor, nn

RELU_5 = "S_5 ⋉ (R₊)^5"


def image(channels: int = 3, height: int = 5, width: int = 7) -> Tensor:
    return torch.randn(2, channels, height, width)


def test_flatten_after_conv() -> None:
    net = Net(lambda m, x: m.fc(m.conv(x).relu().flatten(1)), conv=nn.Conv2d(3, 5, 3), fc=nn.Linear(5 * 15, 2)).double()
    sym = prove(net, image().double(), wires=[f"{RELU_5} on conv.weight[0], conv.bias[0], fc.weight[1 ×15]"])
    p = permutation(5)
    moved = sym.act(element(sym, "conv.weight[0]", permutation=p), net)
    conv = {"conv__weight": lambda w: w[p], "conv__bias": lambda b: b[p]}
    by_hand = edited(net, **conv, fc__weight=lambda w: w.reshape(2, 5, 15)[:, p].reshape(2, 75))
    assert same_weights(moved, by_hand)
    without_blocks = edited(net, **conv, fc__weight=lambda w: w.reshape(2, 15, 5)[:, :, p].reshape(2, 75))
    assert gap(net, by_hand, image().double()) < 1e-12
    assert gap(net, without_blocks, image().double()) > 1e-2


def test_flatten_after_conv_channels_last() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.fc(m.conv(x).relu().to(memory_format=torch.channels_last).flatten(1))

    net = Net(forward, conv=nn.Conv2d(3, 5, 3), fc=nn.Linear(75, 2))
    x = image().to(memory_format=torch.channels_last)
    prove(net, x, wires=[f"{RELU_5} on conv.weight[0], conv.bias[0], fc.weight[1 ×15]"])


def test_flatten_after_conv_permuted() -> None:
    def net(*order: int) -> Net:
        forward = lambda m, x: m.fc(m.conv(x).relu().permute(0, *order).flatten(1))  # noqa: E731
        return Net(forward, conv=nn.Conv2d(3, 5, 3), fc=nn.Linear(75, 2)).double()

    last = net(2, 3, 1)
    x = image().double()
    sym = prove(last, x, wires=[f"{RELU_5} on conv.weight[0], conv.bias[0], fc.weight[1]"])
    p = permutation(5)
    moved = moved_by(element(sym, "conv.weight[0]", permutation=p), sym, last)
    assert torch.equal(moved.fc.weight, last.fc.weight.reshape(2, 15, 5)[:, :, p].reshape(2, 75))
    prove(net(2, 1, 3), x, wires=[f"{RELU_5} on conv.weight[0], conv.bias[0], fc.weight[1 ×5]"])


def test_concat() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        a, b = m.a(x).relu(), m.b(x).relu()
        return m.c(torch.cat([a, b, a], 1))

    net = Net(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 5, 1), c=nn.Conv2d(13, 2, 3)).double()
    x = image().double()
    sym = prove(
        net,
        x,
        wires=[
            "S_4 ⋉ (R₊)^4 on a.weight[0], a.bias[0], c.weight[1], c.weight[1 +9]",
            f"{RELU_5} on b.weight[0], b.bias[0], c.weight[1 +4]",
        ],
    )
    p, s = permutation(4), torch.linspace(0.5, 2, 4).double()
    moved = sym.act(element(sym, "a.weight[0]", permutation=p, scale=s[None]), net)
    columns = torch.cat([p, torch.arange(4, 9), 9 + p])
    shrink = torch.cat([1 / s, torch.ones(5), 1 / s])
    by_hand = edited(
        net,
        a__weight=lambda w: (s.view(-1, 1, 1, 1) * w)[p],
        a__bias=lambda b: (s * b)[p],
        c__weight=lambda w: (w * shrink.view(1, -1, 1, 1))[:, columns],
    )
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, x) < 1e-12


def test_dense_connections() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x).relu()
        x = torch.cat([x, m.a(x).relu()], 1)
        x = torch.cat([x, m.b(x).relu()], 1)
        return m.head(x)

    parts = {"stem": nn.Conv2d(3, 5, 1), "a": nn.Conv2d(5, 4, 1), "b": nn.Conv2d(9, 7, 1), "head": nn.Conv2d(16, 2, 1)}
    prove(
        Net(forward, **parts),
        image(),
        wires=[
            f"{RELU_5} on stem.weight[0], stem.bias[0], a.weight[1], b.weight[1], head.weight[1]",
            "S_4 ⋉ (R₊)^4 on a.weight[0], a.bias[0], b.weight[1 +5], head.weight[1 +5]",
            "S_7 ⋉ (R₊)^7 on b.weight[0], b.bias[0], head.weight[1 +9]",
        ],
    )


def test_channel_shuffle() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.b(F.channel_shuffle(m.a(x).relu(), 2))

    def by_reshape(m: Net, x: Tensor) -> Tensor:
        y = m.a(x).relu()
        return m.b(y.reshape(2, 2, 5, *y.shape[2:]).transpose(1, 2).reshape(2, 10, *y.shape[2:]))

    # the two groups read different inputs, so channels move inside their group alone: (S_5)², not S_10
    for function in (forward, by_reshape):
        net = Net(function, a=nn.Conv2d(6, 10, 1, groups=2), b=nn.Conv2d(10, 3, 1))
        prove(net, image(6), wires=["(S_5 ⋉ (R₊)^5)² on a.weight[0], a.bias[0], b.weight[1 ×2]"])


def test_pixel_shuffle() -> None:
    net = Net(lambda m, x: m.b(F.pixel_shuffle(m.a(x).relu(), 2)), a=nn.Conv2d(3, 20, 1), b=nn.Conv2d(5, 2, 1)).double()
    sym = prove(net, image().double(), wires=[f"{RELU_5} on a.weight[0 ×4], a.bias[0 ×4], b.weight[1]"])
    p = permutation(5)
    rows = torch.arange(20).reshape(5, 4)[p].flatten()
    by_hand = edited(net, a__weight=lambda w: w[rows], a__bias=lambda b: b[rows], b__weight=lambda w: w[:, p])
    assert same_weights(sym.act(element(sym, "b.weight[1]", permutation=p), net), by_hand)
    assert gap(net, by_hand, image().double()) < 1e-12


def test_pixel_unshuffle() -> None:
    net = Net(lambda m, x: m.b(F.pixel_unshuffle(m.a(x).relu(), 2)), a=nn.Conv2d(3, 5, 1), b=nn.Conv2d(20, 2, 1))
    prove(net, image(3, 6, 10), wires=[f"{RELU_5} on a.weight[0], a.bias[0], b.weight[1 ×4]"])


def test_depthwise() -> None:
    forward = lambda m, x: m.c(m.b(m.a(x).relu()).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(3, 5, 1), b=nn.Conv2d(5, 5, 3, groups=5), c=nn.Conv2d(5, 2, 1)).double()
    # one order of the channels, two scales: one before and one after the depthwise layer
    wire = "S_5 ⋉ (R₊)^2·5 on a.weight[0], a.bias[0], b.weight[0], b.bias[0], c.weight[1]"
    sym = prove(net, image().double(), wires=[wire])
    p = permutation(5)
    moved = sym.act(element(sym, "a.weight[0]", permutation=p), net)
    rows = {name: lambda t: t[p] for name in ("a__weight", "a__bias", "b__weight", "b__bias")}
    assert same_weights(moved, edited(net, **rows, c__weight=lambda w: w[:, p]))
    in_only = edited(net, a__weight=lambda w: w[p], a__bias=lambda b: b[p])
    assert gap(net, in_only, image().double()) > 1e-2


def test_depthwise_with_multiplier() -> None:
    forward = lambda m, x: m.c(m.b(m.a(x).relu()).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(3, 5, 1), b=nn.Conv2d(5, 10, 3, groups=5), c=nn.Conv2d(10, 2, 1))
    prove(
        net,
        image(),
        wires=[
            f"{RELU_5} on a.weight[0], a.bias[0], b.weight[0 ×2], b.bias[0 ×2], c.weight[1 ×2]",
            "(S_2 ⋉ (R₊)^2)⁵ on b.weight[0], b.bias[0], c.weight[1]",
        ],
    )


def test_grouped() -> None:
    forward = lambda m, x: m.c(m.b(m.a(x).relu()).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(2, 6, 1), b=nn.Conv2d(6, 10, 3, groups=2), c=nn.Conv2d(10, 3, 1)).double()
    x = image(2).double()
    sym = prove(
        net,
        x,
        wires=[
            "S_2 on a.weight[0 ×3], a.bias[0 ×3], b.weight[0 ×5], b.bias[0 ×5], c.weight[1 ×5]",
            "(S_3 ⋉ (R₊)^3)² on a.weight[0], a.bias[0], b.weight[1]",
            "(S_5 ⋉ (R₊)^5)² on b.weight[0], b.bias[0], c.weight[1]",
        ],
    )
    order = torch.tensor([[1, 2, 0], [2, 1, 0]])  # another order in each of the two groups
    moved = sym.act(element(sym, "b.weight[1]", permutation=order), net)
    rows = torch.cat([order[0], 3 + order[1]])

    def inputs_of_b(w: Tensor) -> Tensor:
        return torch.cat([w[:5][:, order[0]], w[5:][:, order[1]]])

    by_hand = edited(net, a__weight=lambda w: w[rows], a__bias=lambda b: b[rows], b__weight=inputs_of_b)
    assert same_weights(moved, by_hand)
    # a channel that changes its group meets other weights: the full S_6 is no symmetry
    across = torch.tensor([3, 1, 2, 0, 4, 5])
    assert gap(net, edited(net, a__weight=lambda w: w[across], a__bias=lambda b: b[across]), x) > 1e-2


def residual(m: Net, x: Tensor) -> Tensor:
    x = m.stem(x).relu()
    x = (x + m.b(m.a(x).relu())).relu()
    return m.head(x + m.c(x))


def test_residual_adds() -> None:
    parts = {"stem": nn.Conv2d(3, 5, 1), "a": nn.Conv2d(5, 7, 1), "b": nn.Conv2d(7, 5, 1), "c": nn.Conv2d(5, 5, 1)}
    net = Net(residual, **parts, head=nn.Conv2d(5, 2, 1)).double()
    x = image().double()
    producers = "stem.weight[0], stem.bias[0], b.weight[0], b.bias[0], c.weight[0], c.bias[0]"
    sym = prove(
        net,
        x,
        wires=[
            f"{RELU_5} on {producers}, a.weight[1], c.weight[1], head.weight[1]",
            "S_7 ⋉ (R₊)^7 on a.weight[0], a.bias[0], b.weight[1]",
        ],
    )
    p, s = permutation(5), torch.linspace(0.5, 2, 5).double()

    def rows(w: Tensor) -> Tensor:
        return (w * s.view(-1, *[1] * (w.ndim - 1)))[p]

    def columns(w: Tensor) -> Tensor:
        return (w / s.view(1, -1, 1, 1))[:, p]

    made = {"stem__weight": rows, "stem__bias": rows, "b__weight": rows, "b__bias": rows, "c__bias": rows}
    by_hand = edited(net, **made, a__weight=columns, head__weight=columns, c__weight=lambda w: columns(rows(w)))
    assert same_weights(sym.act(element(sym, "stem.weight[0]", permutation=p, scale=s[None]), net), by_hand)
    assert gap(net, by_hand, x) < 1e-12
    one_branch = edited(net, stem__weight=rows, stem__bias=rows, a__weight=columns)
    assert gap(net, one_branch, x) > 1e-2


def test_zero_padded_shortcut() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x).relu()
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 3))
        return m.head((short + m.conv(x)).relu())

    parts = {"stem": nn.Conv2d(3, 5, 1), "conv": nn.Conv2d(5, 10, 3, stride=2, padding=1), "head": nn.Conv2d(10, 2, 1)}
    net = Net(forward, **parts).double()
    sym = prove(
        net,
        image().double(),
        wires=[
            f"{RELU_5} on stem.weight[0], stem.bias[0], conv.weight[1], "
            "conv.weight[0 +2], conv.bias[0 +2], head.weight[1 +2]",
            "S_2 ⋉ (R₊)^2 on conv.weight[0], conv.bias[0], head.weight[1]",
            "S_3 ⋉ (R₊)^3 on conv.weight[0 +7], conv.bias[0 +7], head.weight[1 +7]",
        ],
    )
    p = permutation(5)
    tail = torch.tensor([0, 1, 2, 3, 4, 5, 6, 9, 7, 8])
    middle = torch.cat([torch.tensor([0, 1]), 2 + p, torch.tensor([7, 8, 9])])
    by_hand = edited(
        net,
        stem__weight=lambda w: w[p],
        stem__bias=lambda b: b[p],
        conv__weight=lambda w: w[middle][:, p],
        conv__bias=lambda b: b[middle],
        head__weight=lambda w: w[:, middle],
    )
    assert same_weights(sym.act(element(sym, "stem.weight[0]", permutation=p), net), by_hand)
    by_hand = edited(
        net, conv__weight=lambda w: w[tail], conv__bias=lambda b: b[tail], head__weight=lambda w: w[:, tail]
    )
    moved = sym.act(element(sym, "conv.bias[0 +7]", permutation=torch.tensor([2, 0, 1])), net)
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, image().double()) < 1e-12


def test_squeeze_excite_gate() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.conv(x).relu()
        gate = m.up(m.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return m.head(x * gate)

    parts = {
        "conv": nn.Conv2d(3, 5, 3),
        "down": nn.Conv2d(5, 4, 1),
        "up": nn.Conv2d(4, 5, 1),
        "head": nn.Conv2d(5, 2, 1),
    }
    sym = prove(
        Net(forward, **parts),
        image(),
        wires=[
            f"{RELU_5} on conv.weight[0], conv.bias[0], down.weight[1], up.weight[0], up.bias[0], head.weight[1]",
            "S_4 ⋉ (R₊)^4 on down.weight[0], down.bias[0], up.weight[1]",
        ],
    )
    role = {(slot.parameter, slot.axis): slot.role for slot in wire_at(sym, "conv.weight[0]").slots}
    assert role["up.weight", 0] == "permuted", "the gate itself carries no scale"
    assert role["down.weight", 1] == role["head.weight", 1] != role["conv.weight", 0]


def test_layer_scale() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x + m.gamma * m.b(m.a(x).relu()))

    parts = {"stem": nn.Conv2d(3, 5, 1), "a": nn.Conv2d(5, 7, 1), "b": nn.Conv2d(7, 5, 1), "head": nn.Conv2d(5, 2, 1)}
    places = "stem.weight[0], stem.bias[0], a.weight[1], b.weight[0], b.bias[0], gamma[0], head.weight[1]"
    prove(
        Net(forward, **parts, gamma=nn.Parameter(torch.full((5, 1, 1), 1e-5))),
        image(),
        # one factor for the stream, and one that the branch and its layer scale hand each other
        wires=[f"S_5 ⋉ (R*)^2·5 on {places}", "S_7 ⋉ (R₊)^7 on a.weight[0], a.bias[0], b.weight[1]"],
    )


def test_prelu_per_channel() -> None:
    net = Net(lambda m, x: m.b(m.act(m.a(x))), a=nn.Conv2d(3, 5, 1), act=nn.PReLU(5), b=nn.Conv2d(5, 2, 1)).double()
    nn.init.uniform_(net.act.weight)
    sym = prove(net, image().double(), wires=[f"{RELU_5} on a.weight[0], a.bias[0], act.weight[0], b.weight[1]"])
    p, s = permutation(5), torch.linspace(0.5, 2, 5).double()
    moved = moved_by(element(sym, "act.weight[0]", permutation=p, scale=s[None]), sym, net)
    assert torch.equal(moved.act.weight, net.act.weight[p])
    shared = Net(lambda m, x: m.b(m.act(m.a(x))), a=nn.Conv2d(3, 5, 1), act=nn.PReLU(), b=nn.Conv2d(5, 2, 1))
    prove(shared, image(), wires=[f"{RELU_5} on a.weight[0], a.bias[0], b.weight[1]"])


def pooled(pool: nn.Module) -> Net:
    return Net(lambda m, x: m.b(m.pool(m.a(x))), a=nn.Conv2d(3, 5, 1), pool=pool, b=nn.Conv2d(5, 2, 1))


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=1, dilation=2), nn.AdaptiveMaxPool2d((3, 2))],
    ids=str,
)
def test_max_pooling(pool: nn.Module) -> None:
    prove(pooled(pool), image(), wires=[f"{RELU_5} on a.weight[0], a.bias[0], b.weight[1]"])


@pytest.mark.parametrize(
    "pool", [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((3, 2)), nn.Upsample(scale_factor=2, mode="bilinear")], ids=str
)
def test_average_pooling(pool: nn.Module) -> None:
    prove(pooled(pool), image(), wires=["S_5 ⋉ (R*)^5 on a.weight[0], a.bias[0], b.weight[1]"])


@pytest.mark.parametrize(
    ("group", "pool"),
    [
        ("S_5 ⋉ (R*)^5", lambda x: x.mean((2, 3))),
        ("S_5 ⋉ (R*)^5", lambda x: x.sum((-1, -2))),
        ("S_5 ⋉ (R*)^5", lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)),
        (RELU_5, lambda x: x.amax((2, 3))),
        (RELU_5, lambda x: x.flatten(2).max(-1)[0]),
        (RELU_5, lambda x: F.adaptive_max_pool2d(x, 1).flatten(1)),
        ("S_5", lambda x: x.logsumexp((2, 3))),
    ],
    ids=["mean", "sum", "adaptive average", "amax", "max of a flat image", "adaptive maximum", "log-sum-exp"],
)
def test_global_pooling(group: str, pool: Callable[[Tensor], Tensor]) -> None:
    net = Net(lambda m, x: m.fc(pool(m.conv(x))), conv=nn.Conv2d(3, 5, 3), fc=nn.Linear(5, 2))
    prove(net, image(), wires=[f"{group} on conv.weight[0], conv.bias[0], fc.weight[1]"])


def test_conv_transpose() -> None:
    forward = lambda m, x: m.c(m.b(m.a(x).relu()).relu())  # noqa: E731
    net = Net(forward, a=nn.Conv2d(3, 5, 1), b=nn.ConvTranspose2d(5, 7, 3, stride=2), c=nn.Conv2d(7, 2, 1)).double()
    sym = prove(
        net,
        image().double(),
        wires=[
            f"{RELU_5} on a.weight[0], a.bias[0], b.weight[0]",
            "S_7 ⋉ (R₊)^7 on b.weight[1], b.bias[0], c.weight[1]",
        ],
    )
    p = permutation(7)
    by_hand = edited(net, b__weight=lambda w: w[:, p], b__bias=lambda b: b[p], c__weight=lambda w: w[:, p])
    assert same_weights(sym.act(element(sym, "b.weight[1]", permutation=p), net), by_hand)


def test_grouped_conv_transpose() -> None:
    forward = lambda m, x: m.c(m.b(m.a(x).relu()).relu())  # noqa: E731
    b = nn.ConvTranspose2d(6, 10, 3, stride=2, groups=2)
    net = Net(forward, a=nn.Conv2d(2, 6, 1), b=b, c=nn.Conv2d(10, 3, 1)).double()
    x = image(2).double()
    sym = prove(
        net,
        x,
        wires=[
            "S_2 on a.weight[0 ×3], a.bias[0 ×3], b.weight[0 ×3], b.bias[0 ×5], c.weight[1 ×5]",
            "(S_3 ⋉ (R₊)^3)² on a.weight[0], a.bias[0], b.weight[0]",
            "(S_5 ⋉ (R₊)^5)² on b.weight[1], b.bias[0], c.weight[1]",
        ],
    )
    order = torch.stack([permutation(5), permutation(5).argsort()])
    moved = sym.act(element(sym, "b.weight[1]", permutation=order), net)
    flat = torch.cat([order[0], 5 + order[1]])
    by_hand = edited(
        net,
        b__weight=lambda w: torch.cat([w[:3][:, order[0]], w[3:][:, order[1]]]),
        b__bias=lambda v: v[flat],
        c__weight=lambda w: w[:, flat],
    )
    assert same_weights(moved, by_hand)
    assert gap(net, by_hand, x) < 1e-12


def test_convolutions_of_one_and_three_dimensions() -> None:
    forward = lambda m, x: m.b(m.a(x).relu())  # noqa: E731
    wires = [f"{RELU_5} on a.weight[0], a.bias[0], b.weight[1]"]
    prove(Net(forward, a=nn.Conv1d(3, 5, 3), b=nn.Conv1d(5, 2, 2)), torch.randn(2, 3, 11), wires=wires)
    prove(Net(forward, a=nn.Conv3d(3, 5, 2), b=nn.Conv3d(5, 2, 2)), torch.randn(2, 3, 4, 5, 6), wires=wires)
