"""Runs the kernels of the zoo in triton's interpreter and prints their errors as JSON; see tests/lab/zoo/test_stack.py.

The variable TRITON_INTERPRET=1 must be set before triton is imported, so this is a separate program. Each case gives
a dictionary of relative errors.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Errors = dict[str, float]

#: networks, images, height, width, channels in and out, window, stride, padding
CONVOLUTIONS: dict[str, tuple[int, ...]] = {
    "3x3": (2, 3, 6, 5, 16, 24, 3, 3, 1, 1),
    "3x3, no padding": (1, 3, 5, 7, 8, 16, 3, 3, 1, 0),
    "3x3, stride 2, odd": (3, 3, 7, 9, 8, 16, 3, 3, 2, 1),
    "3x3, stride 2, even": (1, 3, 6, 8, 8, 16, 3, 3, 2, 1),
    "3x3, stride 2, no padding": (2, 2, 9, 8, 16, 8, 3, 3, 2, 0),
    "3x3, stride 3": (1, 2, 8, 7, 8, 8, 3, 3, 3, 1),
    "1x1": (2, 5, 4, 4, 48, 40, 1, 1, 1, 0),
    "1x1, stride 2": (2, 3, 5, 6, 16, 32, 1, 1, 2, 0),
    "5x5": (1, 2, 6, 6, 8, 8, 5, 5, 1, 2),
    "3x1": (2, 2, 5, 6, 8, 8, 3, 1, 1, 0),
    "many pixels": (1, 9, 8, 8, 8, 8, 1, 1, 1, 0),  # several tiles of rows, and the weights' gradient in parts
    "many channels": (2, 1, 3, 3, 264, 272, 1, 1, 1, 0),  # several tiles of columns and steps of depth
    "channels that fill no tile": (2, 1, 4, 4, 24, 40, 3, 3, 1, 1),
}
#: networks, images, height, width, channels, slope, skip connection, pooling
UNITS: dict[str, tuple[int, int, int, int, int, float, bool, bool]] = {
    "relu": (2, 3, 4, 6, 8, 0.0, False, False),
    "leaky": (1, 3, 5, 3, 24, 0.1, False, False),
    "no unit": (3, 2, 4, 4, 16, 1.0, False, False),
    "skip, relu": (2, 3, 4, 5, 8, 0.0, True, False),
    "skip, leaky": (1, 2, 3, 3, 40, 0.1, True, False),
    "skip, no unit": (2, 2, 4, 4, 8, 1.0, True, False),
    "pool, relu": (2, 3, 4, 6, 8, 0.0, False, True),
    "pool, leaky": (1, 3, 6, 4, 24, 0.1, False, True),
    "pool, no unit": (2, 1, 2, 2, 16, 1.0, False, True),
    "many channels": (1, 1, 4, 4, 136, 0.1, False, False),
    "many pixels": (1, 3, 14, 14, 128, 0.0, False, False),  # several tiles along the rows
    "many pixels, pool": (1, 3, 10, 22, 128, 0.1, False, True),
}


def gap(found: Tensor | None, expected: Tensor | None) -> float:
    """The relative error; not a number and missing things are errors without bound."""
    if found is None or expected is None or found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    return float((found.double() - expected).detach().norm() / expected.detach().norm().clamp_min(1e-6))


def outside(x: Tensor) -> Tensor:
    """(K, N, H, W, C) as torch has it, in double precision."""
    return x.double().permute(0, 1, 4, 2, 3)


def inside(x: Tensor) -> Tensor:
    return x.permute(0, 1, 3, 4, 2)


def each(function: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    return torch.stack([function(*parts) for parts in zip(*stacks, strict=True)])


# -- kernels -----------------------------------------------------------------------------------------------------------


def convolution(case: str, dtype: torch.dtype = torch.float32) -> Errors:
    """Outputs and both gradients against F.conv2d and autograd in double precision."""
    from intertwine.lab.zoo.stacking.conv_kernels import convolve, image_gradient, weight_gradient

    k, n, h, w, c, o, rows, columns, stride, pad = CONVOLUTIONS[case]
    x, weight = torch.randn(k, n, h, w, c).to(dtype), torch.randn(k, rows, columns, c, o).to(dtype)
    y = convolve(x, weight, stride, pad)
    exact = outside(x).requires_grad_(), weight.double().permute(0, 4, 3, 1, 2).requires_grad_()
    expected = each(lambda image, kernel: F.conv2d(image, kernel, stride=stride, padding=pad), *exact)
    dy = torch.randn(y.shape).to(dtype)
    expected.backward(outside(dy))
    assert exact[0].grad is not None
    assert exact[1].grad is not None
    return {
        "outputs": gap(y, inside(expected)),
        "images": gap(image_gradient(dy, weight, (h, w), stride, pad), inside(exact[0].grad)),
        "weights": gap(weight_gradient(x, dy, (rows, columns), stride, pad), exact[1].grad.permute(0, 3, 4, 2, 1)),
    }


def unit(case: str, equal: bool = False) -> Errors:
    """scale · x + shift + skip, the unit and the pooling, and what their backward pass is made of.

    With `equal`, many pixels are the same, so that pooling has to choose between them.
    """
    from intertwine.lab.zoo.stacking.norm_kernels import affine_unit, affine_unit_gradient, moments, unit_sums

    k, n, h, w, c, slope, skips, pool = UNITS[case]
    x = torch.randn(k, n, h, w, c).round() if equal else torch.randn(k, n, h, w, c)
    scale, shift, mean, factor, linear, constant = torch.randn(6, k, c).unbind()
    skip = torch.randn(x.shape) if skips else None
    y = affine_unit(x, scale, shift, slope, skip, pool)
    z = (x.double() * scale.double()[:, None, None, None] + shift.double()[:, None, None, None]).requires_grad_()
    added = z if skip is None else z + skip.double()
    expected = after_unit(outside(added), slope, pool)
    dy = torch.randn(y.shape)
    expected.backward(outside(dy))
    assert z.grad is not None
    sums = unit_sums(x, y, dy, scale, shift, mean, slope, skips, pool)
    dx, dskip = affine_unit_gradient(x, y, dy, scale, shift, slope, skips, pool, factor, linear, constant)
    f, g, q, m = (t.double()[:, None, None, None] for t in (factor, linear, constant, mean))
    both = moments(x)
    return {
        "outputs": gap(y, inside(expected)),
        "sums": gap(both[:, 0], x.double().sum((1, 2, 3))) if not equal else 0.0,
        "squares": gap(both[:, 1], x.double().square().sum((1, 2, 3))),
        "dz": gap(sums[:, 0], z.grad.sum((1, 2, 3))),
        "dz · (x - mean)": gap(sums[:, 1], (z.grad * (x.double() - m)).sum((1, 2, 3))),
        "dx": gap(dx, f * z.grad + g * x.double() + q),
        "dskip": gap(dskip, z.grad) if skips else float(dskip is not None),
    }


def after_unit(z: Tensor, slope: float, pool: bool) -> Tensor:
    y = z if slope == 1 else F.leaky_relu(z, slope)
    return F.max_pool2d(y.flatten(0, 1), 2).unflatten(0, y.shape[:2]) if pool else y


def norm(case: str) -> Errors:
    """The differentiable functions of chains against F.batch_norm, the unit and the pooling with autograd."""
    from intertwine.lab.zoo.stacking.fused import BiasUnit, NormUnit
    from intertwine.lab.zoo.stacking.norm_kernels import moments

    k, n, h, w, c, slope, skips, pool = UNITS[case]
    leaves = [torch.randn(k, n, c, h, w), torch.randn(k, c), torch.randn(k, c), torch.randn(k, n, c, h, w)]
    own, exact = ([t.clone().to(dtype).requires_grad_() for t in leaves] for dtype in (torch.float32, torch.float64))
    sums = moments(inside(leaves[0]).contiguous()) / (n * h * w)
    rstd = (sums[:, 1] - sums[:, 0].square() + 1e-5).rsqrt()
    x, weight, bias, skip = own
    y = NormUnit.apply(x, sums[:, 0].contiguous(), rstd, weight, bias, skip if skips else None, slope, pool)
    normed = each(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), *exact[:3])
    expected = after_unit(normed + exact[3] if skips else normed, slope, pool)
    dy = torch.randn(y.shape)
    y.backward(dy)
    expected.backward(dy.double())
    errors = {"outputs": gap(y, expected)}
    for name, a, b in zip(("x", "weight", "bias", "skip"), own, exact, strict=True):
        if b.grad is not None:
            errors[name] = gap(a.grad, b.grad)
    if not skips:  # the same unit behind a bias, without a normalisation
        own, exact = ([t.clone().to(d).requires_grad_() for t in leaves] for d in (torch.float32, torch.float64))
        y = BiasUnit.apply(own[0], torch.ones(k, c), own[2], slope, pool)
        y.backward(dy)
        expected = after_unit(exact[0] + exact[2][:, None, :, None, None], slope, pool)
        expected.backward(dy.double())
        errors |= {"bias alone": gap(y, expected), "its x": gap(own[0].grad, exact[0].grad)}
        errors["its gradient"] = gap(own[2].grad, exact[2].grad)
    return errors


def refusals() -> Errors:
    """1 for each call that takes images with other strides than the kernels read, or sizes they do not know."""
    from intertwine.lab.zoo.stacking.conv_kernels import convolve, image_gradient, weight_gradient
    from intertwine.lab.zoo.stacking.norm_kernels import affine_unit, affine_unit_gradient, moments, unit_sums

    x, weight, row = torch.randn(2, 2, 4, 4, 8), torch.randn(2, 1, 1, 8, 8), torch.randn(2, 8)
    turned, turned_weight, turned_row = x.transpose(2, 3), weight.transpose(3, 4), torch.randn(8, 2).T
    rest = row, row, row
    calls: dict[str, Callable[[], Any]] = {
        "convolve, images": lambda: convolve(turned, weight, 1, 0),
        "convolve, weights": lambda: convolve(x, turned_weight, 1, 0),
        "image_gradient, images": lambda: image_gradient(turned, weight, (4, 4), 1, 0),
        "image_gradient, weights": lambda: image_gradient(x, turned_weight, (4, 4), 1, 0),
        "weight_gradient, images": lambda: weight_gradient(turned, x, (1, 1), 1, 0),
        "weight_gradient, outputs": lambda: weight_gradient(x, turned, (1, 1), 1, 0),
        "moments": lambda: moments(turned),
        "affine_unit, images": lambda: affine_unit(turned, row, row, 0.0),
        "affine_unit, scale": lambda: affine_unit(x, turned_row, row, 0.0),
        "affine_unit, shift": lambda: affine_unit(x, row, turned_row, 0.0),
        "affine_unit, skip": lambda: affine_unit(x, row, row, 0.0, turned),
        "affine_unit, small skip": lambda: affine_unit(x, row, row, 0.0, x[:, :, :1, :1].contiguous()),
        "affine_unit, odd height": lambda: affine_unit(x[:, :, :3].contiguous(), row, row, 0.0, None, True),
        "affine_unit, odd width": lambda: affine_unit(x[:, :, :, :3].contiguous(), row, row, 0.0, None, True),
        "unit_sums": lambda: unit_sums(x, x, turned, row, row, row, 0.0, False, False),
        "affine_unit_gradient": lambda: affine_unit_gradient(x, x, turned, row, row, 0.0, False, False, *rest),
    }
    return {name: float(not _refuses(call)) for name, call in calls.items()}


def _refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except AssertionError:
        return True
    return False


# -- stacks ------------------------------------------------------------------------------------------------------------


class Joined(nn.Module):
    """Additions that a chain takes in and does not take in, results that are read twice, an odd size to pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.third, self.norm3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.norm4, self.unit4 = nn.BatchNorm2d(8, affine=False), nn.LeakyReLU(0.2)
        self.norm5, self.pool = nn.BatchNorm2d(8, track_running_stats=False), nn.MaxPool2d(2)
        self.shift = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm1(self.first(x))
        b = self.relu(a)
        c = self.relu(self.norm2(self.second(b)) + b.mean((2, 3), keepdim=True))  # a smaller skip, in two axes
        d = self.relu(self.norm3(self.third(c)) + self.shift)  # and a parameter
        e = torch.add(self.unit4(self.norm4(d)), a, alpha=2)
        return self.pool(self.relu(self.norm5(e))).mean((2, 3))


