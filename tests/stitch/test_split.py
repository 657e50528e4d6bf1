"""Networks split and stitched: both parts make the whole, skip connections, hooks, flags, copies, and every error."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import Net
from torch import Tensor, nn
from torch.nn import functional as F

import intertwine as it
from intertwine.connect.direct_stitch import direct_stitch
from intertwine.data.batches import Call
from intertwine.errors import InputError, MismatchError
from intertwine.lab.zoo.networks.feedforward import mlp, myrtle
from intertwine.lab.zoo.networks.resnet import resnet
from intertwine.lab.zoo.networks.transformers import gpt, vit
from intertwine.stitch.direct import LinearMap
from intertwine.stitch.network import BatchNormStatistics, PairBatchNormStatistics, StitchedNetwork
from intertwine.stitch.split import SplitPair
from intertwine.stitch.tracing import NoSampleAxis, number_for_one_size, sample_axis

pytestmark = pytest.mark.usefixtures("one_thread")


def called(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def seeded(model: Any, seed: int = 0) -> Any:
    """Random statistics in every BatchNorm, so that buffers count."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator) * 0.3)
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
            module.weight.data.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
            module.bias.data.copy_(torch.randn(module.num_features, generator=generator) * 0.3)
    return model


def small_resnet(shortcut: str = "A") -> Any:
    return seeded(resnet(20, width=0.25, shortcut=shortcut))


