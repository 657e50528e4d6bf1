"""What cannot work is refused with a message that helps, what is not understood is frozen, and no model is touched."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from captured import capture
from networks import Net, prove
from safetensors.torch import save_file
from torch import Tensor, nn

import intertwine as it
from intertwine.connect.repair import repair
from intertwine.data.batches import labelled_batches
from intertwine.data.batchnorm import reset_statistics
from intertwine.data.evaluate import _fitting
from intertwine.data.weights import path_between
from intertwine.errors import CaptureError, InputError, MismatchError
from intertwine.inspect.rotation_penalty import rotation_penalty


def rows(width: int = 3) -> Tensor:
    return torch.randn(4, width)


def mlp(hidden: int = 5) -> Net:
    return Net(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(3, hidden), b=nn.Linear(hidden, 2))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Fails if anything about the model is different afterwards."""
    before = {name: (t, t.detach().clone()) for name, t in tensors(model)}
    modes = [m.training for m in model.modules()]
    yield
    after = dict(tensors(model))
    assert after.keys() == before.keys()
    for name, (old, values) in before.items():
        assert after[name] is old, f"{name} was replaced"
        assert old.is_meta or torch.equal(old.nan_to_num(), values.nan_to_num()), f"{name} was changed"
    assert [m.training for m in model.modules()] == modes


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thing", [{"w": torch.ones(2)}, torch.relu, "resnet18", None], ids=["dict", "function", "str", "None"]
)
def test_not_a_module(thing: Any, unchecked: None) -> None:
    with pytest.raises(it.InputError, match=r"must be a torch\.nn\.Module, but is a"):
        it.symmetry(thing, rows())


def test_meta_device() -> None:
    with torch.device("meta"):
        net = mlp()
    with untouched(net), pytest.raises(it.InputError, match=r"'a\.weight' lies on the meta device.*[Mm]aterialise"):
        it.symmetry(net, rows())


def test_quantised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the quantiser is on its way out of torch and says so
        net = torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, dtype=torch.qint8)
    with untouched(net), pytest.raises(it.InputError, match=r"quantised layer.*before it is quantised"):
        it.symmetry(net, rows())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(5, dtype=torch.complex64), r"'gain' is complex \(torch\.complex64\)"),
        (torch.ones(5, dtype=torch.int32), r"'gain' is not floating point \(torch\.int32\)"),
    ],
    ids=["complex", "integer"],
)
def test_parameters_that_are_not_real(values: Tensor, message: str) -> None:
    gain = nn.Parameter(values, requires_grad=False)
    net = Net(lambda m, x: (m.a(x) * m.gain).abs(), a=nn.Linear(3, 5), gain=gain)
    with untouched(net), pytest.raises(it.InputError, match=message):
        it.symmetry(net, rows())


# -- the example inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "was called with no inputs"),
        ((torch.ones(4, 7),), r"float32\(4, 7\).*its own forward raised RuntimeError.*Pass example inputs"),
        ((torch.ones(4, 3), torch.ones(4, 3)), "its own forward raised TypeError"),
        (("three words",), "called with str"),
    ],
    ids=["none", "wrong shape", "too many", "text"],
)
def test_example_inputs(args: tuple[object, ...], message: str) -> None:
    net = mlp()
    with untouched(net), pytest.raises(it.InputError, match=message):
        it.symmetry(net, *args)


@pytest.mark.parametrize(
    "x", [torch.ones(4, 7), torch.ones(4, 3, dtype=torch.int64)], ids=["wrong shape", "wrong type"]
)
def test_example_inputs_of_a_certificate(x: Tensor) -> None:
    net = mlp()
    sym = it.symmetry(net, rows())
    with untouched(net), pytest.raises(it.InputError, match="forward raised"):
        sym.certify(net, x)


# -- the forward -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "net",
    [
        Net(lambda m, x: m.b(F.dropout(m.a(x), 0.5)), a=nn.Linear(3, 5), b=nn.Linear(5, 2)),
        nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Linear(5, 2)),
        nn.Sequential(nn.Linear(3, 5), nn.AlphaDropout(0.3), nn.Linear(5, 2)),
        Net(lambda m, x: m.b(m.a(x) + torch.randn(5)), a=nn.Linear(3, 5), b=nn.Linear(5, 2)),
        Net(lambda m, x: m.b(F.rrelu(m.a(x), training=True)), a=nn.Linear(3, 5), b=nn.Linear(5, 2)),
    ],
    ids=["functional dropout", "dropout", "alpha dropout", "noise", "random slope"],
)
def test_forward_that_draws_random_numbers(net: nn.Module) -> None:
    with untouched(net), pytest.raises(it.InputError, match=r"draws random numbers.*Call model\.eval\(\) first"):
        it.symmetry(net.train(), rows())