def smaller(model: nn.Module) -> nn.Module:
    """The Myrtle CNN for images of any size: its last pooling takes all that is left."""
    layers = [
        nn.AdaptiveMaxPool2d(1) if isinstance(m, nn.MaxPool2d) and m.kernel_size == 4 else m for m in model.children()
    ]
    return nn.Sequential(*layers)


def shallow(model: nn.Module) -> nn.Module:
    """ResNet20 with few blocks: of every kind one, and each kind after each other kind that it ever follows.

    The interpreter takes seconds per block. All 19 and 21 chains are counted in test_zoo_stack.py.
    """
    for stage, count in {"layer1": 2, "layer2": 2, "layer3": 1}.items():
        model.set_submodule(stage, nn.Sequential(*list(model.get_submodule(stage).children())[:count]))
    return model


def _networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]]:
    """How each is built, the shape of its inputs (networks, images, …), and how many chains it has."""
    from intertwine.lab.zoo.networks.registry import build

    wide = (8, 8, 16, 16)
    plain: dict[str, Any] = {"widths": wide, "norm": False, "activation": "leaky_relu:0.1"}
    return {
        "myrtle": (lambda: smaller(build("myrtle", widths=wide)), (2, 3, 3, 8, 8), 4),
        "myrtle, odd sizes": (lambda: smaller(build("myrtle", widths=wide, bias=False)), (2, 3, 3, 10, 9), 4),
        "myrtle, no BN": (lambda: smaller(build("myrtle", **plain)), (2, 3, 3, 8, 8), 4),
        "resnet20, A": (lambda: shallow(build("resnet20", width=0.5, shortcut="A")), (1, 3, 3, 8, 8), 11),
        "resnet20, B": (lambda: shallow(build("resnet20", width=0.5, shortcut="B")), (1, 3, 3, 8, 8), 13),
        # from the third layer on: the two before are of the same kind, on images so large that they take the longest
        "tiny10": (lambda: nn.Sequential(*list(build("tiny10", width=0.5).children())[6:]), (1, 2, 8, 27, 27), 6),
        "joined": (Joined, (2, 3, 3, 5, 7), 5),
    }