class Branching(nn.Module):
    """Cannot be traced: the number of steps depends on the values. Gives a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.head = nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if x.isnan().any():
            raise RuntimeError("a bad batch")
        h = self.act(self.first(x))
        h = h + self.second(h)
        return {"logits": self.head(h)}


def plain_output(y: Any) -> Tensor:
    return y["logits"] if isinstance(y, dict) else y if isinstance(y, Tensor) else y[0]


def paths(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def stitched_at(split: SplitPair, call: Call, point: int) -> Any:
    """The back behind the front with nothing between."""
    features = split.front(call)[point]
    return split.back(point, features.rows, features, call)


# -- 001-C01: halves make the whole ------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: mlp((12, 8, 7, 5)), lambda: torch.randn(5, 12)),
    "myrtle": (lambda: seeded(myrtle(width=4)), lambda: torch.randn(5, 3, 32, 32)),
    "resnet20": (small_resnet, lambda: torch.randn(5, 3, 8, 8)),
    "resnet20 B": (lambda: small_resnet("B"), lambda: torch.randn(5, 3, 8, 8)),
    "vit": (lambda: vit(dim=8, depth=2, heads=2, patch=8, side=16), lambda: torch.randn(5, 3, 16, 16)),
    "gpt": (lambda: gpt(vocab=11, context=8, dim=8, depth=2, heads=2), lambda: torch.randint(0, 11, (5, 6))),
    "untraceable": (Branching, lambda: torch.randn(5, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_001_C01_the_two_halves_of_a_network_make_the_whole(case: str) -> None:
    build, inputs = CASES[case]
    model, example = build(), called(inputs())
    split = SplitPair(model, model, paths(model), example)
    call = called(torch.cat([example[0][0][1:], inputs()]))  # other samples than the example's, and more of them
    whole = plain_output(model.eval()(*call[0]))
    for point, features in enumerate(split.front(call)):
        found = plain_output(split.back(point, features.rows, features, call))
        torch.testing.assert_close(found, whole, rtol=0, atol=0)


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_001_C01_a_half_runs_the_modules_of_that_half_and_no_other(shortcut: str) -> None:
    model = small_resnet(shortcut).eval()
    call = called(torch.randn(4, 3, 8, 8))
    split = SplitPair(model, model, ["layer2.0.relu1", "layer1.1"], call)
    heard: list[str] = []
    handles = [
        m.register_forward_hook(lambda *_, n=n: heard.append(n))
        for n, m in model.named_modules()
        if not [*m.children()]
    ]
    features = split.front(call)
    assert heard[-1] == "layer2.0.relu1"
    assert len(heard) == 3 + 3 * 7 + 3  # stem, three blocks of six modules and an Identity, half a block
    heard.clear()
    split.back(1, features[1].rows, features[1], call)
    for handle in handles:
        handle.remove()
    assert heard[0] == "layer1.2.conv1"
    assert heard[-1] == "fc"


@pytest.mark.models
def test_001_C01_halves_of_a_torchvision_network_inside_and_outside_of_blocks() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = seeded(torchvision.models.resnet18(num_classes=4)).eval()  # its ReLUs work in place
    call = called(torch.randn(3, 3, 32, 32))
    names = ["conv1", "bn1", "relu", "layer1.0.conv1", "layer1.0.relu@1", "layer1.0.relu@2", "layer2.0.bn1", "layer2.0"]
    names += [
        "layer2.0.downsample",
        "layer2.0.downsample:input",
        "layer3.1.relu@1:input".replace("@1:input", ":input@1"),
    ]
    split = SplitPair(model, model, [*names, "avgpool", "fc:input", "fc"], call)
    assert split._back.reason == ""
    with torch.no_grad():
        whole = model(*call[0])
    for point in range(len(split.points)):
        torch.testing.assert_close(stitched_at(split, call, point), whole, rtol=0, atol=0)
    assert {point.back: point.skip for point in split.points}["layer1.0.relu@1"] == "front"
    assert {point.back: point.skip for point in split.points}["layer1.0.relu@2"] == "none"


@pytest.mark.models
def test_001_C01_halves_of_a_huggingface_network_that_cannot_be_traced() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12
    )
    model = transformers.BertForSequenceClassification(config).eval()
    call = called(input_ids=torch.randint(0, 30, (4, 7)), attention_mask=torch.ones(4, 7, dtype=torch.long))
    names = ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.0.intermediate", "bert.pooler"]
    split = SplitPair(model, model, names, call)
    assert "torch.fx cannot trace it" in split._back.reason
    assert [point.skip for point in split.points] == ["back"] * 4
    for point in range(4):
        found = stitched_at(split, call, point).logits
        torch.testing.assert_close(found, model(**call[1]).logits, rtol=0, atol=0)
    with pytest.raises(
        MismatchError, match=r'skip="front" is impossible at .*a network that cannot be traced runs whole'
    ):
        SplitPair(model, model, "bert.pooler", call, skip="front")


class Odd(nn.Module):
    """Steps that are easily got wrong: tuples, sizes read late, overwriting, a shared module, keywords, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True)
        self.conv, self.relu = nn.Conv1d(6, 6, 3, padding=1), nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, twice: bool = False) -> tuple[Tensor, Tensor]:
        samples = x.size(0)
        h, (state, _) = self.rnn(x)
        if mask is not None:
            h = h * mask.unsqueeze(-1)
        scale = torch.exp(self.scale) * torch.full((6, 1), 0.5)
        c = self.conv(h.transpose(1, 2))
        skip = self.relu(c)  # c is overwritten, and read again below
        d = self.relu(self.conv(skip)) * scale + c
        if twice:
            d = d * 2
        return self.head(d.view(samples, 6, x.shape[1]).mean(2)), state.sum(0)


def test_001_C01_tuples_sizes_overwriting_and_repeated_calls() -> None:
    model = Odd().eval()
    x, mask = torch.randn(5, 7, 4), torch.rand(5, 7)
    call = called(x, mask=mask, twice=True)
    names = [
        "rnn",
        "rnn[0]",
        "rnn[1][0]",
        "conv@1",
        "conv:input@1",
        "relu@1",
        "conv@2",
        "relu@2",
        "relu:input@2",
        "head",
    ]
    split = SplitPair(model, model, names, call, layouts={"rnn[1][0]": "cnc"})
    other = called(torch.randn(8, 7, 4), mask=torch.rand(8, 7), twice=True)
    longer = called(torch.randn(4, 9, 4), mask=torch.rand(4, 9), twice=True)
    for given in (call, other, longer):
        whole = model(*given[0], **given[1])
        for point in range(len(split.points)):
            found = stitched_at(split, given, point)
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="A batch has another form than the example"):
        split.front(called(x, mask=mask, twice=False))


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def silent(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        return m.b(h)


def two_faced(m: Net, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * (1 if isinstance(x, Tensor) else 2)  # a trace sees the other face


def two_gradients(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h if isinstance(x, Tensor) else h + h.detach() - h.detach() + (h - h.detach()))


def blocks() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))


