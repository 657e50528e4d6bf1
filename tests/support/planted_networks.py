"""Networks with planted duplicates: units that are copies of others, so that folding has one right answer."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from networks import Net
from torch import Tensor, nn

import intertwine as it
from intertwine import zoo

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


SMALL = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def lively(model: nn.Module) -> nn.Module:
    """The model in double precision and evaluation mode, with batch statistics and norm weights of no special value."""
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                if tensor is not None:
                    tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
            if module.affine:
                module.weight.data[::3] *= -1
    return model.double().eval()


def planted(model: nn.Module, x: Tensor, copies: int = 2) -> tuple[nn.Module, dict[str, set[frozenset[int]]]]:
    """A copy in which features 1 to `copies` of every wire of four or more are made equal to feature 0.

    Everything that makes the feature is copied, in every layer that writes it; what reads it stays different.
    """
    twin, groups = copy.deepcopy(model), {}
    tensors = twin.state_dict(keep_vars=True)
    for wire in it.symmetry(model, x).wires:
        if wire.size < 4:
            continue
        groups[wire.name] = {frozenset(range(copies + 1))}
        for slot in wire.slots:
            if slot.axis == 0:  # layers read along axis 1
                tensor = tensors[slot.parameter].data
                tensor[slot.offset + 1 : slot.offset + 1 + copies] = tensor[slot.offset]
    return twin, groups


def merged_sets(groups: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, set[frozenset[int]]]:
    """The groups of two and more features, as sets."""
    return {name: {frozenset(g) for g in found if len(g) > 1} for name, found in groups.items()}


def chain(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def mobile() -> nn.Sequential:
    """A depthwise convolution between two others, all with BatchNorm."""
    return nn.Sequential(
        *(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, groups=6, bias=False),
            nn.BatchNorm2d(6),
        ),
        *(nn.ReLU6(), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)),
    )


def dense() -> Net:
    """Concatenated features with a BatchNorm over both, and a linear layer behind a flatten."""

    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.a(x).relu()
        both = torch.cat([first, m.b(first)], 1)
        return m.head(m.norm(both).relu().flatten(1))

    parts = {"a": nn.Conv2d(3, 5, 3, 2), "b": nn.Conv2d(5, 4, 3, padding=1), "norm": nn.BatchNorm2d(9)}
    return Net(forward, **parts, head=nn.Linear(81, 2))


NETWORKS = {
    "mlp": (lambda: chain(6, 9, 8, 3), torch.randn(4, 6)),
    "mlp-tanh": (lambda: chain(6, 9, 8, 3, act=nn.Tanh), torch.randn(4, 6)),
    "mlp-gelu": (lambda: chain(6, 9, 8, 3, act=nn.GELU), torch.randn(4, 6)),
    "mlp-prelu": (lambda: nn.Sequential(nn.Linear(6, 9), nn.PReLU(9), nn.Linear(9, 3)), torch.randn(4, 6)),
    "vgg": (lambda: zoo.build("vgg11", width=0.125), IMAGES),
    "vgg-bn": (lambda: zoo.build("vgg16_bn", width=0.125), IMAGES),
    "resnet20": (lambda: zoo.build("resnet20"), IMAGES),
    "resnet18": (lambda: zoo.build("resnet18", width=0.125), IMAGES),
    "tiny10": (lambda: zoo.build("tiny10"), IMAGES),
    "mobile": (mobile, SMALL),
    "dense": (dense, SMALL),
}