def test_dropout_inside_attention() -> None:
    net = nn.TransformerEncoderLayer(6, 2, 5, dropout=0.0, batch_first=True)
    net.self_attn.dropout = 0.5
    with untouched(net), pytest.raises(it.InputError, match="draws random numbers"):
        it.symmetry(net.train(), torch.randn(2, 4, 6))


def test_dropout_between_recurrent_layers() -> None:
    net = nn.LSTM(3, 5, num_layers=2, dropout=0.5, batch_first=True)
    with untouched(net), pytest.raises(it.InputError, match="draws random numbers"):
        it.symmetry(net.train(), torch.randn(2, 4, 3))


def test_dropout_in_evaluation_mode_is_fine() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.ReLU(), nn.Linear(5, 2)).eval()
    prove(net, rows(), wires=["S_5 ⋉ (R₊)^5 on 0.weight[0], 0.bias[0], 3.weight[1]"])


def line_of(function: Callable[..., Tensor], text: str) -> int:
    """The number of the line of this file in which a function says `text`."""
    code, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(code) if text in line)


class Two(nn.Module):
    """Two layers; what happens between them is written below."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)


class Nonzero(Two):
    """Rows chosen by their positions: how many there are depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        return self.b(hidden[hidden.sum(-1).nonzero().squeeze(-1)])


class Masked(Two):
    """Rows chosen by a boolean mask."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        return self.b(hidden[x.sum(-1) > 0])


class Counting(Two):
    """A decision about the size of a boolean mask."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        kept = hidden[hidden > 0]
        return self.b(hidden) + (kept.mean() if kept.numel() > 3 else 0)


class Branching(Two):
    """One of two functions, by the sign of a sum."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if x.sum() > 0:
            return self.b(hidden.relu())
        return self.b(hidden.tanh())


class Converting(Two):
    """A Python number made of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).relu()
        steps = int(hidden.abs().max().item()) + 1
        return self.b(hidden * len(range(steps)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Nonzero, "nonzero()"),
        (Masked, "hidden[x.sum"),
        (Counting, "kept.numel()"),
        (Branching, "if x.sum()"),
        (Converting, "int(hidden"),
    ],
)
def test_forward_that_decides_by_its_data(kind: type[Two], text: str) -> None:
    net = kind()
    where = f"test_invalid_input.py:{line_of(kind.forward, text)}"
    with untouched(net), pytest.raises(CaptureError, match=f"decides by the values of its data at {where}"):
        it.symmetry(net, rows())


def test_forward_that_leaves_torch() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.b(torch.from_numpy(m.a(x).detach().numpy()))

    net = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    with untouched(net), pytest.raises(CaptureError, match=r"torch\.export stopped at test_invalid_input\.py"):
        it.symmetry(net, rows())


# -- weights that cannot be compared -----------------------------------------------------------------------------------


def test_nan_weights() -> None:
    net = mlp()
    sym = it.symmetry(net, rows())  # the symmetry is of the architecture: values do not matter to it
    with torch.no_grad():
        net.b.weight[0, 1] = float("nan")
    assert it.symmetry(net, rows()).signature == sym.signature
    with untouched(net), pytest.raises(it.InputError, match=r"'b\.weight' holds NaN.*[Rr]epair"):
        sym.certify(net, rows())


def test_nan_outputs() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu()) * x.sum().log(), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    sym = it.symmetry(net, rows())
    with untouched(net), pytest.raises(it.InputError, match=r"returns NaN on the example inputs"):
        sym.certify(net, -torch.ones(4, 3))


def test_a_model_that_ignores_its_weights_proves_nothing() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu()) * 0 + x[:, :2], a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    certificate = it.symmetry(net, rows()).certify(net, rows())
    assert certificate.vacuous
    assert "vacuous" in repr(certificate)


# -- things that do not belong together --------------------------------------------------------------------------------


def test_element_of_another_architecture() -> None:
    net, other = mlp(5), mlp(7)
    sym, g = it.symmetry(net, rows()), it.symmetry(other, rows()).random()
    for use in (lambda: sym.act(g, net), lambda: sym.act_on_features(g, "a", rows(5)), lambda: sym.act_on_state(g, {})):
        with untouched(net), pytest.raises(MismatchError, match="symmetry of another architecture"):
            use()
    with pytest.raises(MismatchError, match="different symmetries"):
        sym.random() @ g


def test_what_is_not_an_element(unchecked: None) -> None:
    net, matrix = mlp(), cast(Any, torch.eye(5))
    with untouched(net), pytest.raises(it.InputError, match="g must be an Element, but is a Tensor"):
        it.symmetry(net, rows()).act(matrix, net)


def test_model_of_another_shape() -> None:
    sym, other = it.symmetry(mlp(5), rows()), mlp(7)
    message = r"'a\.weight' has shape \(5, 3\); in the given model it has shape \(7, 3\)"
    for use in (lambda: sym.act(sym.random(), other), lambda: sym.coverage(other), lambda: sym.certify(other, rows())):
        with untouched(other), pytest.raises(MismatchError, match=message):
            use()