def with_hook() -> nn.Module:
    model = blocks()
    model[1].register_forward_hook(lambda _m, _a, y: 2 * y)
    return model


def with_backward_hook() -> nn.Module:
    model = blocks()
    model[1].register_full_backward_hook(lambda _m, gradients, _outer: (3 * gradients[0],))
    return model


def net(forward: Callable[..., Any]) -> nn.Module:
    return Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2))


WRONG: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "own gradient": ("switches gradients", lambda: net(lambda m, x: m.b(Sign.apply(m.a(x))))),
    "no gradient": ("switches gradients", lambda: net(silent)),
    "values": ("cannot trace it", lambda: net(lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.b(-m.a(x)))),
    "hook": ("hooks of its own", with_hook),
    "backward hook": ("cannot trace it", with_backward_hook),
    "two gradients": ("other gradients than the network itself", lambda: net(two_gradients)),
    "two faces": ("another output than the network itself", lambda: net(two_faced)),
}


@pytest.mark.parametrize("case", WRONG)
def test_001_C01_hooks_take_over_where_steps_would_be_wrong(case: str) -> None:
    reason, build = WRONG[case]
    model, x = build(), torch.randn(5, 4)
    place = "0" if isinstance(model, nn.Sequential) else "a"
    split = SplitPair(model, model, place, called(x))
    assert reason in split._back.reason
    features = split.front(called(x))[0]
    rows = features.rows.clone().requires_grad_()
    found = split.back(0, rows, features, called(x))
    torch.testing.assert_close(found, model(x))
    if case == "own gradient":  # the sign passes it on
        found.sum().backward()
        assert rows.grad is not None
        torch.testing.assert_close(rows.grad[:, 0], model.get_parameter("b.weight").detach().sum(0).expand(5, -1))


def test_001_C01_a_trace_leaves_nothing_on_the_network() -> None:
    def remembers(m: Net, x: Tensor) -> Tensor:
        m.last = m.a(x) + torch.ones(4)
        return m.b(m.last)

    model, back, x = net(remembers), blocks(), torch.randn(5, 4)
    model(x)
    names = set(model.__dict__)
    split = SplitPair(model, back, ("b", "2"), called(x))
    assert split._front.reason == ""
    torch.testing.assert_close(stitched_at(split, called(x), 0), model(x))
    assert set(model.__dict__) == names
    assert isinstance(model.__dict__["last"], Tensor)  # and no stand-in of the trace


# -- 001-C02: the stitched network -------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("case", ["resnet20", "vit", "gpt", "untraceable"])
def test_001_C02_stitched_to_itself_with_the_identity_a_network_is_itself(case: str) -> None:
    build, inputs = CASES[case]
    model, x = build(), inputs()
    names = paths(model)[::5]
    split = SplitPair(model, model, names, called(x))
    for point in range(len(names)):
        stitched = StitchedNetwork(split, point, LinearMap(torch.eye(split.points[point].inputs)))
        torch.testing.assert_close(plain_output(stitched(x)), plain_output(model.eval()(x)), rtol=1e-5, atol=1e-6)
    assert hooks(model) == 0


def test_001_C02_hooks_and_flags_are_gone_after_an_exception_too() -> None:
    model, other = Branching(), Branching()
    other.second.weight.requires_grad_(False)
    x = torch.randn(5, 6)
    split = SplitPair(model, other, "second", called(x))
    bad = torch.full((5, 6), math.nan)
    features = split.front(called(x))[0]
    for run in (lambda: split.front(called(bad)), lambda: split.back(0, features.rows, features, called(bad))):
        with pytest.raises(RuntimeError, match="a bad batch"):
            run()
    assert hooks(model) == hooks(other) == 0
    assert all(m.training for m in [*model.modules(), *other.modules()])
    assert all(p.requires_grad for p in model.parameters())
    assert [n for n, p in other.named_parameters() if not p.requires_grad] == ["second.weight"]
    plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        SplitPair(plain, plain, "1", called(torch.randn(4, 3)))
    assert plain.training
    assert hooks(plain) == 0


