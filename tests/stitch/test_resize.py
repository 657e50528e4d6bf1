"""Features of two networks at a stitch point: rows, resolutions, tokens and grids, and networks of different kinds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intertwine.errors import InputError, MismatchError
from intertwine.lab.zoo.networks.feedforward import mlp, myrtle
from intertwine.lab.zoo.networks.resnet import resnet
from intertwine.lab.zoo.networks.transformers import vit
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.network import StitchedNetwork
from intertwine.stitch.resize import FeatureForm, from_rows, resize_rows, to_rows
from intertwine.stitch.split import SplitPair

pytestmark = pytest.mark.usefixtures("one_thread")


def grid(*sizes: int) -> FeatureForm:
    return FeatureForm("nc" + "p" * len(sizes), (2, 3, *sizes))


def tokens(count: int) -> FeatureForm:
    return FeatureForm("ntc", (2, count, 3))


def rows_of(*sizes: int) -> Tensor:
    return to_rows(torch.randn(2, 3, *sizes, dtype=torch.float64), "nc" + "p" * len(sizes))


@pytest.mark.parametrize(
    ("layout", "shape", "rows"),
    [
        ("ncpp", (2, 3, 4, 5), (2, 20, 3)),
        ("nppc", (2, 4, 5, 3), (2, 20, 3)),
        ("tnc", (7, 2, 3), (2, 7, 3)),
        ("nc", (2, 3), (2, 1, 3)),
        ("cnc", (4, 2, 3), (2, 1, 12)),
        ("ncp", (2, 3, 5), (2, 5, 3)),
    ],
)
def test_rows_hold_every_number_once_and_lead_back(layout: str, shape: tuple[int, ...], rows: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = to_rows(x, layout)
    assert tuple(found.shape) == rows
    again = from_rows(found, FeatureForm(layout, shape))
    assert torch.equal(again, x)
    assert again.is_contiguous()
    again.zero_()
    assert x.abs().sum() > 0
    more = from_rows(torch.cat([found, found]), FeatureForm(layout, shape))  # the number of samples is free
    assert more.shape[layout.index("n")] == 4


def test_rows_are_positions_line_by_line() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(to_rows(x, "ncpp")[1, 7], x[1, :, 1, 2])


@pytest.mark.parametrize("resize", ["bilinear", "nearest", "area"])
def test_grids_of_other_resolutions_are_resized(resize: str) -> None:
    rows = rows_of(8, 6)
    image = rows.transpose(1, 2).reshape(2, 3, 8, 6)
    options = {"align_corners": False} if resize == "bilinear" else {}
    expected = F.interpolate(image, (4, 3), mode=resize, **options).flatten(2).transpose(1, 2)
    torch.testing.assert_close(resize_rows(rows, grid(8, 6), grid(4, 3), resize), expected)
    assert torch.equal(resize_rows(rows, grid(8, 6), grid(8, 6), resize), rows)


def test_signals_and_volumes_are_resized_too() -> None:
    ramp = torch.arange(8.0).reshape(1, 8, 1)
    found = resize_rows(ramp, FeatureForm("ncp", (1, 1, 8)), FeatureForm("ncp", (1, 1, 4)))
    torch.testing.assert_close(found.flatten(), torch.tensor([0.5, 2.5, 4.5, 6.5]))
    assert resize_rows(rows_of(4, 4, 4), grid(4, 4, 4), grid(2, 2, 2)).shape == (2, 8, 3)
    with pytest.raises(MismatchError, match="positions with different numbers of axes"):
        resize_rows(rows_of(4, 4), grid(4, 4), grid(4, 4, 2))


def test_a_grid_becomes_tokens_and_a_class_token_gets_the_mean() -> None:
    rows = rows_of(4, 4)
    assert torch.equal(resize_rows(rows, grid(4, 4), tokens(16)), rows)
    found = resize_rows(rows, grid(4, 4), tokens(17))
    torch.testing.assert_close(found[:, 0], rows.mean(1))
    assert torch.equal(found[:, 1:], rows)
    found = resize_rows(rows, grid(4, 4), tokens(19))  # distillation and registers as well
    assert torch.equal(found[:, 3:], rows)
    found = resize_rows(rows, grid(4, 4), tokens(5), "area")  # four tokens of two by two positions
    torch.testing.assert_close(found[:, 1], rows[:, [0, 1, 4, 5]].mean(1))
    wide = rows_of(2, 4)
    assert torch.equal(resize_rows(wide, grid(2, 4), tokens(9))[:, 1:], wide)
    with pytest.raises(MismatchError, match=r"a grid of 4×4 .*, and the back 35 tokens .* 35 tokens are no such grid"):
        resize_rows(rows, grid(4, 4), tokens(35))


def test_tokens_become_a_grid_without_their_leading_extra_tokens() -> None:
    x = torch.randn(2, 17, 3)
    assert torch.equal(resize_rows(x, tokens(17), grid(4, 4)), x[:, 1:])
    assert torch.equal(resize_rows(x[:, 1:], tokens(16), grid(4, 4)), x[:, 1:])
    found = resize_rows(x, tokens(17), grid(2, 2), "area")
    torch.testing.assert_close(found[:, 3], x[:, 1:][:, [10, 11, 14, 15]].mean(1))
    with pytest.raises(MismatchError, match="The front has 35 tokens with 3 channels, and the back a grid"):
        resize_rows(torch.randn(2, 35, 3), tokens(35), grid(4, 4))


def test_tokens_of_images_cut_into_other_patches_are_resized_beside_the_class_token() -> None:
    x = torch.randn(2, 17, 3)
    both = resize_rows(x, tokens(17), tokens(5), "area")
    assert torch.equal(both[:, 0], x[:, 0])
    torch.testing.assert_close(both[:, 1], x[:, [1, 2, 5, 6]].mean(1))
    torch.testing.assert_close(resize_rows(x, tokens(17), tokens(4), "area"), both[:, 1:])
    torch.testing.assert_close(resize_rows(x[:, 1:], tokens(16), tokens(5), "area")[:, 0], x[:, 1:].mean(1))
    with pytest.raises(MismatchError, match="7 tokens are no such grid with up to 1 leading tokens"):
        resize_rows(x[:, :7], tokens(7), tokens(17))


def test_positions_become_a_vector_as_their_mean_and_a_vector_becomes_no_positions() -> None:
    rows, vector = rows_of(4, 4), FeatureForm("nc", (2, 3))
    torch.testing.assert_close(resize_rows(rows, grid(4, 4), vector), rows.mean(1, keepdim=True))
    assert torch.equal(resize_rows(rows[:, :1], vector, vector), rows[:, :1])
    for back, words in ((grid(4, 4), "a grid of 4×4"), (tokens(5), "5 tokens")):
        with pytest.raises(MismatchError, match=f"The front has a vector with 3 channels, and the back {words}"):
            resize_rows(rows[:, :1], vector, back)


def test_an_unknown_resize_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with pytest.raises(InputError, match=r"Unknown resize 'neares'. Did you mean 'nearest"):
        SplitPair(net, net, "0", ((torch.zeros(2, 3),), {}), resize="neares")


# -- networks of different kinds ---------------------------------------------------------------------------------------


def grown(stitched: StitchedNetwork, x: Tensor) -> None:
    """Outputs for every sample, and a gradient at every entry of the map's rows."""
    y = stitched(x)
    assert tuple(y.shape) == (len(x), 10)
    y.square().sum().backward()
    assert stitched.weight.grad is not None
    assert (stitched.weight.grad.abs().sum(1) > 0).all()


