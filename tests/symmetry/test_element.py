"""Elements: the laws of a group, the action on models, features and optimizers, and files.

The network here has every kind of wire at once: heads over grouped keys (fibres), a ReLU (scales), a tanh (signs).
"""

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import Net, certified, gap, parameter, same_weights
from torch import Tensor, nn

import intertwine as it
from intertwine.errors import MismatchError
from intertwine.symmetry.element import Element
from intertwine.symmetry.symmetry import Symmetry

SEEDS = pytest.mark.parametrize("seed", range(3))


def inputs() -> Tensor:
    return torch.randn(4, 9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class Attention(nn.Module):
    """3 key heads of dimension 5, each read by 2 query heads, around a stream of width 7."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(7, 30), nn.Linear(7, 15), nn.Linear(7, 15), nn.Linear(30, 7)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 5)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A residual block with a norm: everything it computes has a module path of its own."""

    def __init__(self, activation: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.RMSNorm(7), nn.Linear(7, hidden), activation, nn.Linear(hidden, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Network(nn.Module):
    """Stem, attention, two residual blocks, a ReLU on the stream, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attention = nn.Linear(2, 7), Attention()
        self.blocks = nn.Sequential(Block(nn.ReLU(), 11), Block(nn.Tanh(), 13))
        self.final, self.act, self.head = nn.Linear(7, 17), nn.ReLU(), nn.Linear(17, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.blocks(x + self.attention(x))
        return self.head(self.act(self.final(x)))


@cache
def found() -> tuple[Network, Symmetry]:
    torch.manual_seed(0)
    net = Network().double()
    return net, certified(it.symmetry(net, inputs()), net, inputs())


# -- laws --------------------------------------------------------------------------------------------------------------


def test_the_network_has_every_kind_of_wire() -> None:
    _, sym = found()
    groups = {str(w.group) for w in sym.wires}
    assert {"(S_2)³", "(S_5 ⋉ (R*)^5)³", "S_3", "S_11 ⋉ (R₊)^11", "S_13 ⋉ {±1}^13"} <= groups
    assert any(len(w.over) == 1 for w in sym.wires)


@SEEDS
def test_associativity(seed: int) -> None:
    _, sym = found()
    f, g, h = (sym.random(seed=3 * seed + k) for k in range(3))
    assert ((f @ g) @ h).distance(f @ (g @ h)) < 1e-12


@SEEDS
def test_identity_and_inverse(seed: int) -> None:
    _, sym = found()
    g, e = sym.random(seed=seed), sym.identity()
    assert (g @ e).distance(g) == 0
    assert (e @ g).distance(g) == 0
    assert (g @ g.inverse()).distance(e) < 1e-12
    assert (g.inverse() @ g).distance(e) < 1e-12
    assert g.inverse().inverse().distance(g) < 1e-12


def test_inverse_of_a_product() -> None:
    _, sym = found()
    g, h = sym.random(seed=0), sym.random(seed=1)
    assert (g @ h).inverse().distance(h.inverse() @ g.inverse()) < 1e-12
    assert (g @ h).distance(h @ g) >= 1, "the group is not commutative, so the order of the factors is tested too"


# -- on models ---------------------------------------------------------------------------------------------------------


@SEEDS
def test_acting_is_a_homomorphism(seed: int) -> None:
    net, sym = found()
    g, h = sym.random(seed=seed), sym.random(seed=seed + 10)
    assert same_weights(sym.act(g @ h, net), sym.act(g, sym.act(h, net)))
    assert not same_weights(sym.act(g @ h, net), sym.act(h, sym.act(g, net)))
    assert same_weights(sym.act(g.inverse(), sym.act(g, net)), net)
    assert same_weights(sym.act(sym.identity(), net), net)


def test_acting_keeps_the_function_and_moves_every_wire() -> None:
    net, sym = found()
    g = sym.random(seed=1)
    moved = sym.act(g, net)
    assert gap(net, moved, inputs()) < 1e-12
    for wire in sym.wires:
        alone = sym.act(g.only(wire.name), net)
        changed = {name for name, t in net.state_dict().items() if not torch.equal(t, alone.state_dict()[name])}
        assert changed == {slot.parameter for slot in wire.slots}, wire


def test_acting_on_a_state_dict() -> None:
    net, sym = found()
    g = sym.random(seed=2)
    state, moved = sym.act_on_state(g, net.state_dict()), sym.act(g, net).state_dict()
    assert state.keys() == moved.keys()
    assert all(torch.equal(state[name], moved[name]) for name in moved)


def test_acting_never_changes_the_model_given() -> None:
    net, sym = found()
    before = copy.deepcopy(net.state_dict())
    x = inputs()
    g = sym.random(seed=3)
    optimizer = torch.optim.Adam(net.parameters())
    sym.act(g, net)
    sym.act_on_state(g, net.state_dict())
    sym.act_on_features(g, "stem", net.stem(x))
    sym.act_on_optimizer(g, optimizer, net)
    sym.certify(net, x)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert torch.equal(x, inputs())


def test_the_moved_model_shares_nothing() -> None:
    net, sym = found()
    moved = sym.act(sym.identity(), net)
    addresses = {p.data_ptr() for p in net.parameters()}
    assert addresses.isdisjoint(p.data_ptr() for p in moved.parameters())


def test_acting_on_a_float32_model_keeps_its_type() -> None:
    net, sym = found()
    moved = sym.act(sym.random(seed=4), copy.deepcopy(net).float())
    assert {p.dtype for p in moved.parameters()} == {torch.float32}


# -- files -------------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    net, sym = found()
    g = sym.random(seed=5)
    g.save(tmp_path / "g.safetensors")
    loaded = Element.load(tmp_path / "g.safetensors")
    assert loaded.wire_specs == g.wire_specs
    assert loaded.signature == g.signature
    assert loaded.distance(g) == 0
    assert (loaded @ g.inverse()).distance(sym.identity()) < 1e-12
    assert same_weights(sym.act(loaded, net), sym.act(g, net))


def test_an_element_is_written_the_same_way_every_time(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    element = it.symmetry(net, torch.zeros(1, 3)).random(seed=0)
    for number in range(6):
        element.save(tmp_path / str(number))
    assert len({(tmp_path / str(number)).read_bytes() for number in range(6)}) == 1


def test_an_element_with_a_wrong_digit_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    file = tmp_path / "g.safetensors"
    it.symmetry(net, torch.zeros(1, 3)).random(seed=0).save(file)
    content = bytearray(file.read_bytes())
    content[-8] ^= 1  # of the last number, a scale, which stays a positive one
    file.write_bytes(content)
    with pytest.raises(it.InputError, match=r"g\.safetensors could not be read .*its checksum is wrong"):
        Element.load(file)


def test_a_loaded_element_serves_a_symmetry_found_anew(tmp_path: Path) -> None:
    net, sym = found()
    g = sym.random(seed=6)
    g.save(tmp_path / "g.safetensors")
    again = it.symmetry(Network().double(), inputs())
    assert same_weights(again.act(Element.load(tmp_path / "g.safetensors"), net), sym.act(g, net))


# -- on features -------------------------------------------------------------------------------------------------------


def features(model: nn.Module, name: str, *args: Tensor) -> Tensor:
    """What a module returns, by a forward hook."""
    kept: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, __, out: kept.append(out.clone()))
    with torch.no_grad():
        model(*args)
    hook.remove()
    return kept[-1]


def assert_features_move(sym: Symmetry, net: nn.Module, name: str, *args: Tensor) -> None:
    g = sym.random(seed=8)
    own, moved = features(net, name, *args), features(sym.act(g, net), name, *args)
    assert torch.allclose(sym.act_on_features(g, name, own), moved, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        *("stem", "attention", "attention.q", "attention.k", "attention.v", "attention.o"),
        *("blocks", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.0.act", "blocks.0.down"),
        *("blocks.1", "blocks.1.up", "blocks.1.act", "blocks.1.down", "final", "act", "head"),
    ],
)
def test_features_of_the_moved_model(name: str) -> None:
    net, sym = found()
    assert_features_move(sym, net, name, inputs())


def test_features_do_move() -> None:
    net, sym = found()
    g = sym.random(seed=8)
    for name in ("stem", "blocks.0", "blocks.0.act", "attention.q"):
        own = features(net, name, inputs())
        assert not torch.allclose(own, features(sym.act(g, net), name, inputs())), name
    own = features(net, "head", inputs())
    assert torch.equal(sym.act_on_features(g, "head", own), own), "nothing acts on the output"


def test_features_of_another_batch() -> None:
    net, sym = found()
    g = sym.random(seed=9)
    x = torch.randn(6, 5, 2, dtype=torch.float64)
    own, moved = features(net, "blocks.1", x), features(sym.act(g, net), "blocks.1", x)
    assert torch.allclose(sym.act_on_features(g, "blocks.1", own), moved)


def test_features_of_a_convolutional_network() -> None:
    forward = lambda m, x: m.fc(m.flat(m.pool(m.relu(m.bn(m.conv(x))))))  # noqa: E731
    parts = {"conv": nn.Conv2d(3, 5, 3), "bn": nn.BatchNorm2d(5), "relu": nn.ReLU(inplace=True)}
    net = Net(forward, **parts, pool=nn.MaxPool2d(2), flat=nn.Flatten(), fc=nn.Linear(30, 2)).double().eval()
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    sym = certified(it.symmetry(net, x), net, x)
    for name in ("conv", "bn", "relu", "pool", "flat", "fc"):
        assert_features_move(sym, net, name, x)


def test_features_before_an_op_in_place() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.a(x)
        y.mul_(m.gain)
        return m.b(y)

    net = Net(forward, a=nn.Linear(2, 5), gain=parameter(5), b=nn.Linear(5, 3)).double()
    sym = certified(it.symmetry(net, inputs()), net, inputs())
    assert_features_move(sym, net, "a", inputs())


def test_features_of_an_identity() -> None:
    net = Net(lambda m, x: m.b(m.same(m.a(x))), a=nn.Linear(2, 5), same=nn.Identity(), b=nn.Linear(5, 3)).double()
    sym = certified(it.symmetry(net, inputs()), net, inputs())
    assert_features_move(sym, net, "same", inputs())


def test_features_in_front_of_a_split_leave_the_symmetry_as_it_is() -> None:
    """Queries, keys and values in one tensor: each third moves in its own way, and looking does not tie them."""

    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.unfold(m.qkv(x)).permute(2, 0, 3, 1, 4).unbind(0)
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    parts = {"qkv": nn.Linear(2, 45), "unfold": nn.Unflatten(-1, (3, 3, 5)), "o": nn.Linear(15, 2)}
    net = Net(forward, **parts).double()
    sym = certified(it.symmetry(net, inputs()), net, inputs())
    g = sym.random(seed=10)
    before = sym.act(g, net)
    own, moved = features(net, "unfold", inputs()), features(before, "unfold", inputs())
    assert torch.allclose(sym.act_on_features(g, "unfold", own), moved)
    assert same_weights(sym.act(g, net), before)
    assert_features_move(sym, net, "qkv", inputs())


# -- on optimizers -----------------------------------------------------------------------------------------------------


def without_scales(g: Element) -> Element:
    """The permutations and signs of an element."""
    moves = {i: m if m.scale is None else replace(m, scale=torch.ones_like(m.scale)) for i, m in g.moves.items()}
    return replace(g, moves=moves)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 9, 2, dtype=torch.float64, generator=generator)
        y = torch.randn(4, 9, 3, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_it_would_have(name: str) -> None:
    start, sym = found()
    make: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[name]
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    train(model, optimizer, range(5))

    g = without_scales(sym.random(seed=11))
    moved = sym.act(g, model)
    carried = make(moved.parameters())
    carried.load_state_dict(sym.act_on_optimizer(g, optimizer, model))
    fresh_model = sym.act(g, model)
    fresh = make(fresh_model.parameters())

    for network, its_own in ((model, optimizer), (moved, carried), (fresh_model, fresh)):
        train(network, its_own, range(5, 10))
    expected = sym.act(g, model)
    pairs = list(zip(expected.parameters(), moved.parameters(), strict=True))
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-9
    # with an empty optimizer the same five steps end elsewhere, so the moved state was needed
    assert not same_weights(expected, fresh_model)


def test_the_optimizer_given_is_not_changed() -> None:
    start, sym = found()
    model = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    sym.act_on_optimizer(sym.random(seed=12), optimizer, model)
    after = optimizer.state_dict()["state"]
    for index, entry in before["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(after[index][k])) for k, v in entry.items())


def test_powers_of_an_element_walk_through_the_group() -> None:
    net, sym = found()
    g = sym.random(seed=13)
    models: list[nn.Module] = [net]
    for _ in range(3):
        models.append(sym.act(g, models[-1]))
    assert same_weights(models[3], sym.act(g @ g @ g, net))
    assert all(not same_weights(a, b) for a, b in pairwise(models))


IN_ANOTHER_PROCESS = """
import hashlib, random, sys, torch, intertwine as it
from intertwine.graph.axes import AxisVariable
from torch import nn

random.seed(int(sys.argv[1]))
hashes = {}  # every process lays atoms out in another order in its sets
AxisVariable.__hash__ = lambda self: hashes.setdefault(id(self), random.getrandbits(40))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(5, 24), nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(24, 6)
        self.a, self.g, self.head = nn.Conv1d(6, 12, 1), nn.Conv1d(12, 24, 1, groups=3), nn.Linear(24, 2)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.head(torch.relu(self.g(torch.relu(self.a(self.o(y).mT)))).mean(-1))

sym = it.symmetry(Net(), torch.zeros(2, 7, 5))
g = sym.random(0)
numbers = b"".join(t.numpy().tobytes() for move in g.moves.values() for _, t in move.items())
print(sym.signature, [str(w) for w in sym.wires], hashlib.sha256(numbers).hexdigest())
"""


def test_an_element_means_the_same_in_another_process() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, str(seed)], capture_output=True, text=True, check=True
        ).stdout
        for seed in range(3)
    ]
    assert len(set(runs)) == 1, runs


def test_a_state_dict_with_tied_weights_moves_under_every_name() -> None:
    net = Net(
        lambda m, i: m.head(m.up(m.emb(i)).relu()), emb=nn.Embedding(7, 5), up=nn.Linear(5, 5), head=nn.Linear(5, 7)
    )
    net.head.weight = net.emb.weight
    ids = torch.arange(7)[None]
    sym = it.symmetry(net, ids)
    moved = copy.deepcopy(net)
    moved.load_state_dict(sym.act_on_state(sym.random(seed=0), net.state_dict()))
    assert torch.allclose(net(ids), moved(ids), atol=1e-5)


def language_model(tied: bool) -> Net:
    """The head is the embedding, or has its shape."""

    def forward(m: Net, i: Tensor) -> Tensor:
        return (m.up(m.emb(i)).relu() + m.emb(i)) @ m.head.weight.T

    net = Net(forward, emb=nn.Embedding(7, 5), up=nn.Linear(5, 5), head=nn.Linear(5, 7, bias=False))
    if tied:
        net.head.weight = net.emb.weight
    return net.double()


def test_a_symmetry_of_tied_weights_moves_an_untied_twin() -> None:
    ids = torch.arange(7)[None]
    sym, twin = it.symmetry(language_model(tied=True), ids), language_model(tied=False)
    g = sym.random(seed=0)
    moved = sym.act(g, twin)
    assert sym.wires
    assert gap(twin, moved, ids) < 1e-12
    state = sym.act_on_state(g, twin.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in moved.state_dict().items())
    assert sym.certify(twin, ids).ok
    assert sym.coverage(twin) == 1.0
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    twin(ids).square().sum().backward()
    optimizer.step()
    moments = sym.act_on_optimizer(g, optimizer, twin)["state"]
    assert not torch.equal(moments[3]["momentum_buffer"], optimizer.state[twin.head.weight]["momentum_buffer"])


def gated(tied: bool) -> Net:
    """One bias in front of a ReLU and of a tanh, or two: two take another group each."""
    net = Net(
        lambda m, x: m.out(m.a(x).relu()) + m.end(m.b(x).tanh()),
        a=nn.Linear(3, 6), b=nn.Linear(3, 6), out=nn.Linear(6, 2), end=nn.Linear(6, 2),
    )  # fmt: skip
    if tied:
        net.b.bias = net.a.bias
    return net.double()


def test_what_is_moved_in_two_ways_cannot_be_one_tensor() -> None:
    sym, net, x = it.symmetry(gated(tied=False), torch.zeros(1, 3).double()), gated(tied=True), torch.zeros(1, 3)
    g = sym.random(seed=0)
    asked = "moves 'a.bias' and 'b.bias' differently, and the given {} holds one tensor"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for refused in (
        lambda: sym.act(g, net),
        lambda: sym.certify(net, x),
        lambda: sym.coverage(net),
        lambda: sym.act_on_optimizer(g, optimizer, net),
    ):
        with pytest.raises(MismatchError, match=asked.format("model")):
            refused()
    with pytest.raises(MismatchError, match=asked.format("state dict")):
        sym.act_on_state(g, net.state_dict())
    apart = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert sym.act_on_state(g, apart).keys() == apart.keys()


def test_what_is_moved_in_one_way_may_be_one_tensor() -> None:
    x = torch.randn(4, 3).double()
    parts = {"a": nn.Linear(3, 6), "b": nn.Linear(3, 6), "out": nn.Linear(6, 2)}
    net = Net(lambda m, x: m.out(m.a(x).relu() + m.b(x)), **parts).double()
    sym = it.symmetry(net, x)
    net.b.bias = net.a.bias
    assert gap(net, sym.act(sym.random(seed=0), net), x) < 1e-12


def test_buffers_that_are_shared_stay_alike_when_a_cast_parts_them() -> None:
    """`Module.double` gives each of two names of one buffer memory of its own."""
    first, second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    first.running_mean, first.running_var = torch.randn(6), torch.rand(6) + 0.5
    second.running_mean, second.running_var = first.running_mean, first.running_var
    net = Net(
        lambda m, x: m.head(m.first(m.stem(x)).relu() + m.second(m.stem(x)).tanh()),
        stem=nn.Linear(3, 6), first=first, second=second, head=nn.Linear(6, 2),
    ).eval()  # fmt: skip
    x = torch.randn(4, 3)
    sym = it.symmetry(net, x)
    wide = copy.deepcopy(net).double()
    assert wide.first.running_var is not wide.second.running_var
    assert gap(wide, sym.act(sym.random(seed=0), wide), x.double()) < 1e-12
    assert sym.certify(net, x).ok


def test_doing_nothing_changes_no_bit_of_a_running_variance() -> None:
    norm = nn.BatchNorm1d(64)
    norm.running_var = torch.rand(64) ** 8
    net = nn.Sequential(nn.Linear(3, 64), norm, nn.ReLU(), nn.Linear(64, 2)).eval()
    sym = it.symmetry(net, torch.zeros(1, 3))
    still = dict(sym.act(sym.identity(), net).named_buffers())
    assert torch.equal(still["1.running_var"], norm.running_var)


def test_an_optimizer_is_not_moved_through_a_fold() -> None:
    net = Net(
        lambda m, x: m.out(m.norm(m.stem(x))),
        stem=nn.Linear(3, 6, bias=False), norm=nn.RMSNorm(6), out=nn.Linear(6, 2),
    )  # fmt: skip
    x = torch.randn(4, 3)
    sym = it.symmetry(net, x, continuous=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(x).sum().backward()
    optimizer.step()
    with pytest.raises(
        it.InputError, match=r"folds 'norm\.weight' into its consumers, .* Fold the model before training"
    ):
        sym.act_on_optimizer(sym.identity(), optimizer, net)


def test_negative_weights_of_a_norm_are_folded_into_what_reads_them_and_zeros_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 6, bias=False), nn.RMSNorm(6), nn.Linear(6, 4)).double()
    weight, x = net.get_parameter("1.weight"), torch.randn(5, 3).double()
    sym = it.symmetry(net, x, continuous=True)
    with torch.no_grad():
        weight.copy_(torch.tensor([1.0, -2.0, 3.0, -0.5, 0.7, -1.0]))
    moved = sym.act(sym.random(seed=0), net)
    assert torch.equal(moved.get_parameter("1.weight"), torch.ones(6).double())
    assert torch.allclose(moved(x), net(x), atol=1e-12)
    with torch.no_grad():
        weight[2] = 0.0
    with pytest.raises(it.InputError, match=r"'1\.weight' cannot be folded into its consumers \(it holds zeros"):
        sym.act(sym.identity(), net)


def test_squares_inside_a_length_are_no_features_that_move() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.pow(2)

    net = Net(
        lambda m, x: m.out((h := m.stem(x)) * torch.rsqrt(m.sq(h).mean(-1, keepdim=True) + 1e-6)),
        stem=nn.Linear(3, 6, bias=False), sq=Square(), out=nn.Linear(6, 2),
    )  # fmt: skip
    sym = it.symmetry(net, torch.randn(4, 3), continuous=True)
    with pytest.raises(it.InputError, match=r"features at 'sq' are squares inside a length"):
        sym.act_on_features(sym.random(seed=0), "sq", torch.randn(4, 6))
