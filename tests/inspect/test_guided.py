"""Guided backpropagation and top images, against formulas written out by hand (rows 003-F26 and 000-G74)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from intertwine.errors import InputError, MismatchError
from intertwine.inspect.guided import guided_backprop
from intertwine.inspect.images import draw_images, scaled_image, scaled_map
from intertwine.inspect.top_images import top_images

pytestmark = pytest.mark.usefixtures("one_thread")


def network(inplace: bool = False) -> nn.Sequential:
    """Small, in float64, with the layer 7 as the one most tests look at."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace), nn.AvgPool2d(2),
        nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(5, 6, 3), nn.ReLU(inplace), nn.Conv2d(6, 3, 1),
    ).double()  # fmt: skip


def pictures(count: int = 4, size: int = 8) -> Tensor:
    return torch.randn(count, 2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def dense(layer: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """A linear layer as a matrix and a constant, found by asking it for every unit vector; and its output shape."""
    size = torch.Size(shape).numel()
    constant = layer(torch.zeros(1, *shape, dtype=torch.float64))
    columns = layer(torch.eye(size, dtype=torch.float64).reshape(size, *shape)) - constant
    return columns.flatten(1).T, constant.flatten(), tuple(constant.shape[1:])


@torch.no_grad()
def by_hand(model: nn.Sequential, image: Tensor, last: int, units: list[int]) -> tuple[Tensor, float]:
    """Forward and guided backward with matrices alone; `last` is the number of the layer looked at."""
    value, shape = image.flatten(), tuple(image.shape)
    steps: list[Tensor] = []  # a matrix for a linear layer, a mask of positive values for a ReLU
    for layer in list(model)[: last + 1]:
        if isinstance(layer, nn.ReLU):
            steps.append(value > 0)
            value = value * (value > 0)
        else:
            matrix, constant, shape = dense(layer, shape)
            steps.append(matrix)
            value = matrix @ value + constant
    gradient = torch.zeros(shape, dtype=torch.float64)
    gradient[units] = 1
    total = float((value.reshape(shape) * gradient).sum())
    gradient = gradient.flatten()
    for step in reversed(steps):
        gradient = gradient * step * (gradient > 0) if step.dtype == torch.bool else step.T @ gradient
    return gradient.reshape(image.shape), total


# -- row 003-F26 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "last"), [("3", 3), ("4", 4), ("6:input", 5), ("6", 6), ("7", 7)])
@pytest.mark.parametrize("units", [[1], [0, 2]])
def test_row_003_f26_maps_are_those_of_the_formulas(at: str, last: int, units: list[int]) -> None:
    model, images = network(), pictures()
    found = guided_backprop(model, at, units, images)
    for i, image in enumerate(images):
        gradient, total = by_hand(model, image, last, units)
        torch.testing.assert_close(found.maps[i], gradient, rtol=0, atol=1e-12)
        assert float(found.activations[i]) == pytest.approx(total, abs=1e-11)
    assert found.maps.abs().max() > 1e-3
    assert found.units == tuple(units)
    assert found.at == at


def test_row_003_f26_guiding_changes_the_maps() -> None:
    model, images = network(), pictures().requires_grad_()
    (plain,) = torch.autograd.grad(model(images)[:, 1].sum(), images)
    found = guided_backprop(model, "7", 1, images.detach())
    assert (found.maps - plain).abs().max() > 0.1 * plain.abs().max()


def test_row_003_f26_in_place_relus_and_parts_of_the_images_change_nothing() -> None:
    images = pictures(7)
    whole = guided_backprop(network(), "7", [0, 1], images)
    for at in ("7", "3"):
        wanted = guided_backprop(network(), at, [0, 1], images).maps
        torch.testing.assert_close(guided_backprop(network(inplace=True), at, [0, 1], images).maps, wanted)
    parts = guided_backprop(network(), "7", [0, 1], images, batch=3)
    torch.testing.assert_close(parts.maps, whole.maps)
    torch.testing.assert_close(parts.activations, whole.activations)
    assert parts.guided == whole.guided == ("1: relu", "4: relu", "6: relu")  # named once, not once per part


class Written(nn.Module):
    """The same network with every way of writing a ReLU."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.first, self.pool, self.second, self.third, self.last = (layers[i] for i in (0, 2, 3, 5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.pool(F.relu(self.first(x), inplace=True)))
        x = self.third(x.relu_())
        return self.last(torch.relu(x))


class Clamped(Written):
    """... and as clamps."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.pool(self.first(x).clamp(min=0)))
        return self.last(torch.relu_(self.third(x.clamp_min(0))))


@pytest.mark.parametrize("kind", [Written, Clamped])
def test_row_003_f26_relus_written_as_functions_are_guided(kind: type[Written]) -> None:
    layers, images = network(), pictures()
    found = guided_backprop(kind(layers), "last", [0, 2], images)
    torch.testing.assert_close(found.maps, guided_backprop(layers, "7", [0, 2], images).maps)
    assert len(found.guided) == 3
    assert found.unguided == ()


class Residual(nn.Module):
    """A block whose sum is written in place, and whose one ReLU is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.relu, self.head = nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        y = self.norm(self.conv2(x))
        y += x
        return self.head(self.relu(y).mean((2, 3)))


def test_row_003_f26_residual_network_agrees_with_backward_hooks() -> None:
    """The usual way where every ReLU is a module that is called once: hooks of a module's backward."""
    torch.manual_seed(5)
    model, images = Residual().double(), pictures()
    model(images)  # running statistics that are not zero and one
    found = guided_backprop(model, "head", 1, images)
    spare = copy.deepcopy(model).eval()
    spare.relu.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0].clamp(min=0),))
    given = images.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(spare(given)[:, 1].sum(), given)
    torch.testing.assert_close(found.maps, wanted)
    assert found.guided == ("relu: relu", "relu: relu")
    torch.testing.assert_close(
        guided_backprop(model, "relu@1", 1, images).maps, guided_backprop(model, "conv2:input", 1, images).maps
    )