def test_001_C02_nothing_of_the_two_networks_is_touched() -> None:
    a, b = small_resnet(), small_resnet("B")
    b.layer2.eval()
    for model in (a, b):
        for i, weight in enumerate(model.parameters()):
            weight.grad = torch.full_like(weight, 0.5)
            weight.requires_grad_(i % 3 > 0)
    before = copy.deepcopy([a, b])
    x = torch.randn(6, 3, 8, 8)
    stitched = StitchedNetwork(SplitPair(a, b, "layer1.0.relu1", called(x)), 0, LinearMap(torch.eye(4), torch.zeros(4)))
    stitched.train()
    stitched(x).square().sum().backward()
    stitched.eval()
    stitched.double().float()
    for model, old in zip((a, b), before, strict=True):
        assert [m.training for m in model.modules()] == [m.training for m in old.modules()]
        for (name, new), (_, same) in zip(model.named_parameters(), old.named_parameters(), strict=True):
            assert new.requires_grad == same.requires_grad, name
            assert torch.equal(new, same)
            assert new.grad is not None
            assert torch.equal(new.grad, torch.full_like(new, 0.5)), name
        for (name, new), (_, same) in zip(model.named_buffers(), old.named_buffers(), strict=True):
            assert torch.equal(new, same), name
    assert sorted(stitched.state_dict()) == ["bias", "weight"]
    assert stitched.weight.grad is not None
    assert stitched.weight.grad.abs().sum() > 0
    assert torch.is_grad_enabled()


def test_001_C02_copies_share_the_networks_and_pickles_are_refused() -> None:
    model: Any = mlp((6, 5, 3))
    x = torch.randn(4, 6)
    stitched = StitchedNetwork(SplitPair(model, model, "2", called(x)), 0, LinearMap(torch.eye(5)))
    other = copy.deepcopy(stitched)
    assert other.split is stitched.split
    with torch.no_grad():
        other.weight.zero_()
    torch.testing.assert_close(stitched(x), model(x))
    torch.testing.assert_close(other(x), model[3].bias.expand(4, 3))
    with pytest.raises(InputError, match="A SplitPair cannot be pickled"):
        pickle.dumps(stitched)
    assert repr(stitched).startswith("StitchedNetwork(Sequential 2 → Sequential 2, 5 → 5")
    assert repr(stitched.split) == "SplitPair(Sequential → Sequential, at 2 → 2)"


def test_001_C02_wrapped_networks_are_seen_through() -> None:
    model, x = mlp((6, 5, 3)), torch.randn(4, 6)
    wrapped = nn.DataParallel(model)
    split = SplitPair(wrapped, model, "2", called(x))
    assert split.front_model is wrapped
    torch.testing.assert_close(stitched_at(split, called(x), 0), model(x))


def test_001_C02_other_layers_and_widths_meet_through_a_map() -> None:
    a, b = mlp((6, 8, 7, 3)), mlp((6, 5, 3))
    x = torch.randn(4, 6)
    split = SplitPair(a, b, [("4", "1"), ("2", "2")], called(x))
    matrix, bias = torch.randn(5, 7), torch.randn(5)
    stitched = StitchedNetwork(split, 0, LinearMap(matrix, bias))
    torch.testing.assert_close(stitched(x), b[2:](a[:5](x) @ matrix.T + bias))
    assert (split.points[1].inputs, split.points[1].outputs) == (8, 5)
    with pytest.raises(MismatchError, match=r"The map is 7 → 5, but the stitch point '2' → '2' has 8 → 5 channels"):
        StitchedNetwork(split, 1, LinearMap(matrix))


def test_001_C02_precisions_meet_in_that_of_the_back() -> None:
    a, b = small_resnet(), small_resnet().double()
    x = torch.randn(4, 3, 8, 8)
    split = SplitPair(a, b, "layer1.0.relu1", called(x))
    assert split.points[0].skip == "front"
    features = split.front(called(x))[0]
    assert features.rows.dtype == features.skip_values[0].dtype == torch.float64
    assert stitched_at(split, called(x), 0).dtype == torch.float64
    stitched = StitchedNetwork(split, 0, LinearMap(torch.eye(4)))
    stitched(x).sum().backward()
    assert stitched.weight.grad is not None
    assert stitched.weight.grad.dtype == torch.float32