def test_model_with_other_names() -> None:
    sym = it.symmetry(mlp(5), rows())
    other = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    with untouched(other), pytest.raises(MismatchError, match=r"'a\.weight'.*it does not exist"):
        sym.act(sym.random(), other)


def test_optimizer_of_another_model() -> None:
    net, other = mlp(), mlp()
    sym = it.symmetry(net, rows())
    optimizer = torch.optim.Adam(other.parameters())
    with untouched(net), pytest.raises(MismatchError, match="parameters that are not the model's"):
        sym.act_on_optimizer(sym.random(), optimizer, net)


def test_a_file_without_an_element(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(3)}, file)
    with pytest.raises(it.InputError, match=r"holds tensors but no symmetry element.*Element\.save"):
        it.Element.load(file)


def test_unknown_module_path() -> None:
    net = mlp()
    sym = it.symmetry(net, rows())
    with pytest.raises(it.InputError, match=r"'a\.relu'.*Modules with features: a"):
        sym.act_on_features(sym.random(), "a.relu", rows(5))


@pytest.mark.parametrize("shape", [(4, 6), (5,), (4, 1, 5), (4, 0)], ids=str)
def test_features_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    net = mlp()
    sym = it.symmetry(net, rows())
    with pytest.raises(it.InputError, match=r"features at 'a' must have the shape \(4, 5\) .*, but have \("):
        sym.act_on_features(sym.random(), "a", torch.zeros(shape))


def test_unknown_wire() -> None:
    g = it.symmetry(mlp(), rows()).random()
    with pytest.raises(it.InputError, match=r"There is no wire 'nothing'.*Its wires: a"):
        g["nothing"]


def test_function_transform_inside_a_forward() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(torch.relu)(self.a(x))

    with pytest.raises(CaptureError, match=r"not a plain tensor op \(a function transform such as torch.vmap"):
        it.symmetry(Mapped(), torch.randn(2, 3))


# -- scripted modules --------------------------------------------------------------------------------------------------

IMAGES = torch.randn(4, 1, 6, 6)
DATA = [(IMAGES, torch.tensor([0, 1, 0, 1]))]
#: What watches modules, or changes them one by one.
WATCHERS: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda m: it.barrier(m, m, DATA, points=3, reset_statistics=DATA),
    "barrier with scales": lambda m: it.barrier(m, m, DATA, points=3, scales=True),
    "merge, reset": lambda m: it.merge([m, m], data=DATA, method="none", repair="reset"),
    "merge, repair": lambda m: it.merge([m, m], data=DATA, method="none", repair="repair"),
    "merge, scales": lambda m: it.merge([m, m], IMAGES, method="none", repair="scales"),
    "repair": lambda m: repair(m, m, 0.5, DATA),
    "reset_statistics": lambda m: reset_statistics(m, DATA),
    "dissect": lambda m: it.dissect(m, "2", IMAGES, torch.zeros(4, 2, 6, 6).bool()),
    "guided_backprop": lambda m: it.guided_backprop(m, "2", 0, IMAGES),
    "rotation_penalty": lambda m: rotation_penalty(m, "2", DATA, DATA),
    "connectivity": lambda m: it.connectivity(m, m, DATA),
    "diagnose": lambda m: it.diagnose(m, m, DATA),
    "features": lambda m: it.features(m, DATA),
    "capture": lambda m: list(capture(m, DATA)),
    "compare": lambda m: it.compare(m, m, DATA),
    "stitch": lambda m: it.stitch(m, m, at="2", data=DATA),
}


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("verb", WATCHERS)
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, IMAGES)], ids=["script", "trace"])
def test_scripted_networks_are_refused_by_what_watches_modules(make: Callable[[Any], Any], verb: str) -> None:
    with pytest.raises(InputError, match=r"is a scripted or traced module .* Pass the module it was made from"):
        WATCHERS[verb](make(normed()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_networks_run_where_nothing_watches() -> None:
    torch.manual_seed(0)
    pair = normed(), normed()
    scripted = [torch.jit.script(model) for model in pair]
    assert it.barrier(scripted[0], scripted[1], DATA, points=3).loss == it.barrier(*pair, DATA, points=3).loss
    assert _fitting(path_between(scripted[0], scripted[1], [0.5]), next(labelled_batches(DATA, pair[0])), 1.0) == 1
    beside = nn.Sequential(scripted[0], nn.Linear(2, 2))
    (found,) = capture(beside, DATA, "1")
    assert torch.equal(found["1"], beside(IMAGES).detach())
    with pytest.raises(InputError, match=r"'0' is a scripted or traced module"):
        list(capture(beside, DATA, "0"))