def test_row_003_f26_later_calls_of_a_module_are_told_apart() -> None:
    torch.manual_seed(5)
    model, images = Residual().double(), pictures()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.weight[0, 3] = images[0, 0].numel()  # the sum over positions of one feature, from its mean
    second = guided_backprop(model, "relu@2", 3, images)
    torch.testing.assert_close(second.maps, guided_backprop(model, "head", 0, images).maps)
    assert len(second.guided) == 2
    assert (second.maps - guided_backprop(model, "relu@1", 3, images).maps).abs().max() > 0.1
    with pytest.raises(InputError, match=r"called that module 2 times. Name one call: relu@1, relu@2"):
        guided_backprop(model, "relu", 3, images)


def test_row_003_f26_a_first_layer_may_write_over_the_images() -> None:
    images = pictures()
    kept = images.clone()
    found = guided_backprop(nn.Sequential(nn.ReLU(inplace=True), *network()), "8", 0, images)
    plain = guided_backprop(nn.Sequential(nn.ReLU(), *network()), "8", 0, images)
    torch.testing.assert_close(found.maps, plain.maps)
    top_images(nn.ReLU(inplace=True), "", images, 0)
    assert torch.equal(images, kept)
    assert (found.maps != 0).any()
    assert bool((found.maps >= 0).all())