# -- 000-G27: where the map stands, and statistics ---------------------------------------------------------------------


def test_000_G27_the_map_stands_behind_the_activation_and_buffers_are_used() -> None:
    a, b = seeded(myrtle(width=4), 1).eval(), seeded(myrtle(width=4), 2).eval()
    x, matrix = torch.randn(5, 3, 32, 32), torch.randn(4, 4)
    split = SplitPair(a, b, ["2", "1"], called(x))  # a ReLU, and the BatchNorm before it
    for point, place in enumerate((2, 1)):
        features = torch.einsum("oc,nchw->nohw", matrix, a[: place + 1](x))
        expected = b[place + 1 :](features)
        torch.testing.assert_close(StitchedNetwork(split, point, LinearMap(matrix))(x), expected, rtol=1e-4, atol=1e-5)
    before = StitchedNetwork(split, 0, LinearMap(matrix))(x)
    b[4].running_mean.add_(1.0)
    assert not torch.allclose(StitchedNetwork(split, 0, LinearMap(matrix))(x), before, atol=1e-3)


def test_000_G27_statistics_of_a_stitch_take_the_place_of_those_of_the_networks() -> None:
    model = seeded(myrtle(width=4)).eval()
    x = torch.randn(5, 3, 32, 32)
    split = SplitPair(model, model, "5", called(x))
    pair = PairBatchNormStatistics(BatchNormStatistics(model), BatchNormStatistics(model))
    stitched = StitchedNetwork(split, 0, LinearMap(torch.eye(4)), pair)
    torch.testing.assert_close(stitched(x), model(x))
    first, last = "1:mean", "12:mean"
    for statistics in (pair.front, pair.back):  # of each half only its own layers count
        held = dict(statistics.named_buffers())
        held[first].sub_(1.0 if statistics is pair.front else 7.0)
        held[last].sub_(2.0 if statistics is pair.back else 7.0)
    moved = copy.deepcopy(model)
    moved[1].running_mean.sub_(1.0)
    moved[12].running_mean.sub_(2.0)
    torch.testing.assert_close(stitched(x), moved(x))
    assert len(stitched.state_dict()) == 1 + 2 * 8


# -- 000-G19: residual blocks ------------------------------------------------------------------------------------------


def matrix_at(sym: Any, g: Any, place: str, channels: int) -> Tensor:
    """How features move at a place, as a matrix: the images of the unit vectors are its columns."""
    units = torch.eye(channels, dtype=torch.float64)[:, :, None, None].expand(-1, -1, 8, 8)
    return sym.act_on_features(g, place, units)[:, :, 0, 0].T


def test_000_G19_a_moved_copy_fits_at_block_ends_and_not_inside_of_blocks() -> None:
    model = small_resnet().double().eval()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    sym = it.symmetry(model, x)
    g = sym.random(seed=3)
    moved = sym.act(g, model)
    end, inside = matrix_at(sym, g, "layer1.0", 4), matrix_at(sym, g, "layer1.1.relu1", 4)
    assert not torch.allclose(end, torch.eye(4, dtype=torch.float64))
    with torch.no_grad():
        whole = model(x)
        # at the end of a block
        split = SplitPair(model, moved, "layer1.0", called(x))
        assert split.points[0].skip == "none"
        fitted = StitchedNetwork(split, 0, LinearMap(end))(x)
        assert (fitted - whole).abs().max() < 1e-9 * whole.abs().max()
        # inside, the skip path of the front: equation (E.56), where A⁻¹ stays on the skip
        split = SplitPair(model, moved, "layer1.1.relu1", called(x), skip="front")
        assert split.points[0].crossing == ("layer1_0_relu2",)
        found = StitchedNetwork(split, 0, LinearMap(inside))(x)
        block = model.layer1[1]
        z = model.layer1[0](model.relu(model.bn1(model.conv1(x))))
        branch = block.bn2(block.conv2(block.relu1(block.bn1(block.conv1(z)))))
        skip = torch.einsum("oc,nchw->nohw", torch.linalg.inv(end), z)
        rest = model.layer1[2](block.relu2(branch + skip))
        formula = model.fc(model.pool(model.layer3(model.layer2(rest))).flatten(1))
        assert (found - formula).abs().max() < 1e-9 * whole.abs().max()
        assert (found - whole).abs().max() > 1e-2 * whole.abs().max()
        # inside, the back's own skip path: it has moved with the back, so the moved copy fits here too
        split = SplitPair(model, moved, "layer1.1.relu1", called(x), skip="back")
        found = StitchedNetwork(split, 0, LinearMap(inside))(x)
        assert (found - whole).abs().max() < 1e-9 * whole.abs().max()


