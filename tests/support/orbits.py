"""What the tests of canonical forms share: networks of every kind, and what must hold on an orbit."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from group_cases import CASES, attention, image, rows, tokens
from networks import Net, gap
from torch import Tensor, nn

import intertwine as it
from intertwine.canonical.form import Canonical
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.symmetry import Symmetry

Made = tuple[nn.Module, tuple[Any, ...]]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": F.gelu,
    "tanh": torch.tanh,
    "ReLU": F.relu,
    "abs": torch.abs,
    "square": torch.square,
}


def mlp(activation: Callable[[Tensor], Tensor], widths: tuple[int, ...] = (3, 5, 4, 2), bias: bool = True) -> Net:
    """A multilayer perceptron with layers a, b, c, …"""
    names = "abcdef"[: len(widths) - 1]

    def forward(m: Net, x: Tensor) -> Tensor:
        for name in names[:-1]:
            x = activation(m.get_submodule(name)(x))
        return m.get_submodule(names[-1])(x)

    return Net(forward, **{n: nn.Linear(i, o, bias) for n, i, o in zip(names, widths, widths[1:], strict=False)})


def residual(norm: Callable[[int], nn.Module]) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.n0(m.stem(x)))
        x = F.relu(x + m.n2(m.b(F.relu(m.n1(m.a(x))))))
        return m.head(x.mean((2, 3)))

    parts = {"stem": nn.Conv2d(3, 4, 3), "a": nn.Conv2d(4, 6, 1), "b": nn.Conv2d(6, 4, 1), "head": nn.Linear(4, 2)}
    return Net(forward, **parts, n0=norm(4), n1=norm(6), n2=norm(4))


def depthwise() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(F.relu(m.b(F.relu(m.a(x)))).mean((2, 3)))

    return Net(forward, a=nn.Conv2d(3, 5, 1), b=nn.Conv2d(5, 5, 3, groups=5), head=nn.Linear(5, 2))


def qk_normed() -> Net:
    """Two key heads, each read by two query heads; queries and keys are normed per head, with shared weights."""

    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = (p(m.stem(x)).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (m.q, m.k, m.v))
        y = F.scaled_dot_product_attention(m.q_norm(q), m.k_norm(k), v, enable_gqa=True)
        return m.head(m.o(y.transpose(1, 2).flatten(2)))

    sides = {"stem": nn.Linear(2, 6), "o": nn.Linear(16, 6, False), "head": nn.Linear(6, 2)}
    inner = {"q": nn.Linear(6, 16, False), "k": nn.Linear(6, 8, False), "v": nn.Linear(6, 8, False)}
    return Net(forward, **sides, **inner, q_norm=nn.RMSNorm(4), k_norm=nn.RMSNorm(4))


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    **{f"MLP with {name}": (lambda f=f: mlp(f), rows) for name, f in ACTIVATIONS.items()},
    "one input": (lambda: mlp(F.relu, (1, 6, 1)), lambda: rows(1)),
    "one unit": (lambda: mlp(torch.tanh, (3, 1, 1, 2)), rows),
    "no bias": (lambda: mlp(torch.abs, bias=False), rows),
    "residual": (lambda: residual(lambda n: nn.Identity()), image),
    "residual with batch norm": (lambda: residual(nn.BatchNorm2d), image),
    "depthwise convolution": (depthwise, image),
    "grouped queries with norms": (qk_normed, tokens),
    "attention": (attention, tokens),
    **{name: (case.make, case.inputs) for name, case in CASES.items() if not case.continuous},
}


def told_apart_late() -> Net:
    """ReLU, tanh and ReLU, no biases. The order of the tanh units is seen before their signs can be.

    Units of layer a look alike from the input, those of layer c from the output. The tanh units between differ by the
    size of what they send out; with their order known those of layer a differ, then their signs can be read, and only
    these tell the units of the last layer apart.
    """

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.d(F.relu(m.c(torch.tanh(m.b(F.relu(m.a(x)))))))

    signs = [[1, 1, 1], [1, -1, 1], [1, 1, -1], [-1, 1, 1], [-1, -1, 1]]
    weights = {
        "a": torch.tensor([[1, 2]] * 3),
        "b": torch.tensor([[1, 2, -3], [-2, 3, 1], [3, -1, 2]]),
        "c": torch.tensor(signs) * torch.tensor([1, 2, 3]),
        "d": torch.ones(2, 5),
    }
    net = Net(forward, **{name: nn.Linear(w.shape[1], w.shape[0], bias=False) for name, w in weights.items()}).double()
    net.load_state_dict({f"{name}.weight": w for name, w in weights.items()})
    return net


def made(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Made:
    """A network with random weights everywhere, norms and their statistics included, and its inputs."""
    torch.manual_seed(seed)
    make, inputs = KINDS[kind]
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for name, b in model.named_buffers():
            if b.is_floating_point():
                b.uniform_(0.5, 2) if name.endswith("var") else b.normal_()
    return model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs())


@cache
def symmetry_of(kind: str) -> Symmetry:
    """It does not depend on the weights, so one does for all precisions and tests."""
    model, inputs = made(kind)
    return it.symmetry(model, *inputs)


def distance(sym: Symmetry, a: nn.Module, b: nn.Module) -> float:
    """The largest relative difference of two tensors that the function reads; 0 only where all bits agree."""
    left, right = weights_of(sym, a), weights_of(sym, b)
    found = 0.0
    for name, x in left.items():
        x, y = x.double(), right[name].double()
        finite = x.isfinite() & y.isfinite()
        size = float(x[finite].norm() + y[finite].norm())
        found = max(found, float((x - y)[finite].norm()) / size if size else 0.0)
    return found


def allowed(sym: Symmetry, model: nn.Module) -> float:
    """How far canonical forms of one orbit may part: not at all, unless scales make them round."""
    if not any(s.scales for s in sym.wire_specs):
        return 0.0
    return 1e-6 if any(t.dtype == torch.float32 for t in model.state_dict().values()) else 1e-13


def check_canonical(sym: Symmetry, model: nn.Module, *inputs: Any, order: str = "lexicographic") -> Canonical:
    """The same function, its own canonical form, and the form of every network of the orbit."""
    canonical = it.canonicalize(model, symmetry=sym, order=order)
    single = any(t.dtype == torch.float32 for t in model.state_dict().values())
    assert canonical.unique, canonical.doubts
    before, after = (copy.deepcopy(m) for m in (model, canonical.model))  # a forward may write into buffers
    assert gap(before, after, *inputs) < (1e-3 if single else 1e-9)
    again = it.canonicalize(canonical.model, symmetry=sym, order=order)
    assert again.element.distance(sym.identity()) == 0
    for seed in (1, 2):
        other = it.canonicalize(sym.act(sym.random(seed), model), symmetry=sym, order=order)
        assert distance(sym, canonical.model, other.model) <= allowed(sym, model)
    return canonical


def noisy(model: nn.Module, size: float, seed: int = 0) -> nn.Module:
    """A copy whose parameters have independent relative errors."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_((1 + size * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype))
    return other


def check_equivalent(sym: Symmetry, model: nn.Module) -> None:
    """One fingerprint on the orbit, and elements that lead back from anywhere on it, also through noise."""
    for seed in (1, 2):
        twin = sym.act(sym.random(seed), model)
        assert it.fingerprint(twin, symmetry=sym) == it.fingerprint(model, symmetry=sym)
        found = it.equivalent(model, twin, symmetry=sym)
        assert found is not None
        assert distance(sym, model, sym.act(found, twin)) < 2e-6