NETWORKS = ("myrtle", "myrtle, odd sizes", "myrtle, no BN", "resnet20, A", "resnet20, B", "tiny10", "joined")


def stack(case: str) -> Errors:
    """A stack on the kernels in single precision against the plain one in double precision, both from one start."""
    from intertwine.lab.zoo.stacking.stack import Stack

    make, shape, chains = _networks()[case]
    models = [make() for _ in range(shape[0])]
    for model in models:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    fast, exact = Stack(models, fast=True), Stack([copy.deepcopy(m).double() for m in models], dtype=torch.float64)
    x = torch.randn(shape)
    errors = {"chains": float(sum(step.chain is not None for step in fast._program.steps) != chains)}
    found, expected = fast(x), exact(x.double())
    weights = torch.randn(expected.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    errors["outputs"] = gap(found, expected)
    gradients = {name: grads(fast.parameters[name], p) for name, p in exact.parameters.items()}
    largest = max(float(gradient.norm()) for _, gradient in gradients.values())
    for name, (own, gradient) in gradients.items():
        real = float(gradient.norm()) > 1e-9 * largest  # else it is zero, but for rounding
        errors[name] = gap(own, gradient) if real else float(own.norm()) / largest
        errors[f"strides of {name}"] = float(layout(own) != layout(fast.parameters[name]))
    errors |= {name: gap(fast.buffers[name], t.double()) for name, t in exact.buffers.items()}
    with torch.no_grad():
        errors["in use"] = gap(fast.train(False)(x), exact.train(False)(x.double()))
    errors |= {f"{name} in use": gap(fast.buffers[name], t.double()) for name, t in exact.buffers.items()}
    return errors


def grads(*parameters: Tensor) -> tuple[Tensor, ...]:
    """The gradients, which are there even where they are zero."""
    assert all(p.grad is not None for p in parameters)
    return tuple(p.grad for p in parameters if p.grad is not None)


def layout(x: Tensor) -> list[int]:
    """The strides; an axis of one entry has none worth the name."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


#: Every case by name, and the largest error that rounding explains.
CASES: dict[str, tuple[Callable[[], Errors], float]] = {
    **{f"convolution, {name}": (lambda name=name: convolution(name), 2e-6) for name in CONVOLUTIONS},
    "convolution in half precision": (lambda: convolution("3x3", torch.float16), 1e-3),
    **{f"unit, {name}": (lambda name=name: unit(name), 2e-6) for name in UNITS},
    "unit, equal pixels, relu": (lambda: unit("pool, relu", equal=True), 2e-6),
    "unit, equal pixels, leaky": (lambda: unit("pool, leaky", equal=True), 2e-6),
    **{f"norm, {name}": (lambda name=name: norm(name), 1e-5) for name in UNITS},
    "refusals": (refusals, 0.0),
    **{f"stack, {name}": (lambda name=name: stack(name), 3e-5) for name in NETWORKS},
}


def main() -> None:
    torch.set_num_threads(1)
    results, times = {}, {}
    for name in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        start = time.process_time()
        results[name] = CASES[name][0]()
        times[name] = time.process_time() - start
    json.dump({"results": results, "times": times}, sys.stdout)


if __name__ == "__main__":
    main()