def test_row_003_f26_other_activations_are_reported() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GELU(), nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()
    found = guided_backprop(model, "4", 0, pictures())
    assert (found.guided, found.unguided) == (("3: relu",), ("1: gelu",))
    assert found.warning is not None
    assert found.warning.endswith("defined for ReLU; gradients pass other activations unchanged: 1: gelu.")
    assert "1: gelu" in repr(found)
    assert found.to_dict()["warning"] == found.warning
    first = guided_backprop(model, "0", 0, pictures())
    assert first.warning == "No activation comes before '0', so the maps are plain gradients."
    assert guided_backprop(network(), "7", 0, pictures()).warning is None


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.LeakyReLU(0.3), "leaky_relu"),
        (nn.PReLU(3, 0.4), "prelu"),
        (nn.ReLU6(), "relu6|hardtanh"),
        (nn.RReLU(0.2, 0.2), "rrelu|leaky_relu"),
    ],
)
def test_row_003_f26_relus_with_a_slope_or_a_top_are_guided(act: nn.Module, name: str) -> None:
    """By hand: the slope at every point, times what is positive of the gradient behind it."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Conv2d(2, 3, 3), act, nn.Conv2d(3, 2, 1)).double()
    images = 4 * pictures(2, size=5)
    found = guided_backprop(model, "2", [0, 1], images)
    assert found.unguided == ()
    assert found.guided[0].removeprefix("1: ") in name.split("|")
    with torch.no_grad():
        before = model[0](images)
        slope = (model[1].eval()(before + 1e-7) - model[1](before)) / 1e-7
        behind = model[2].weight.sum(0).reshape(1, 3, 1, 1).expand_as(before)
        guided = slope * behind.clamp(min=0)
        wanted = F.conv_transpose2d(guided, model[0].weight)
    assert bool((behind < 0).any())
    assert slope.unique().numel() > 1
    torch.testing.assert_close(found.maps, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("low", [-1.0, 0.5])
def test_row_003_f26_clamps_elsewhere_than_at_zero_are_no_relu(low: float) -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(x).clamp(min=low))

    model, images = Cut().double(), pictures().requires_grad_()
    found = guided_backprop(model, "last", 0, images.detach())
    assert (found.guided, found.unguided) == ((), ("clamp",))
    hard = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Hardtanh(low, 4.0), nn.Conv2d(3, 2, 1)).double()
    assert guided_backprop(hard, "2", 0, images.detach()).unguided == ("1: hardtanh",)
    (plain,) = torch.autograd.grad(model(images)[:, 0].sum(), images)
    torch.testing.assert_close(found.maps, plain)


def state(model: nn.Module) -> list[Any]:
    """Everything of a model that guided backpropagation might leave traces in."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    flags = [m.training for m in model.modules()]
    weights = [(p.requires_grad, p.grad, p.detach().clone()) for p in model.parameters()]
    return [hooks, flags, [w[:2] for w in weights], [b.clone().tolist() for b in model.buffers()], weights]


def test_row_003_f26_nothing_of_the_model_is_changed() -> None:
    model, images = Residual().double(), pictures().requires_grad_()
    model.conv1.weight.requires_grad_(False)
    model.conv2.eval()
    before = state(model)
    with torch.no_grad():
        found = guided_backprop(model, "head", [0, 1], images)
    with torch.inference_mode():
        again = guided_backprop(model, "head", [0, 1], images.detach().clone())
    after = state(model)
    assert before[:4] == after[:4]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(before[4], after[4], strict=True))
    assert images.grad is None
    assert not found.maps.requires_grad
    torch.testing.assert_close(found.maps, again.maps.clone())

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("broken")

    broken = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), Broken()).double()
    before = state(broken)
    with pytest.raises(RuntimeError, match="broken"):
        guided_backprop(broken, "2", 0, images.detach())
    assert state(broken)[:4] == before[:4]


def test_guided_maps_read_draw_and_turn_into_data() -> None:
    found = guided_backprop(network(), "7", [0, 2], pictures())
    assert repr(found) == "GuidedMaps(2 features at 7; 4 images; 3 activations guided)"
    assert found.to_dict()["guided"] == ["1: relu", "4: relu", "6: relu"]
    assert len(found.to_dict()["activations"]) == 4
    figure = found.plot(count=3)
    assert len(figure.axes) == 6
    assert figure.axes[3].get_ylabel() == "guided"


def test_guided_backprop_of_tokens_and_vectors_takes_the_right_axis() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    rows = torch.randn(6, 4)
    tokens = guided_backprop(model, "2", 1, rows.reshape(2, 3, 4))
    torch.testing.assert_close(tokens.maps.reshape(6, 4), guided_backprop(model, "2", 1, rows).maps)