def test_000_G19_the_network_that_feeds_the_skip_connection_is_chosen_and_reported() -> None:
    a, b, wide = small_resnet(), small_resnet(), resnet(20, width=0.5)
    call = called(torch.randn(4, 3, 8, 8))

    def skip(front: nn.Module, back: nn.Module, at: Any, asked: str | None = None) -> str:
        return SplitPair(front, back, at, call, skip=asked).points[0].skip

    assert skip(a, b, "layer1.1") == skip(a, b, "layer1.1", "back") == skip(wide, b, "layer1.1", "front") == "none"
    assert skip(a, b, "layer1.1.conv1") == "front"
    assert skip(a, b, "layer1.1.conv1", "back") == "back"
    assert skip(wide, b, "layer1.1.conv1") == "back"  # the same steps, of other sizes
    assert skip(a, b, ("layer1.0.conv1", "layer1.1.conv1")) == "back"
    assert skip(small_resnet("B"), b, "layer1.1.conv1") == "back"
    for front, back, at, words in (
        (
            resnet(20, width=0.5, shortcut="B"),
            small_resnet("B"),
            "layer1.1.conv1",
            "the values of the skip connection have",
        ),
        (wide, b, "layer1.1.conv1", "the networks have different programs"),  # they pad with other numbers of zeros
        (a, b, ("layer1.0.conv1", "layer1.1.conv1"), "the networks have different programs, or different steps"),
    ):
        with pytest.raises(MismatchError, match=f'skip="front" is impossible at .layer1.1.conv1.: {words}'):
            skip(front, back, at, "front")
    with pytest.raises(InputError, match=r"Unknown skip 'fron'. Did you mean 'front'\?"):
        skip(a, b, "layer1.1", "fron")


