"""Graph and symmetry, where changed code went unnoticed: uneven padding, cropping, moved axes, patches, refinements,
heads that are axes of their own."""

import math

import pytest
import torch
import torch.nn.functional as F
from networks import Net, parameter, prove
from torch import Tensor, nn

import intertwine as it
from intertwine.symmetry.certify import relative_error


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def test_uneven_reflection_keeps_the_channels() -> None:
    net = Net(
        lambda m, x: m.head(F.pad(m.stem(x), (3, 1, 0, 2), mode="reflect")),
        stem=nn.Conv2d(3, 5, 1), head=nn.Conv2d(5, 2, 3),
    )  # fmt: skip
    prove(net, images(), wires=["S_5 ⋉ (R*)^5 on stem.weight[0], stem.bias[0], head.weight[1]"])


def test_cropped_channels_are_a_wire_of_their_own() -> None:
    """The first two of eight channels are cut off and stay as they are; one of zeros is laid behind the others."""
    net = Net(
        lambda m, x: m.head(F.pad(m.stem(x).relu(), (0, 0, 0, 0, -2, 1))),
        stem=nn.Conv2d(3, 8, 1), head=nn.Conv2d(7, 2, 1),
    )  # fmt: skip
    wires = [
        "S_6 ⋉ (R₊)^6 on stem.weight[0 +2], stem.bias[0 +2], head.weight[1]",
        "(R*)^1 on head.weight[1 +6]",  # zeros are read at any scale
    ]
    prove(net, images(), wires=wires)


def test_uneven_reflection_keeps_the_channels_of_one_long_row() -> None:
    """6 channels of 8 + 0 + 2 times 8 + 3 + 1 positions each, side by side."""
    net = Net(
        lambda m, x: m.head(F.pad(m.stem(x).relu(), (3, 1, 0, 2), mode="reflect").flatten(1)),
        stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6 * 10 * 12, 2),
    )  # fmt: skip
    prove(net, images(), wires=["S_6 ⋉ (R₊)^6 on stem.weight[0], stem.bias[0], head.weight[1 ×120]"])


def test_moved_axes() -> None:
    net = Net(
        lambda m, x: m.head(torch.movedim(torch.movedim(m.stem(x).relu(), 1, -1), (0, 1), (1, 0))),
        stem=nn.Conv2d(3, 5, 1), head=nn.Linear(5, 2),
    )  # fmt: skip
    prove(net, images(), wires=["S_5 ⋉ (R₊)^5 on stem.weight[0], stem.bias[0], head.weight[1]"])


def test_patches_of_one_image_and_of_several() -> None:
    for batch in ((2,), ()):
        net = Net(lambda m, x: m.head(F.unfold(m.stem(x).relu(), 2).mT), stem=nn.Conv2d(3, 5, 1), head=nn.Linear(20, 2))
        x = torch.randn(*batch, 3, 8, 8)
        prove(net, x, wires=["S_5 ⋉ (R₊)^5 on stem.weight[0], stem.bias[0], head.weight[1 ×4]"])


def test_two_readings_of_one_axis_have_a_common_refinement() -> None:
    """12 units read as 2 × 6 and as 6 × 2: what both leave free is 2 × 3 × 2."""

    def forward(m: Net, x: Tensor) -> Tensor:
        hidden = m.body(x).relu()
        hidden = (hidden.view(-1, 2, 6) + m.a + m.b).relu().view(-1, 6, 2)
        return m.head((hidden + m.c + m.d).relu().flatten(1))

    net = Net(
        forward, body=nn.Linear(3, 12), head=nn.Linear(12, 2), a=parameter(2, 1), b=parameter(1, 6), c=parameter(6, 1),
        d=parameter(1, 2),
    )  # fmt: skip
    sym = it.symmetry(net, torch.randn(4, 3))
    assert sorted(wire.size for wire in sym.wires) == [2, 2, 3]
    assert sym.certify(net, torch.randn(4, 3)).ok


@pytest.mark.parametrize("readings", [((2, 6), (4, 3)), ((4, 3), (2, 6))])
def test_two_layers_read_in_two_ways_have_a_common_refinement(readings: tuple[tuple[int, int], ...]) -> None:
    """12 units as 2 × 6 meet 12 units as 4 × 3: both are 2 × 2 × 3."""

    def forward(m: Net, x: Tensor) -> Tensor:
        parts = zip((m.a, m.b), (m.p, m.q), readings, strict=True)
        first, second = ((layer(x).view(-1, *sizes) + add).relu().flatten(1) for layer, add, sizes in parts)
        return m.head((first + second).relu())

    p, q = (parameter(outer, 1) for outer, _ in readings)
    net = Net(forward, a=nn.Linear(3, 12), b=nn.Linear(3, 12), p=p, q=q, head=nn.Linear(12, 2))
    two, four = ("p", "q") if readings[0] == (2, 6) else ("q", "p")
    layers = "a.weight[0{0}], a.bias[0{0}], b.weight[0{0}], b.bias[0{0}], head.weight[1{0}]"
    wires = [
        f"S_2 ⋉ (R₊)^2 on {layers.format(' ×6')}, {two}[0], {four}[0 ×2]",
        f"(S_2)² on {layers.format(' ×3')}, {four}[0]",
        f"(S_3)⁴ on {layers.format('')}",
    ]
    prove(net, torch.randn(4, 3), wires=wires)


def test_running_variances_are_the_only_variances() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    roles = {slot.parameter: slot.role for wire in it.symmetry(net, torch.randn(2, 3)).wires for slot in wire.slots}
    assert {name for name, role in roles.items() if role == "variance"} == {"1.running_var"}
    assert len(roles) == 7


def own_heads() -> Net:
    """2 heads of 5 units that read 7 hidden ones; heads are axes of the parameters."""

    def forward(m: Net, x: Tensor) -> Tensor:
        inside = torch.einsum("bi,hdi->bhd", m.body(x).relu(), m.up).relu()
        return torch.einsum("bhd,hdo->bo", inside, m.down)

    return Net(forward, body=nn.Linear(3, 7), up=parameter(2, 5, 7), down=parameter(2, 5, 4))


def test_orders_inside_heads_are_counted_for_each_head() -> None:
    sym = it.symmetry(own_heads(), torch.randn(4, 3))
    assert math.isclose(sym.log_order, math.log(math.factorial(7) * math.factorial(2) * math.factorial(5) ** 2))


def test_heads_that_are_an_axis_of_their_own_have_each_its_own_order_inside() -> None:
    wires = [
        "S_7 ⋉ (R₊)^7 on body.weight[0], body.bias[0], up[2]",
        "S_2 on up[0], down[0]",
        "(S_5 ⋉ (R₊)^5)² on up[1], down[1]",
    ]
    prove(own_heads(), torch.randn(4, 3), wires=wires)


def test_coverage_counts_positions_beside_channels_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    everything = sum(p.numel() for p in net.parameters())
    assert math.isclose(it.symmetry(net, images()).coverage(net), (everything - 2) / everything)


def test_outputs_that_are_all_infinite_agree() -> None:
    inf = torch.full((3,), math.inf)
    assert relative_error(inf, inf) == 0.0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(inf, torch.zeros(3)) == math.inf