@pytest.mark.parametrize(
    ("at", "units", "images", "text"),
    [
        ("7", 3, pictures(), r"units=\[3\] is invalid at '7', which has 3 features.*from 0 to 2"),
        ("7", [], pictures(), r"units=\[\] is invalid at '7', which has 3 features"),
        ("7", [1, 1], pictures(), r"units=\[1, 1\] is invalid"),
        ("8", 0, pictures(), r"no module of that path"),
        ("*", 0, pictures(), r"'\*' stands for 8 layers"),
        ("7", 0, pictures().int(), r"one floating-point tensor .* are a tensor .* of int32"),
        ("7", 0, pictures()[:0], r"Give at least one image"),
    ],
)
def test_guided_backprop_refuses(at: str, units: int | list[int], images: Tensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        guided_backprop(network(), at, units, images)


# -- row 000-G74 -------------------------------------------------------------------------------------------------------


def test_row_000_g74_top_images_are_those_of_a_full_sort() -> None:
    model, images = network(), pictures(11)
    found = top_images(model, "5", images, [4, 0], count=3, batch=4)
    with torch.no_grad():
        values = model[:6](images).flatten(2).max(2).values
    for row, unit in enumerate((4, 0)):
        wanted = sorted(range(11), key=lambda i, unit=unit: -float(values[i, unit]))[:3]
        assert found.indices[row].tolist() == wanted
        assert found.values[row].tolist() == pytest.approx(values[wanted, unit].tolist())
        assert torch.equal(found.images[row], images[wanted])
    assert repr(found).startswith("TopImages(at 5; 2 features, 3 images each; 4: image ")
    assert found.to_dict()["units"][1]["images"] == found.indices[1].tolist()
    assert len(found.plot().axes) == 6


def test_row_000_g74_top_images_of_a_rotated_basis() -> None:
    model, images = network(), pictures(9)
    swap = torch.eye(6)[[1, 0, 2, 3, 4, 5]]
    assert torch.equal(
        top_images(model, "5", images, 0, rotation=swap).indices, top_images(model, "5", images, 1).indices
    )
    turn = torch.linalg.qr(torch.randn(6, 6))[0]
    found = top_images(model, "5", images, [2], count=9, rotation=turn)
    with torch.no_grad():
        mixed = torch.einsum("uc,nchw->nuhw", turn.double(), model[:6](images)).flatten(2).max(2).values[:, 2]
    assert found.values[0].tolist() == pytest.approx(mixed.sort(descending=True).values.tolist())
    with pytest.raises(MismatchError, match=r"The rotation is \(5, 5\), but '5' has 6 features"):
        top_images(model, "5", images, 0, rotation=torch.eye(5))
    with pytest.raises(InputError, match="count must be at least 1, but is 0"):
        top_images(model, "5", images, 0, count=0)


def test_images_and_maps_are_scaled_for_the_eye() -> None:
    assert scaled_image(torch.full((3, 2, 2), 7.0)).unique().tolist() == [0.5]
    assert scaled_map(torch.zeros(1, 2, 2)).unique().tolist() == [0.5]
    assert scaled_image(torch.randn(5, 4, 4)).shape == (4, 4, 1)
    shown = scaled_map(torch.tensor([[[-4.0, 0.0, 1.0]]])).flatten()
    assert shown.tolist() == [0.0, 0.5, 0.625]
    with pytest.raises(InputError, match=r"An image must be \(channels, height, width\), but is \(4,\)"):
        scaled_image(torch.zeros(4))
    with pytest.raises(InputError, match="A row has no images"):
        draw_images([])
    assert len(draw_images([[torch.zeros(2, 2, 3)] * 2, [torch.zeros(2, 2, 1)]]).axes) == 3


# -- wrappers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["module.2", "2", "module.2:input"])
def test_paths_are_those_of_the_wrapped_network(at: str) -> None:
    model, images = network(), pictures()
    wrapped = nn.DataParallel(model)
    own = at.removeprefix("module.")
    assert at == own or at.partition(":")[0] in dict(wrapped.named_modules())
    found, plain = guided_backprop(wrapped, at, [1], images), guided_backprop(model, own, [1], images)
    assert torch.equal(found.maps, plain.maps)
    assert found.guided == plain.guided
    assert torch.equal(top_images(wrapped, at, images, 1).indices, top_images(model, own, images, 1).indices)


def test_paths_are_those_of_the_compiled_network() -> None:
    model, images = network(), pictures()
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.equal(guided_backprop(compiled, "_orig_mod.2", 1, images).maps,
                       guided_backprop(model, "2", 1, images).maps)  # fmt: skip