def mapped(split: SplitPair, point: int = 0) -> Any:
    place = split.points[point]
    return StitchedNetwork(
        split, point, LinearMap(torch.randn(place.outputs, place.inputs), torch.randn(place.outputs))
    )


def test_a_convolutional_network_into_a_transformer() -> None:
    front: Any = resnet(20, width=0.25).eval()
    for pool in ("token", "mean"):
        back: Any = vit(dim=8, depth=2, heads=2, patch=4, side=16, pool=pool).eval()
        x = torch.randn(4, 3, 16, 16)
        split = SplitPair(front, back, [("layer2", "blocks.0"), ("layer3", "blocks.0.attention")], ((x,), {}))
        assert [point.skip for point in split.points] == ["none", "back"]
        stitched = mapped(split)
        with torch.no_grad():
            features = front.layer2(front.layer1(front.relu(front.bn1(front.conv1(x)))))
            small = F.interpolate(features, (4, 4), mode="bilinear", align_corners=False).flatten(2).transpose(1, 2)
            if pool == "token":
                small = torch.cat([features.mean((2, 3))[:, None], small], 1)
            h = back.norm(back.blocks[1](small @ stitched.weight.T + stitched.bias))
            expected = back.head(h[:, 0] if pool == "token" else h.mean(1))
        torch.testing.assert_close(stitched(x), expected, rtol=1e-4, atol=1e-4)
        for point in range(2):
            grown(mapped(split, point), x)


def test_a_transformer_into_a_convolutional_network() -> None:
    front: Any = vit(dim=8, depth=2, heads=2, patch=4, side=16).eval()
    back: Any = resnet(20, width=0.25).eval()
    x = torch.randn(4, 3, 16, 16)
    split = SplitPair(
        front, back, [("blocks.1", "layer2"), ("blocks.0", "layer3.0.relu1"), ("embed", "conv1")], ((x,), {})
    )
    stitched = mapped(split)
    tokens_of: list[Tensor] = []
    with front.blocks[1].register_forward_hook(lambda _m, _a, y: tokens_of.append(y)), torch.no_grad():
        front(x)
        image = tokens_of[0][:, 1:].transpose(1, 2).reshape(4, 8, 4, 4)
        image = F.interpolate(image, (8, 8), mode="bilinear", align_corners=False)
        image = torch.einsum("oc,nchw->nohw", stitched.weight, image) + stitched.bias[:, None, None]
        expected = back.fc(back.pool(back.layer3(image)).flatten(1))
    torch.testing.assert_close(stitched(x), expected, rtol=1e-4, atol=1e-4)
    for point in range(3):
        grown(mapped(split, point), x)


def test_targets_correspond_to_the_front_s_rows() -> None:
    front, back = vit(dim=8, depth=1, heads=2, patch=4, side=32).eval(), myrtle(width=4).eval()
    x = torch.randn(4, 3, 32, 32)
    split = SplitPair(front, back, [("blocks.0", "5"), ("norm", "14:input"), ("head", "16")], ((x,), {}))
    for features, own, point in zip(split.front(((x,), {})), split.targets(((x,), {})), split.points, strict=True):
        assert features.rows.shape[:2] == own.shape[:2]
        assert (features.rows.shape[2], own.shape[2]) == (point.inputs, point.outputs)
    assert isinstance(back, torch.nn.Sequential)
    with torch.no_grad():
        torch.testing.assert_close(split.targets(((x,), {}))[0], to_rows(back[:6](x), "ncpp"))


def test_a_vector_into_positions_is_refused_at_once() -> None:
    front, back = mlp((3 * 32 * 32, 6, 10)), myrtle(width=4)
    x = torch.randn(4, 3, 32, 32)
    with pytest.raises(MismatchError, match=r"a vector has no positions. Choose a layer of the front before it pools"):
        SplitPair(front, back, ("2", "5"), ((x,), {}))
    grown(mapped(SplitPair(back, front, ("5", "3"), ((x,), {}))), x)