def test_000_G19_the_back_feeds_its_skip_connection_with_the_same_samples() -> None:
    a, b = small_resnet().eval(), seeded(resnet(20, width=0.5), 5).eval()
    x = torch.randn(4, 3, 8, 8)
    split = SplitPair(a, b, "layer1.0.relu1", called(x))
    matrix = torch.randn(8, 4)
    found = StitchedNetwork(split, 0, LinearMap(matrix))(x)
    with torch.no_grad():
        first = a.layer1[0]
        h = first.relu1(first.bn1(first.conv1(a.relu(a.bn1(a.conv1(x))))))
        block, skip = b.layer1[0], b.relu(b.bn1(b.conv1(x)))
        out = block.relu2(block.bn2(block.conv2(torch.einsum("oc,nchw->nohw", matrix, h))) + skip)
        for rest in (*b.layer1[1:], b.layer2, b.layer3, b.pool):
            out = rest(out)
        expected = b.fc(out.flatten(1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- 004-L18 -----------------------------------------------------------------------------------------------------------


def test_004_L18_with_the_identity_it_is_a_direct_stitch() -> None:
    torch.manual_seed(1)
    a, b = small_resnet().eval(), seeded(resnet(20, width=0.25), 7).eval()
    x, y = torch.randn(12, 3, 8, 8), torch.randint(0, 10, (12,))
    names = ["conv1", "layer1.0.conv1", "layer1.1", "layer2.0.relu1", "layer2.2", "layer3.1.bn2", "fc"]
    expected = direct_stitch(a, b, [(x, y)], names)
    split = SplitPair(a, b, names, called(x), skip="back")
    with torch.no_grad():
        for point, one in enumerate(expected.layers):
            outputs = stitched_at(split, called(x), point)
            assert one.layer == names[point]
            assert F.cross_entropy(outputs, y).item() == pytest.approx(one.loss, rel=1e-5)


# -- several copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["resnet20", "vit", "gpt", "untraceable"])
@pytest.mark.parametrize("skip", ["front", "back"])
def test_several_copies_at_once_are_as_many_separate_runs(case: str, skip: str) -> None:
    build, inputs = CASES[case]
    a, b = build(), build()
    x = inputs()
    names = {"resnet20": "layer2.0.relu1", "vit": "blocks.0.linear1", "gpt": "blocks.1.attention.qkv"}.get(case, "act")
    if case == "untraceable":
        skip = "back"
    split = SplitPair(a, b, names, called(x[:4]), skip=skip)
    features = split.front(called(x))[0]
    maps = [torch.randn(split.points[0].outputs, split.points[0].inputs, requires_grad=True) for _ in range(3)]
    rows = torch.cat([features.rows @ m.T for m in maps])
    together = plain_output(split.back(0, rows, features, called(x), copies=3)).chunk(3)
    gradients = torch.autograd.grad(torch.cat(together).square().sum(), maps)
    for m, y, gradient in zip(maps, together, gradients, strict=True):
        alone = plain_output(split.back(0, features.rows @ m.T, features, called(x)))
        torch.testing.assert_close(y, alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(alone.square().sum(), m)[0], rtol=1e-3, atol=1e-4)


def test_copies_keep_time_first_values_and_sizes_apart() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        samples = x.size(0)
        h = m.a(x)  # (samples, 6)
        turned = m.side(x).t()  # samples along axis 1
        y = m.b(h).reshape(samples, 2, 3).flatten(1)
        return (y.t() + turned).t() * (1 + y.size(0) / samples)

    model = Net(forward, a=nn.Linear(4, 6), side=nn.Linear(4, 6), b=nn.Linear(6, 6))
    x = torch.randn(5, 4)
    # a is cut after x.size(0) and before side, so sizes are all that crosses; side is cut before
    for at in ("a", "b:input"):
        split = SplitPair(model, model, at, called(x))
        assert split._back.reason == ""
        features = split.front(called(x))[0]
        rows = torch.cat([features.rows * k for k in (1, 2, 3)])
        together = split.back(0, rows, features, called(x), copies=3).chunk(3)
        for k, y in zip((1, 2, 3), together, strict=True):
            torch.testing.assert_close(y, split.back(0, features.rows * k, features, called(x)))


def test_copies_that_would_mix_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2))
    x = torch.randn(5, 4)
    split = SplitPair(model, model, "0", called(x))
    features = split.front(called(x))[0]
    with pytest.raises(InputError, match=r"cannot run 2 copies at once .* depends on other samples of the batch"):
        split.back(0, torch.cat([features.rows] * 2), features, called(x), copies=2)
    with pytest.raises(MismatchError, match=r"The rows at '0' are \(5, 1, 3\), but 1 × 5 samples need \(5, 1, 6\)"):
        split.back(0, torch.zeros(5, 1, 3), features, called(x))
    mixing = Net(lambda m, x: m.b(m.a(x)) * x.square().sum(), a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    split = SplitPair(mixing, mixing, "a", called(x))
    torch.testing.assert_close(stitched_at(split, called(x), 0), mixing(x))
    with pytest.raises(InputError, match=r"it depends on other samples of the batch. Run them one by one"):
        split.back(0, torch.cat([features.rows] * 2), features, called(x), copies=2)


def test_features_are_not_overwritten_by_a_back_that_works_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    x = torch.randn(5, 4)
    split = SplitPair(model, model, ["0", "1"], called(x))
    features = split.front(called(x))[0]
    torch.testing.assert_close(features.rows[:, 0], model[0](x))  # before the ReLU
    rows = features.rows.clone().requires_grad_()
    first = split.back(0, rows, features, called(x))
    torch.testing.assert_close(split.back(0, rows, features, called(x)), first)
    assert torch.equal(rows, features.rows)
    torch.testing.assert_close(split.targets(called(x))[1][:, 0], model[:2](x))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_invalid_stitch_points_are_refused() -> None:
    model = Net(lambda m, x: m.b(m.a(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 2), unused=nn.Linear(1, 1))
    call = called(torch.randn(5, 4))
    for at, words in {
        "": "'' is the output of the whole network",
        ":input": "':input' is the input of the whole network",
        "c": "Unknown layer 'c': the model has no module of that path",
        "unused": "The layer 'unused' has no features: the forward did not call that module",
        "a": "the forward called that module 2 times. Name one call: a@1, a@2",
        "a@3": "the forward called that module 2 times. Name call 2 or less",
    }.items():
        with pytest.raises(InputError, match=words):
            SplitPair(model, model, at, call)
    with pytest.raises(InputError, match=r"at=\[\] names no stitch point. Give a module path of both networks"):
        SplitPair(model, model, [], call)
    with pytest.raises(InputError, match=r"Unknown resize 'bilinea'. Did you mean 'bilinear'\?"):
        SplitPair(model, model, "b", call, resize="bilinea")
    with pytest.raises(InputError, match=r"layouts names 'bb', which is no stitch point. Did you mean 'b'\?"):
        SplitPair(model, model, "b", call, layouts={"bb": "nc"})
    ids = gpt(vocab=11, context=8, dim=8, depth=1, heads=2)
    with pytest.raises(InputError, match="The features at 'tokens:input' are int64"):
        SplitPair(ids, ids, "tokens:input", called(torch.zeros(3, 4, dtype=torch.long)))


def test_a_layout_that_contradicts_the_samples_is_refused() -> None:
    model = Net(lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh()).mean(0), a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    call = called(torch.randn(5, 7, 4))
    with pytest.raises(InputError, match=r"The tensor at 'a' is \(7, 3, 6\) for 3 samples"):
        SplitPair(model, model, "a", call)
    split = SplitPair(model, model, "a", call, layouts={"a": "tnc"})
    features = split.front(call)[0]
    assert tuple(features.rows.shape) == (5, 7, 6)
    torch.testing.assert_close(stitched_at(split, call, 0), model(*call[0]))
    with pytest.raises(InputError, match=r"At 'a' the samples are on axis 1 of a tensor \(9, 3, 6\)"):
        SplitPair(model, model, "a", called(torch.randn(5, 9, 4)))


def test_a_network_that_takes_one_number_of_samples_alone_passes_one_copy() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        samples = x.size(0)
        return m.b(m.a(x.reshape(5, 4)).reshape(samples, 6))

    model, call = Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 2)), called(torch.randn(5, 4))
    split = SplitPair(model, model, "a", call)
    torch.testing.assert_close(stitched_at(split, call, 0), model(*call[0]))
    features = split.front(call)[0]
    with pytest.raises(InputError, match=r"cannot run 2 copies at once .* does not run on its example repeated twice"):
        split.back(0, torch.cat([features.rows] * 2), features, call, copies=2)


