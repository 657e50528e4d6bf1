"""Networks on which the engine was once wrong, refused to work, or missed what is plainly there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Net, certified, gap, parameter, reasons
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import intertwine as it
from intertwine.errors import CaptureError, InputError
from intertwine.graph.model import copy_module
from intertwine.symmetry.certify import relative_error
from intertwine.symmetry.symmetry import Symmetry

LINEAR, ROWS = nn.Linear, (3, 4)


def held(net: nn.Module, *args: Any, forwards: int = 1) -> Symmetry:
    """The symmetry, once random elements keep what every one of so many forwards returns and leaves in its inputs."""
    sym = it.symmetry(net, *args)
    exact = copy_module(net).double().requires_grad_(False)
    inputs: Any = tree_map(lambda v: v.double() if v.is_floating_point() else v, args)
    for seed in range(2):
        left, right = copy_module(exact), sym.act(sym.random(seed), exact)
        given = copy.deepcopy(inputs), copy.deepcopy(inputs)
        for _ in range(forwards):
            torch.testing.assert_close(left(*given[0]), right(*given[1]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(*given, rtol=1e-9, atol=1e-9)
    return sym


def groups(sym: Symmetry) -> list[str]:
    return [str(wire.group) for wire in sym.wires]


def buffered(net: nn.Module, persistent: bool = True, **buffers: Tensor) -> nn.Module:
    for name, tensor in buffers.items():
        net.register_buffer(name, tensor, persistent)
    return net


def mlp(**parts: nn.Module | nn.Parameter) -> dict[str, nn.Module | nn.Parameter]:
    return {"a": LINEAR(4, 6), "o": LINEAR(6, 2), **parts}


# -- what one forward leaves for the next ------------------------------------------------------------------------------


def _copy_state(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    y = m.o(h) + m.p(m.past)
    m.past.copy_(h)
    return y


def _assign_state(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).relu()
    y = m.o(h) + m.p(m.past)
    m.past = h.detach()
    return y


@pytest.mark.parametrize("forward", [_copy_state, _assign_state])
def test_a_state_kept_in_a_buffer_moves_as_what_is_written_to_it(forward: Callable[..., Tensor]) -> None:
    net = buffered(Net(forward, **mlp(p=LINEAR(6, 2))), past=torch.zeros(3, 6))
    sym = held(net, torch.randn(ROWS), forwards=2)
    assert groups(sym) == ["S_6 ⋉ (R₊)^6"]
    assert "p.weight" in {slot.parameter for slot in sym.wires[0].slots}


def test_a_state_that_no_checkpoint_holds_freezes_what_is_written_to_it() -> None:
    net = buffered(Net(_copy_state, **mlp(p=LINEAR(6, 2))), persistent=False, past=torch.zeros(3, 6))
    assert groups(held(net, torch.randn(ROWS), forwards=2)) == []


def test_an_input_that_is_written_to_is_an_output() -> None:
    def forward(m: Any, x: Tensor, cache: Tensor) -> Tensor:
        h = m.a(x).relu()
        cache.copy_(h)
        return m.o(h)

    assert groups(held(Net(forward, **mlp()), torch.randn(ROWS), torch.zeros(3, 6))) == []


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_zeros_that_were_written_to_are_no_zero_state(kind: Callable[..., nn.Module]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(1, x.shape[0], 6, dtype=x.dtype)
        h[0] = m.start
        state = (h, torch.zeros_like(h)) if kind is nn.LSTM else h
        return m.o(m.rnn(x, state)[0])

    held(Net(forward, rnn=kind(4, 6, batch_first=True), start=parameter(6), o=LINEAR(6, 2)), torch.randn(2, 5, 4))


def test_a_result_written_into_a_part_of_another_tensor() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8, dtype=x.dtype)
        torch.matmul(x, m.w, out=h[:, :6])
        return m.o(h.relu())

    held(Net(forward, w=parameter(4, 6), o=LINEAR(8, 2)).requires_grad_(False), torch.randn(ROWS))


def _scored(m: Any, x: Tensor) -> Tensor:
    """Statistics of this batch are written down, and read at once by another norm."""
    h = F.batch_norm(m.a(x), m.mean, m.var, training=True, momentum=0.3)
    return m.o(_norm(h.relu(), m.mean, m.var).relu())


#: Writes to buffers of which no op in place tells → the network.
WRITES: dict[str, Callable[[], nn.Module]] = {
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)),
    "out=": lambda: buffered(
        Net(lambda m, x: torch.add(m.past, m.a(x).tanh().detach(), out=m.past) * 1.5, a=LINEAR(4, 6)),
        past=torch.zeros(3, 6),
    ),
    "a norm in training mode": lambda: buffered(
        Net(_scored, **mlp()).eval(), mean=torch.randn(6), var=torch.rand(6) + 0.5
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated")
@pytest.mark.parametrize("what", WRITES)
def test_a_certificate_starts_every_forward_with_the_same_buffers(what: str) -> None:
    net, x = WRITES[what](), torch.randn(ROWS)
    before = copy.deepcopy(net.state_dict())
    sym = it.symmetry(net, x)
    assert sym.geometry.graph.program.written_inputs()
    certificate = sym.certify(net, x)
    assert certificate.ok
    assert not certificate.broken
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


# -- running variances -------------------------------------------------------------------------------------------------


def _norm(x: Tensor, mean: Tensor, var: Tensor, eps: float = 0.1) -> Tensor:
    return F.batch_norm(x, mean, var, None, None, False, 0.1, eps)


VARIANCES: dict[str, Callable[..., Tensor]] = {
    "a row of stacked ones": lambda m, x: m.o(_norm(m.a(x), m.mean[1], m.var[1]).relu()),
    "two eps": lambda m, x: m.o(_norm(m.a(x), m.mean[0], m.one).relu() + _norm(m.a(x), m.mean[0], m.one, 0.01).relu()),
    "squared": lambda m, x: m.o(_norm(m.a(x), m.mean[0], m.one**2).relu()),
    "a weight of the norm as well": lambda m, x: m.o(
        F.batch_norm(m.a(x), m.mean[0], m.one, weight=m.one, eps=0.1).relu()
    ),
    "read as numbers too": lambda m, x: m.o(_norm(m.a(x), m.mean[0], m.one).relu()) + m.q(m.one),
}


@pytest.mark.parametrize("case", VARIANCES)
def test_only_a_running_variance_itself_moves_with_its_eps(case: str) -> None:
    net = Net(VARIANCES[case], **mlp(q=LINEAR(6, 2)))
    buffered(net, mean=torch.randn(2, 6), var=torch.rand(2, 6) + 0.5, one=torch.rand(6) + 0.5)
    sym = held(net, torch.randn(ROWS))
    assert any(wire.group.permutes for wire in sym.wires)
    scaled = {s.parameter for wire in sym.wires for s in wire.slots if any(s.powers)}
    assert "a.weight" not in scaled


def test_two_norms_with_one_running_variance_and_one_eps() -> None:
    net = Net(lambda m, x: m.o(_norm(m.a(x), m.mean, m.var).relu() + _norm(m.b(x), m.mean, m.var).relu()), **mlp())
    net.b = LINEAR(4, 6)
    sym = held(buffered(net, mean=torch.randn(6), var=torch.rand(6) + 0.5), torch.randn(ROWS))
    assert groups(sym) == ["S_6 ⋉ (R₊)^6"]


# -- ops ---------------------------------------------------------------------------------------------------------------

FULL = "S_6 ⋉ (R₊)^6"


def _write_real_part(m: Any, x: Tensor) -> Tensor:
    z = torch.fft.rfft(m.a(x), dim=0)
    z.real.mul_(m.w)
    return m.o(torch.fft.irfft(z, n=len(x), dim=0))


OPS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], list[str]]] = {
    "a quarter turn": (
        lambda m, x: m.o(torch.rot90(m.a(x).view(-1, 5, 5), 1, [1, 2]).relu().sum(1)),
        {"a": LINEAR(4, 25), "o": LINEAR(5, 2)},
        [],
    ),
    "a norm that counts": (
        lambda m, x: m.o(torch.linalg.vector_norm(m.a(x).relu().view(-1, 3, 4), 0, dim=2)),
        {"a": LINEAR(4, 12), "o": LINEAR(3, 2)},
        ["S_3 ⋉ (R₊)^3", "(S_4)³"],
    ),
    "frobenius_norm": (
        lambda m, x: m.o(torch.frobenius_norm(m.a(x).view(-1, 3, 4), [2], True).squeeze(2)),
        {"a": LINEAR(4, 12), "o": LINEAR(3, 2)},
        ["S_3 ⋉ (R₊)^3", "(S_4 ⋉ {±1}^4)³"],
    ),
    "index_select by a computed table": (
        lambda m, x: m.o(torch.relu(x @ m.z).index_select(1, m.w.argmax(1))),
        {"w": parameter(6, 5), "z": parameter(4, 5), "o": LINEAR(6, 2)},
        ["(R₊)^6"],
    ),
    "written as integers": (
        lambda m, x: m.o(torch.zeros(x.shape[0], 6, dtype=torch.long).copy_(3 * m.a(x).relu()).to(x.dtype)),
        mlp(),
        ["S_6"],
    ),
    "einsum that spreads a letter": (
        lambda m, x: m.o(torch.einsum("bi,bi->bi", m.a(x).relu(), m.c(x))),
        {"a": LINEAR(4, 1), "c": LINEAR(4, 6), "o": LINEAR(6, 2)},
        ["S_6 ⋉ (R*)^6"],
    ),
    "one key head for all": (
        lambda m, x: m.o(
            F.scaled_dot_product_attention(
                m.q(x).view(1, 3, 3, 4).transpose(1, 2), m.k(x).view(1, 1, 3, 4), m.v(x).view(1, 1, 3, 4)
            )
            .transpose(1, 2)
            .reshape(3, 12)
        ),
        {"q": LINEAR(4, 12), "k": LINEAR(4, 4), "v": LINEAR(4, 4), "o": LINEAR(12, 2)},
        ["S_3", "S_4 ⋉ (R*)^4", "S_4 ⋉ (R*)^4"],
    ),
    # what was frozen without need
    "the largest channel of all": (lambda m, x: m.o(m.a(x).relu() * m.a(x).max(1, keepdim=True)[0]), mlp(), ["S_6"]),
    "a gate at the second largest": (
        lambda m, x: m.o(m.a(x) * (m.a(x) >= m.a(x).topk(2, -1)[0][:, 1:])),
        mlp(),
        ["S_6"],
    ),
    "sorted": (lambda m, x: m.o(m.a(x).sort(-1)[0]), mlp(), ["S_6"]),
    "kthvalue": (lambda m, x: m.o(m.a(x).relu() - m.a(x).kthvalue(2, -1, keepdim=True)[0]), mlp(), ["S_6"]),
    "places are read": (lambda m, x: m.o(m.a(x).relu() + m.a(x).max(1, keepdim=True)[1]), mlp(), []),
    "index_add": (
        lambda m, x: m.o(torch.zeros(2, 6, dtype=x.dtype).index_add_(0, torch.tensor([0, 1, 0]), m.a(x).relu())),
        mlp(),
        ["S_6 ⋉ (R₊)^6"],
    ),
    "scatter_add": (
        lambda m, x: m.o(m.a(x).relu().scatter_add(0, torch.tensor([[0], [1], [0]]).expand(3, 6), m.a(x))),
        mlp(),
        ["S_6 ⋉ (R₊)^6"],
    ),
    "a part is scattered": (
        lambda m, x: m.o(m.a(x).scatter(0, torch.tensor([[0], [1]]).expand(2, 3), m.a(x).relu())),
        mlp(),
        [],
    ),
    "the largest of what is scattered": (
        lambda m, x: m.o(
            m.a(x).scatter_reduce(0, torch.tensor([[0], [1], [0]]).expand(3, 6), m.a(x).tanh().relu(), "amax")
        ),
        mlp(),
        ["S_6"],
    ),
    "a rotation of complex numbers": (
        lambda m, x: m.o(
            torch.view_as_real(
                torch.view_as_complex(m.a(x).view(3, 3, 2)) * torch.polar(torch.ones_like(x[:, :1]), x[:, :1])
            ).flatten(1)
        ),
        mlp(),
        ["S_3 ⋉ (R*)^3"],
    ),
    "a Fourier transform of the rows": (
        lambda m, x: m.o(torch.fft.irfft(torch.fft.rfft(m.a(x), dim=0).conj(), n=3, dim=0).relu()),
        mlp(),
        ["S_6 ⋉ (R₊)^6"],
    ),
    "the largest without their order": (
        lambda m, x: m.o(torch.topk(m.a(x).relu(), 6, dim=1, sorted=False)[0]),
        {"a": LINEAR(4, 64), "o": LINEAR(6, 2)},
        [],
    ),
    "the largest in their order": (lambda m, x: m.o(torch.topk(m.a(x).relu(), 6, dim=1)[0]), mlp(), ["S_6"]),
    "truth values joined with numbers that are rounded": (
        lambda m, x: m.o(torch.cat([x > 0, 3 * m.a(x)], 1).long().to(x.dtype)),
        {"a": LINEAR(4, 6), "o": LINEAR(10, 2)},
        ["S_6"],
    ),
    "the real part written to": (_write_real_part, {"a": LINEAR(4, 6), "o": LINEAR(6, 2), "w": parameter(6)}, []),
    "a list of one": (lambda m, x: m.o(m.a(x.split(8, 1)[0]).relu().unsqueeze(1).unbind(1)[0]), mlp(), [FULL]),
    "an elementwise op of two results": (lambda m, x: m.o(torch.frexp(m.a(x))[0]), mlp(), []),
    "RReLU in eval": (lambda m, x: m.o(F.rrelu(m.a(x), training=False)), mlp(), [FULL]),
    "a Fourier transform of the units": (lambda m, x: m.o(torch.fft.fft2(m.a(x)).imag), mlp(), []),
    "the angle of a complex number": (
        lambda m, x: m.o(torch.complex(m.a(x), m.a(x).relu()).angle()),
        mlp(),
        ["S_6"],
    ),
}


@pytest.mark.parametrize("case", OPS)
def test_ops(case: str) -> None:
    forward, parts, expected = OPS[case]
    assert groups(held(Net(forward, **copy.deepcopy(parts)), torch.randn(ROWS))) == expected


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str) -> None:
    net = Net(lambda m, x: m.o(m.e(x).relu()), e=nn.EmbeddingBag(9, 6, mode=mode), o=LINEAR(6, 2))
    assert groups(held(net, torch.randint(0, 9, (3, 4)))) == ["S_6 ⋉ (R₊)^6"]


# -- what a forward leaves in attributes -------------------------------------------------------------------------------


def _remember(m: Any, x: Tensor) -> Tensor:
    m.last = [m.a(x).relu()]
    return m.o(m.last[0])


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("old_norm", [False, True])
def test_models_that_keep_a_tensor_of_their_last_forward(old_norm: bool) -> None:
    net = Net(_remember, **mlp())
    if old_norm:
        nn.utils.weight_norm(net.a)
    x = torch.randn(ROWS)
    net(x).sum().backward()
    kept = net.last[0]
    sym = held(net, x)
    assert len(sym.wires) == 1
    assert sym.certify(net, x).ok
    assert it.equivalent(net, sym.act(sym.random(), net), x, tol=1e-4) is not None
    assert net.last[0] is kept


class Cached(nn.Module):
    """A layer that reads its weights through something it computes from them, and keeps."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.w, self.o, self.keep = parameter(6, 4), LINEAR(6, 2), keep
        self.kept: Any = {} if keep == "in a dict" else None

    def rows(self) -> Any:
        if self.keep == "in a dict":
            if "rows" not in self.kept:
                self.kept["rows"] = F.normalize(self.w, dim=1)
            return self.kept["rows"]
        if self.keep == "anew" or self.kept is None:
            unit = F.normalize(self.w, dim=1)
            self.kept = (unit,) if self.keep == "in a tuple" else unit
        return self.kept[0] if self.keep == "in a tuple" else self.kept

    def forward(self, x: Tensor) -> Tensor:
        return self.o((x @ self.rows().T).relu())

    def train(self, mode: bool = True) -> Any:
        if self.keep == "until the mode changes":
            self.kept = None
        return super().train(mode)


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("keep", ["for good", "in a tuple", "in a dict"])
def test_weights_that_are_kept_for_the_next_forward_stay_as_they_are(keep: str, below: bool) -> None:
    net = nn.Sequential(LINEAR(4, 5), nn.ReLU(), LINEAR(5, 4), Cached(keep)) if below else Cached(keep)
    x = torch.randn(ROWS)
    sym = held(net, x)
    name, attribute = ("3.w", "3.kept") if below else ("w", "kept")
    assert f"what is computed from it stays in {attribute} for later forwards" in reasons(sym, name)
    assert [wire.size for wire in sym.wires] == ([5] if below else [])
    assert sym.certify(net, x).ok
    net(x)
    torch.testing.assert_close(net(x), sym.act(sym.random(), net)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", ["anew", "until the mode changes"])
def test_weights_that_are_kept_and_not_read_again_may_move(keep: str) -> None:
    net, x = Cached(keep), torch.randn(ROWS)
    sym = held(net, x)
    assert [wire.size for wire in sym.wires] == [6]
    assert sym.certify(net, x).ok
    net(x)
    torch.testing.assert_close(net(x), sym.act(sym.random(), net)(x), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_copied_is_refused_in_words() -> None:
    net = Net(lambda m, x: m.o(m.a(x).relu()), **mlp())
    vars(net)["stream"] = (number for number in range(3))
    with pytest.raises(it.errors.InputError, match="Net cannot be copied"):
        it.symmetry(net, torch.randn(ROWS))


@pytest.mark.parametrize("trials", [0, -2])
def test_a_certificate_over_nothing_is_refused(trials: int) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    with pytest.raises(InputError, match=f"trials must be at least 1, but is {trials}"):
        it.symmetry(model, x).certify(model, x, trials=trials)


@pytest.mark.parametrize(
    "verb", [it.fold, it.complexity, lambda m, x: it.align(m, m, x), lambda m, x: it.merge([m, m], x)]
)
def test_every_verb_copies_models_that_keep_an_activation(verb: Any) -> None:
    """`copy.deepcopy` refuses a tensor that hangs on a graph."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(2, 3)
    model.last = model(x)
    verb(model, x)


# -- rotations ---------------------------------------------------------------------------------------------------------

#: How a row is brought to a size → whether every rotation keeps that size.
SIZES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "mean of squares": (lambda h: h.pow(2).mean(-1, keepdim=True), True),
    "sum of squares": (lambda h: h.square().sum(-1, keepdim=True), True),
    "largest square": (lambda h: h.pow(2).amax(-1, keepdim=True), False),
    "largest square, with its place": (lambda h: h.pow(2).max(-1, keepdim=True)[0], False),
    "spread of squares": (lambda h: h.pow(2).std(-1, keepdim=True), False),
    "length of the squares": (lambda h: h.square().norm(dim=-1, keepdim=True), False),
    "logsumexp of squares": (lambda h: h.pow(2).logsumexp(-1, keepdim=True), False),
    "product of squares": (lambda h: h.pow(2).prod(-1, keepdim=True), False),
    "mean of twentieth powers": (lambda h: h.pow(20).mean(-1, keepdim=True), False),
    "mean of fourth powers": (lambda h: h.pow(4).mean(-1, keepdim=True), False),
}


@pytest.mark.parametrize("size", SIZES)
def test_rotations_keep_sums_of_squares_and_no_other_size(size: str) -> None:
    of, rotates = SIZES[size]
    net, x = Net(lambda m, x: m.o(m.a(x) / (of(m.a(x)) + 1)), **mlp()).double(), torch.randn(ROWS).double()
    sym = it.symmetry(net, x, continuous=True)
    assert groups(sym) == (["O(6)"] if rotates else ["S_6 ⋉ {±1}^6"])
    torch.testing.assert_close(net(x), sym.act(sym.random(), net)(x), rtol=1e-9, atol=1e-9)


# -- memory that is shared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "buffers",
    [
        lambda t: {"m1": t, "m2": t.view(6)},
        lambda t: {"m1": t.repeat(2)[:6], "m2": t[0].expand(6)},
    ],
    ids=["two views", "expanded"],
)
def test_buffers_that_lie_in_one_memory(buffers: Callable[[Tensor], dict[str, Tensor]]) -> None:
    net = Net(lambda m, x: m.o((m.a(x) * m.m1).relu() * m.m2), **mlp()).double()
    buffered(net, True, **buffers(torch.rand(6, dtype=torch.float64) + 0.5))
    x = torch.randn(ROWS).double()
    sym = it.symmetry(net, x)
    torch.testing.assert_close(net(x), sym.act(sym.random(), net)(x), rtol=1e-9, atol=1e-9)
    assert sym.certify(net, x).ok


# -- certificates and refusals -----------------------------------------------------------------------------------------


def _running_mean(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.past.mul_(0.9).add_(0.1 * h.mean(0))
    return m.o((h - m.past).relu())


def test_a_state_that_is_used_as_it_is_written_is_certified() -> None:
    net, x = buffered(Net(_running_mean, **mlp()), past=torch.zeros(6)), torch.randn(ROWS)
    assert it.symmetry(net, x).certify(net, x).ok


#: A complex output → the forward of an mlp with six hidden units.
COMPLEX: dict[str, Callable[..., Tensor]] = {
    "two numbers read as one": lambda m, x: torch.view_as_complex(m.o(m.a(x).relu())),
    "conjugates": lambda m, x: torch.view_as_complex(m.o(m.a(x).relu())).conj(),
    "spectra": lambda m, x: torch.fft.rfft(m.o(m.a(x).relu())),
}


@pytest.mark.parametrize("what", COMPLEX)
def test_complex_outputs_are_certified(what: str) -> None:
    net, x = Net(COMPLEX[what], **mlp()), torch.randn(ROWS)
    sym = it.symmetry(net, x)
    assert groups(sym) == ["S_6 ⋉ (R₊)^6"]
    certificate = sym.certify(net, x)
    assert certificate.ok
    assert not certificate.broken


def test_complex_numbers_are_compared_in_both_parts() -> None:
    a = torch.tensor([1 + 2j, 3 - 4j])
    assert relative_error(a, a.clone()) == 0.0
    assert relative_error(a.conj(), a) == 2.0
    assert relative_error(a, a + 0.04j) == pytest.approx(0.01)
    assert relative_error(a, torch.tensor([1 + 2j, complex(3, float("inf"))])) == float("inf")
    net, x = Net(lambda m, x: torch.view_as_complex(m.o(m.a(x).relu())) / 0.0 * 0.0, **mlp()), torch.randn(ROWS)
    sym = it.symmetry(net, x)
    with pytest.raises(InputError, match="returns NaN"):
        sym.certify(net, x)


def _attribute(net: nn.Module, **held: Tensor) -> nn.Module:
    """The network with tensors as plain attributes, which a cast of the module does not reach."""
    vars(net).update(held)
    return net


#: What meets float64 in single precision → the network.
SINGLE: dict[str, Callable[[], nn.Module]] = {
    "a plain attribute": lambda: _attribute(
        Net(lambda m, x: m.mix @ m.o(m.a(x).relu()), **mlp()), mix=torch.randn(3, 3)
    ),
    "a convolution with a plain kernel": lambda: _attribute(
        Net(lambda m, x: F.conv1d(m.o(m.a(x).relu())[:, None], m.blur), **mlp()), blur=torch.randn(1, 1, 2)
    ),
    "a cast to complex": lambda: Net(
        lambda m, x: m.o((torch.complex(m.a(x), m.b(x)) @ m.w.to(torch.complex64)).abs()),
        **mlp(b=LINEAR(4, 6), w=parameter(6, 6)),
    ),
    "a complex attribute": lambda: _attribute(
        Net(lambda m, x: torch.view_as_real(torch.fft.rfft(m.o(m.a(x).relu())) * m.turn), **mlp()),
        turn=torch.randn(2, dtype=torch.complex64),
    ),
    "a complex buffer": lambda: buffered(
        Net(lambda m, x: torch.view_as_real(torch.fft.rfft(m.o(m.a(x).relu())) * m.turn), **mlp()),
        persistent=False,
        turn=torch.randn(2, dtype=torch.complex64),
    ),
    "a plain state that is written": lambda: Net(_plain_state, **mlp()),
}


def _plain_state(m: Any, x: Tensor) -> Tensor:
    """Single precision is written to in place: it stays what it is."""
    past = torch.zeros(3, 6, dtype=torch.float32)
    past.add_(m.a(x))
    return m.o(past.relu())


@pytest.mark.parametrize("what", SINGLE)
def test_certificates_where_single_precision_meets_double(what: str) -> None:
    net, x = SINGLE[what](), torch.randn(ROWS)
    sym = it.symmetry(net, x)
    assert any(wire.group.permutes for wire in sym.wires)
    certificate = sym.certify(net, x)
    assert certificate.ok, certificate
    assert not certificate.broken
    assert certificate.max_error < 1e-13


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_modules_are_refused_by_name() -> None:
    net = Net(lambda m, x: m.o(m.a(x)), a=torch.jit.script(LINEAR(4, 6)), o=LINEAR(6, 2))
    with pytest.raises(InputError, match=r"'a' is a scripted or traced module .* Pass the module it was made from"):
        it.symmetry(net, torch.randn(ROWS))


def test_function_transforms_are_refused_by_name() -> None:
    net = Net(lambda m, x: m.o(torch.func.vmap(m.a)(x)), **mlp())
    with pytest.raises(CaptureError, match=r"function transform such as torch\.vmap"):
        it.symmetry(net, torch.randn(ROWS))


def test_writing_into_data_is_refused_with_a_way_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.a.weight.data *= m.mask
        return m.o(m.a(x).relu())

    net = buffered(Net(forward, **mlp()), mask=torch.ones(6, 4))
    with pytest.raises(CaptureError, match=r"writes into the \.data of a tensor .*self\.weight \* self\.mask"):
        it.symmetry(net, torch.randn(ROWS))


# -- What the engine says about a forward that it cannot follow, or a weight that it leaves alone, is so ---------------


def rows() -> Tensor:
    return torch.randn(4, 3)


def scaled(gate: Callable[[Net], Callable[[Tensor], Tensor]]) -> Net:
    """Units that pass a function made with the network itself at hand, which knows its parameter `scale`."""
    net = Net(lambda m, x: m.head(m.gate(m.a(x))), a=nn.Linear(3, 6), head=nn.Linear(6, 2), scale=parameter(6))
    vars(net)["gate"] = gate(net)
    return net


def hooked(net: Net) -> Callable[[Tensor], Tensor]:
    net.a.register_forward_hook(lambda module, inputs, output: output * net.scale)
    return torch.relu


# -- weights that something else holds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate",
    [lambda net: lambda h: h * net.scale, hooked, lambda net: functools.partial(torch.mul, net.scale)],
    ids=["lambda", "hook", "partial"],
)
def test_a_weight_that_a_function_holds_is_read_and_said_to_be(
    gate: Callable[[Net], Callable[[Tensor], Tensor]],
) -> None:
    net, x = scaled(gate).double(), rows().double()
    sym = certified(it.symmetry(net, x), net, x)
    assert "it is read through something else that holds it" in reasons(sym, "scale")
    assert "never reads" not in reasons(sym, "scale")
    twin = sym.act(sym.random(seed=0), net)
    assert torch.equal(net.scale, twin.get_parameter("scale"))
    assert gap(net, twin, x) < 1e-12
    assert any("S_6" in str(w.group) for w in it.symmetry(scaled(_nothing), x.float()).wires)
    assert not any("S_6" in str(w.group) for w in sym.wires)  # the units meet a tensor that stays


def _nothing(net: Net) -> Callable[[Tensor], Tensor]:
    return torch.relu


def test_a_weight_that_is_read_both_ways_stays() -> None:
    net, x = scaled(lambda net: functools.partial(torch.mul, net.scale)).double(), rows().double()
    net._forward = lambda m, x: m.head(m.gate(m.a(x))) + m.head(m.a(x) * m.scale)
    sym = certified(it.symmetry(net, x), net, x)
    assert "something else that holds it" in reasons(sym, "scale")
    assert gap(net, sym.act(sym.random(seed=0), net), x) < 1e-12


def test_a_weight_that_nothing_reads_is_still_said_to_be_read_by_nothing() -> None:
    net = scaled(_nothing)
    assert reasons(it.symmetry(net, rows()), "scale") == "the forward never reads it with these inputs"


# -- function transforms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.head(torch.vmap(lambda v: torch.relu(m.w @ v))(x)),
        lambda m, x: m.head(torch.vmap(lambda v, w: torch.relu(w @ v), in_dims=(0, None))(x, m.w)),
        lambda m, x: torch.func.jacrev(lambda v: m.head(torch.relu(v @ m.w.T)).sum())(x),
    ],
    ids=["vmap", "vmap of a weight", "jacrev"],
)
def test_a_transform_is_said_to_be_one(forward: Callable[[Any, Tensor], Tensor]) -> None:
    net = Net(forward, w=parameter(6, 3), head=nn.Linear(6, 2))
    with pytest.raises(CaptureError, match=r"torch\.vmap or a transform like it at \S+\.py:\d+, which is") as e:
        it.symmetry(net, rows())
    assert ".data" not in str(e.value)


# -- constant masks ----------------------------------------------------------------------------------------------------

MASK = torch.tensor([True, False, True, True, False, True])


def masked(take: Callable[[Any, Tensor], Tensor]) -> Net:
    net = Net(lambda m, x: m.head(take(m, m.a(x))), a=nn.Linear(3, 6), head=nn.Linear(4, 2))
    net.register_buffer("mask", MASK)
    net.register_buffer("kept", MASK.nonzero()[:, 0])
    return net


@pytest.mark.parametrize(
    "take",
    [
        lambda m, h: h[:, torch.tensor([True, False, True, True, False, True])],
        lambda m, h: h[:, m.mask],
        lambda m, h: h[:, ~(~m.mask)],
        lambda m, h: h[:, m.mask.nonzero()[:, 0]],
        lambda m, h: torch.masked_select(h, m.mask).view(4, 4),
    ],
    ids=["written there", "buffer", "computed", "nonzero", "masked_select"],
)
def test_a_constant_mask_has_positions(take: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"same for all data: keep its positions, mask\.nonzero\(\)\[:, 0\], as a buff"
    ):
        it.symmetry(masked(take), rows())


def test_the_way_out_of_a_constant_mask_is_one() -> None:
    net, x = masked(lambda m, h: h[:, m.kept]).double(), rows().double()
    sym = certified(it.symmetry(net, x), net, x)
    assert "positions along it matter to index" in reasons(sym, "a.weight")


@pytest.mark.parametrize(
    "take",
    [lambda h, w: h[:, h[0] > h[0].median()], lambda h, w: h[:, w[:, 0] > 0], lambda h, w: (h > 0).nonzero() * 1.0],
    ids=["of the data", "of a weight", "nonzero of the data"],
)
def test_a_mask_of_data_has_none(take: Callable[[Tensor, Tensor], Tensor]) -> None:
    net = Net(lambda m, x: take(m.a(x), m.a.weight).sum(), a=nn.Linear(3, 6))
    with pytest.raises(CaptureError, match=r"Keep all positions and mask them") as e:
        it.symmetry(net, rows())
    assert "same for all data" not in str(e.value)


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "word"), [(2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (21, "21st")])
def test_every_third_entry(step: int, word: str) -> None:
    net = Net(lambda m, x: m.head(m.a(x)[:, ::step]), a=nn.Linear(3, step + 1), head=nn.Linear(2, 2))
    assert f"every {word} entry is taken" in reasons(it.symmetry(net, rows()), "a.weight")