def test_patterns_match_the_same_layers_of_both_networks() -> None:
    a, b = small_resnet(), small_resnet("B")
    call = called(torch.randn(4, 3, 8, 8))
    split = SplitPair(a, b, "layer1.*.relu?", call)
    assert [point.front for point in split.points] == [f"layer1.{i}.relu{j}" for i in range(3) for j in (1, 2)]
    with pytest.raises(MismatchError, match=r"stands for 3 layers of the front, but 'layer1' for 1 of the back"):
        SplitPair(a, b, ("layer1.*", "layer1"), call)


def test_norms_without_running_statistics_are_left_out() -> None:
    kept, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
    assert [name for name, _ in BatchNormStatistics(nn.Sequential(kept, plain)).named_buffers()] == ["0:mean", "0:var"]


def test_a_number_known_for_one_batch_size_is_not_used_for_another() -> None:
    number = number_for_one_size(7, 4)
    assert number(4) == 7
    with pytest.raises(InputError, match="known only for 4 samples, but the batch has 5"):
        number(5)


def test_what_depends_on_the_other_samples_has_no_axis_of_samples() -> None:
    x, y = torch.randn(3), torch.randn(3)
    for first, second in ((x, y), (y, x)):
        with pytest.raises(NoSampleAxis, match="depends on other samples"):
            sample_axis(first, second, x)
