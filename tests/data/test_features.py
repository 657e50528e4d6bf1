"""Features equal those of plain hooks, the model stays unchanged, and ambiguous requests are refused."""

import copy
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from captured import capture
from torch import Tensor, nn

import intertwine
from intertwine.data.batches import Fingerprint, Hasher, calls
from intertwine.data.features import Features, features
from intertwine.data.layers import layer_paths, modules_of
from intertwine.data.layouts import arrange, arrange_pair, check_layout, layout_of, resized
from intertwine.errors import InputError, MismatchError

Batches = list[tuple[Any, Any]]


def batches(*shape: int, samples: int = 5, size: int = 2) -> Batches:
    """Random inputs of one shape, in batches of which the last is smaller."""
    x = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(7))
    return [(part, torch.zeros(len(part))) for part in x.split(size)]


def by_plain_hooks(model: nn.Module, data: Batches, path: str) -> list[list[Tensor]]:
    """For every batch, the first tensor of each call of a module: hooks on a copy, as anybody would write them."""
    watched = copy.deepcopy(model).eval()
    seen: list[Tensor] = []

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        seen.append((output if isinstance(output, Tensor) else next(iter(output))).clone())

    watched.get_submodule(path).register_forward_hook(hook)
    every = []
    for inputs, _ in data:
        with torch.no_grad():
            watched(**inputs) if isinstance(inputs, dict) else watched(inputs)
        every.append(list(seen))
        seen.clear()
    return every


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def refused(error: type[Exception], *words: str) -> Any:
    """The error is raised, and its text holds all of the words in their order."""
    return pytest.raises(error, match="(?s)" + ".*".join(words))


class Twice(nn.Module):
    """One activation that is called twice, and one layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.unused = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc2(self.relu(self.fc1(x))))


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Boxed:
    """An output of a kind that torch does not know."""

    note: str
    tensor: Tensor


class Giver(nn.Module):
    """Hands out whatever the function makes of its input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.make = _Inner(make), make

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x, scale=2.0 * x)
        return x


class _Inner(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return self.make(x)


# -- capturing ---------------------------------------------------------------------------------------------------------


def test_an_in_place_relu_does_not_overwrite_what_was_captured() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Hardtanh(inplace=True))
    data = [(10 * x, y) for x, y in batches(3, samples=40, size=15)]
    for (x, _), batch in zip(data, capture(model, data, ["0", "1:input", "1", "2"]), strict=True):
        before = model[0](x).detach()  # some are changed by the ReLU, some by what follows
        assert (before < 0).any()
        assert (before > 1).any()
        assert torch.equal(batch["0"], before)
        assert torch.equal(batch["1:input"], before)
        assert torch.equal(batch["1"], before.relu())
        assert torch.equal(batch["2"], before.clamp(0, 1))


def test_the_input_is_not_overwritten_either() -> None:
    (batch,) = capture(
        nn.Sequential(nn.ReLU(inplace=True)), [(torch.tensor([[-1.0, 1.0]]), None)], [":input", "0:input"]
    )
    assert batch[":input"].tolist() == batch["0:input"].tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize("layers", [["relu@1", "relu@2"], "relu", "*", None], ids=str)
def test_a_module_that_is_called_twice(layers: Any) -> None:
    model, data = Twice(), batches(3)
    expected = by_plain_hooks(model, data, "relu")
    assert [len(calls) for calls in expected] == [2, 2, 2]
    if layers == "relu":
        with refused(InputError, "'relu'", "called that module 2 times", "relu@1, relu@2"):
            list(capture(model, data, layers))
        return
    for batch, (first, second) in zip(capture(model, data, layers), expected, strict=True):
        assert torch.equal(batch["relu@1"], first)
        assert torch.equal(batch["relu@2"], second)
        assert "relu" not in batch
        assert "unused" not in batch


def test_layers_come_in_the_order_of_the_forward_or_as_asked() -> None:
    model, data = Twice(), batches(3)
    assert intertwine.features(model, data).names == ("fc1", "relu@1", "fc2", "relu@2")
    assert intertwine.features(model, data, "fc?").names == ("fc1", "fc2")
    assert intertwine.features(model, data, ["fc2", "fc1", "fc2"]).names == ("fc2", "fc1")


def test_a_shared_module_answers_to_each_of_its_paths() -> None:
    shared = nn.Linear(3, 3)
    model, data = nn.Sequential(shared, nn.ReLU(), shared), batches(3)
    assert intertwine.features(model, data).names == ("0@1", "1", "0@2")
    (one, two), *_ = by_plain_hooks(model, data, "0")
    batch = next(capture(model, data, ["0@1", "2@2"]))
    assert torch.equal(batch["0@1"], one)
    assert torch.equal(batch["2@2"], two)


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        (lambda x: (None, x, x + 1), "inner", 0),
        (lambda x: (x, x + 1), "inner[1]", 1),
        (lambda x: (x, x + 1), "inner[-1]", 1),
        (lambda x: (x, (x, x + 2)), "inner[1][1]", 2),
        (lambda x: {"a": [x], "b": x + 1}, "inner", 0),
        (lambda x: {"a": [x], "b": x + 1}, "inner[b]", 1),
        (lambda x: {"a": {3: x + 3}}, "inner[a][3]", 3),
        (lambda x: Pair(x, x + 1), "inner[right]", 1),
        (lambda x: Boxed("", x + 1), "inner", 1),
        (lambda x: Boxed("", x + 1), "inner[tensor]", 1),
    ],
)
def test_outputs_of_many_kinds(make: Callable[[Tensor], Any], text: str, expected: int) -> None:
    (batch,) = capture(Giver(make), [(torch.zeros(2, 3), None)], text)
    assert torch.equal(batch[text], torch.full((2, 3), float(expected)))


def test_inputs_can_be_chosen_too() -> None:
    (batch,) = capture(Giver(lambda x: x), [(torch.ones(2, 3), None)], ["inner:input", "inner:input[scale]"])
    assert batch["inner:input"].mean() == 1
    assert batch["inner:input[scale]"].mean() == 2


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (lambda x: "text", "inner", ["'inner'", "gives no tensor, but str", "path\\[1\\]"]),
        (lambda x: (None, 3), "inner", ["gives no tensor, but tuple of 2"]),
        (lambda x: (x, x), "inner[2]", ["tuple of 2", "no item \\[2\\]"]),
        (lambda x: x, "inner[1]", ["a tensor \\(2, 3\\)", "no item \\[1\\]"]),
        (lambda x: {"a": x, "b": x}, "inner[c]", ["without the key c", "its keys are a, b"]),
        (lambda x: x, "inner:input[5]", ["as its input", "without the key 5"]),
    ],
)
def test_outputs_that_are_no_tensors(make: Callable[[Tensor], Any], text: str, words: list[str]) -> None:
    with refused(InputError, *words):
        list(capture(Giver(make), [(torch.zeros(2, 3), None)], text))


def test_leaves_without_tensors_are_listed_with_their_reason() -> None:
    found = intertwine.features(nn.Sequential(nn.Linear(3, 3), Giver(lambda x: "text")), batches(3))
    assert found.names == ("0",)
    assert [name for name, _ in found.skipped] == ["1.inner"]
    assert "gives no tensor, but str" in found.skipped[0][1]
    assert intertwine.features(Twice(), batches(3)).skipped[0][0] == "unused"


class WithLoss(nn.Module):
    """A network that takes its targets along and has a module for its loss, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.loss, self.last = nn.Linear(3, 4), nn.CrossEntropyLoss(), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h) + self.loss(h, y)


def test_one_number_for_all_samples_is_no_feature() -> None:
    """A loss among the leaves is left out and named; the other layers are what plain hooks see."""
    model, x = WithLoss(), torch.randn(6, 3)
    data = [((x[:4], torch.tensor([0, 1, 2, 3])), None), ((x[4:], torch.tensor([3, 0])), None)]
    found = intertwine.features(model, data)
    assert found.names == ("first", "last")
    ((name, reason),) = found.skipped
    assert (name, reason[:47]) == ("loss", "gives one number for all samples together. Name")
    torch.testing.assert_close(found.collect()["first"], x @ model.first.weight.T + model.first.bias)
    layers = intertwine.compare(model, model, data, measures="linear_cka_biased")
    assert layers.matrix("linear_cka_biased").shape == (2, 2)
    for layers in (["loss"], ["first", "loss"]):
        with refused(InputError, "The layer 'loss' gives one number for all samples together"):
            intertwine.features(model, data, layers)
    with refused(InputError, "A layout is given for 'loss', which is not captured"):
        intertwine.features(model, data, layouts={"loss": "n"})
    with refused(InputError, "one number for all samples together"):
        check_layout(torch.tensor(1.0))


# -- the model stays as it was -----------------------------------------------------------------------------------------


def test_the_model_is_as_it_was_at_every_moment() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    model.train()
    model[0].eval()
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    stream = iter(intertwine.features(model, batches(3, 5, 5)))
    for _ in range(2):  # while the stream is suspended as well
        batch = next(stream)
        assert [module.training for module in model.modules()] == flags
        assert hooks_of(model) == 0
        assert not any(x.requires_grad for x in batch.values())
    assert torch.is_grad_enabled()
    assert torch.equal(batch["2"], batch["1"]), "dropout is off"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_hooks_and_flags_are_restored_when_the_forward_fails() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 4)).train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        intertwine.features(model, batches(3))
    assert hooks_of(model) == 0
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_hooks_of_the_user_are_kept_and_count() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda _module, _args, output: output * 0 + 5)
    (batch,) = capture(model, batches(3, samples=2), "0")
    assert batch["0"].mean() == 5
    assert hooks_of(model) == 1


def test_the_forward_runs_without_gradients_and_without_fused_attention() -> None:
    seen = []

    class Asks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append((torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), self.training))
            return super().forward(input)

    list(capture(nn.Sequential(Asks(3, 3)), batches(3, samples=2)))
    assert seen == [(False, False, False)]


def test_an_overridden_train_is_not_called() -> None:
    class Merging(nn.Linear):
        """As some adapters do, it changes its weights when it is put into evaluation mode."""

        def train(self, mode: bool = True) -> "Merging":
            self.weight.data *= 2
            return super().train(mode)

    model = Merging(3, 3)
    before = model.weight.detach().clone()
    list(capture(nn.Sequential(model), batches(3)))
    assert torch.equal(model.weight, before)


def test_lazy_modules_are_refused_before_they_change() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with refused(InputError, "lazy modules without weights", "Run it once"):
        list(capture(model, batches(3)))
    assert isinstance(model[0].weight, nn.UninitializedParameter)


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("a.*", ["a.0", "a.1"]),
        ("a.*.*", ["a.1.0", "a.1.1"]),
        ("a.**", ["a.0", "a.1", "a.1.0", "a.1.1"]),
        ("**.1", ["a.1", "a.1.1"]),
        ("**.0:input", ["a.0:input", "a.1.0:input"]),
        ("?", ["a", "b"]),
        ("a.1.?@1", ["a.1.0@1", "a.1.1@1"]),
        (["b", "a.0", "*"], ["b", "a.0", "a"]),
        ("", [""]),
        (None, ["a.0", "a.1.0", "a.1.1", "b"]),
    ],
    ids=str,
)
def test_patterns(layers: Any, expected: list[str]) -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), nn.ReLU())), "b": nn.ReLU()})
    assert [str(site) for site in layer_paths(model, layers)] == expected


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            "layer1.0.relu",
            ["'layer1.0.relu'", "no module of that path", "Did you mean .*layer1.0.relu1", "named_modules"],
        ),
        ("stage*", ["'stage\\*'", "no module of the model matches it", "one step of a path"]),
        ("fc@0", ["Calls are counted from 1", "'fc@0'"]),
        ("fc@2", ["'fc@2'", "called that module once", "call 1 or less"]),
        ([], ["layers must be module paths", "\\[\\]"]),
    ],
    ids=str,
)
def test_paths_that_are_refused(layers: Any, words: list[str]) -> None:
    with refused(InputError, *words):
        intertwine.features(intertwine.zoo.build("resnet20"), batches(3, 8, 8), layers)


def test_a_layer_that_is_not_reached() -> None:
    with refused(InputError, "'unused' has no features", "did not call that module", "name the module above"):
        intertwine.features(Twice(), batches(3), ["fc1", "unused"])
    with refused(InputError, "None of the layers has features", "unused: the forward did not call"):
        intertwine.features(Twice(), batches(3), ["unus*"])


def test_a_layer_that_a_later_batch_does_not_reach() -> None:
    class Sometimes(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc1(x) if len(x) == 2 else x

    found = intertwine.features(Sometimes(), batches(3))
    assert found.names == ("fc1",)
    with refused(InputError, "'fc1'", "did not call"):
        found.collect()
    with refused(InputError, "'fc1'", "did not call"):
        list(capture(Sometimes(), batches(3)))


# -- wrappers, precision, devices --------------------------------------------------------------------------------------


def test_data_parallel_is_seen_through() -> None:
    plain, data = Twice(), batches(3)
    wrapped = nn.DataParallel(plain)
    assert list(modules_of(wrapped)) == list(modules_of(plain))
    ours, theirs = intertwine.features(wrapped, data).collect(), intertwine.features(plain, data).collect()
    assert ours.names == theirs.names
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.names)
    assert torch.equal(intertwine.features(wrapped, data, "module.fc1").collect()["module.fc1"], ours["fc1"])


def test_data_parallel_itself_is_not_run() -> None:
    """Its replicas run in threads, each on a part of the batch, and call the same hooks."""

    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Twice()

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("this would scatter the batch")

    assert intertwine.features(DataParallel(), batches(3), "fc1").collect()["fc1"].shape == (5, 4)


@pytest.mark.parametrize("part", ["model", "module", "in place"])
def test_compiled_models_run_their_hooks(part: str) -> None:
    plain, data = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)), batches(3)
    expected = intertwine.features(plain, data).collect()
    compiled: Any = copy.deepcopy(plain)
    if part == "model":
        compiled = torch.compile(compiled, backend="eager")
    elif part == "module":
        compiled[0] = torch.compile(compiled[0], backend="eager")
    else:
        compiled.compile(backend="eager")
    with torch.no_grad():
        compiled(data[0][0])  # compiled before any hook is there, and then blind to hooks
    found = intertwine.features(compiled, data).collect()
    assert found.names == expected.names == ("0.0", "0.1", "1")
    assert all(torch.equal(found[name], expected[name]) for name in found.names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_follow_the_precision_of_the_model(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(dtype)
    found = intertwine.features(model, batches(3, 5, 5)).collect()
    assert found["0"].dtype == dtype
    assert found.layers[0].dtype == str(dtype).removeprefix("torch.")
    x = torch.cat([inputs for inputs, _ in batches(3, 5, 5)]).to(dtype)
    torch.testing.assert_close(found["0"], model[0](x).detach())
    pooled = found.view("0", "pool")
    assert pooled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(pooled.double(), found["0"].double().mean((2, 3)), rtol=1e-5, atol=1e-6)


def test_whole_numbers_are_not_cast_and_features_move_to_the_device_that_is_asked_for() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)).to(torch.float64)
    assert intertwine.features(model, [(torch.tensor([[1, 2], [3, 4]]), None)]).names == ("0", "1")
    away = nn.Sequential(nn.Linear(3, 2)).to("meta")
    with pytest.raises(InputError, match=r"on the meta device and hold no numbers\. Load them first"):
        next(capture(away, batches(3)))
    assert next(capture(nn.Linear(3, 2), batches(3), device="meta"))[""].device.type == "meta"


# -- data --------------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """Takes two inputs, by place or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.fc(left + 2 * right)


def test_inputs_may_be_tuples_and_mappings() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    model = Sum()
    for inputs in ((a, b), [a, b], {"left": a, "right": b}, {"right": b, "left": a}):
        for batch in ((inputs, None), [inputs, None]):
            assert torch.equal(intertwine.features(model, (batch,), "fc").collect()["fc"], model(a, b).detach())


def test_a_data_loader_is_data() -> None:
    x, y = torch.randn(5, 3), torch.arange(5)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    model = nn.Linear(3, 2)
    assert torch.allclose(intertwine.features(model, loader).collect()[""], model(x).detach())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.zeros(4, 3), ["must be an iterable of \\(inputs, targets\\)", "a tensor \\(4, 3\\)", "DataLoader"]),
        ((torch.zeros(4, 3), torch.zeros(4)), ["a pair \\(inputs, targets\\)", "a tensor", "one batch is \\[\\("]),
        ({"x": 1}, ["must be an iterable", "found dict"]),
        ("digits", ["must be an iterable", "found str"]),
        (3, ["must be an iterable", "found int"]),
        ([(torch.zeros(4, 3),)], ["must be a pair", "tuple of 1"]),
        ([{"x": torch.zeros(4, 3)}], ["must be a pair", "found dict"]),
        ([("text", None)], ["inputs of a batch must be a tensor", "found str"]),
        ([(({"a": 1},), None)], ["hold no tensor with a sample axis", "arrays into tensors"]),
        ([], ["holds no samples", "at least one batch"]),
        ([(torch.zeros(0, 3), None)], ["holds no samples"]),
        (iter([]), ["holds no samples", "a generator can be used only once"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_that_is_refused(data: Any, words: list[str]) -> None:
    with refused(InputError, *words):
        intertwine.features(nn.Linear(3, 2), data)


def test_a_generator_is_read_once_and_whole() -> None:
    data, model = batches(3), nn.Linear(3, 2)
    expected = intertwine.features(model, data).collect()
    found = intertwine.features(model, (batch for batch in data))
    kept = found.collect()
    assert torch.equal(kept[""], expected[""])
    assert kept.fingerprint == expected.fingerprint
    with refused(InputError, "streamed once", "generator that cannot be read again", "collect"):
        list(found)


def test_empty_batches_are_passed_over() -> None:
    data = [(torch.zeros(0, 3), None), *batches(3), (torch.zeros(0, 3), None)]
    kept = intertwine.features(nn.Linear(3, 2), data).collect()
    assert len(kept[""]) == 5


# -- the fingerprint ---------------------------------------------------------------------------------------------------


def fingerprint(data: Batches) -> Fingerprint:
    hasher = Hasher()
    for call in calls(data):
        hasher.add(call)
    return hasher.fingerprint


def test_the_fingerprint_does_not_depend_on_the_size_of_batches() -> None:
    assert len({fingerprint(batches(3, 4, size=size)) for size in (1, 2, 3, 5)}) == 1
    x = torch.randn(6, 2)
    pairs = [[({"a": part, "b": part.long(), "flag": True}, None) for part in x.split(size)] for size in (2, 6)]
    assert fingerprint(pairs[0]) == fingerprint(pairs[1])
    swapped = [({"flag": True, "b": x.long(), "a": x}, None)]
    assert fingerprint(swapped) == fingerprint(pairs[1]), "keywords have no order"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_the_fingerprint_sees_content_order_shape_and_type(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).to(dtype)
    other = x.clone()
    other[2, 3] = 1
    forms = [x, other, x.flip(0), x[:2], x.reshape(3, 2, 2), x.to(torch.int32), x.T.contiguous().T]
    prints = [fingerprint([(form, None)]) for form in forms]
    assert prints[6] == prints[0], "strides are no content"
    assert len(set(prints)) == len(forms) - 1
    zeros = torch.zeros(3, 4, dtype=torch.int32)
    assert fingerprint([(zeros, None)]) != fingerprint([(zeros.float(), None)]), "the same bytes of another type"
    assert prints[2].unordered == prints[0].unordered
    assert prints[2].digest != prints[0].digest
    assert prints[1].unordered != prints[0].unordered


def test_the_fingerprint_of_data_that_is_fed_time_first() -> None:
    x = torch.randn(7, 4, 3)
    whole, parts = Hasher(1), Hasher(1)
    whole.add(((x,), {}))
    for part in x.split(2, 1):
        parts.add(((part,), {}))
    assert whole.fingerprint == parts.fingerprint == fingerprint([(x.transpose(0, 1), None)])
    assert whole.samples == 4


def test_features_of_other_samples_are_refused() -> None:
    model, data = nn.Linear(3, 2), batches(3)
    ours = intertwine.features(model, data).collect()
    ours.check(intertwine.features(nn.Linear(3, 7), batches(3, size=5)).collect())
    with refused(MismatchError, "the first has 5 samples and the second 4", "same inputs"):
        ours.check(intertwine.features(model, batches(3, samples=4)).collect())
    with refused(MismatchError, "the same 5 samples in another order", "shuffling"):
        ours.check(intertwine.features(model, data[::-1]).collect())
    with refused(MismatchError, "their inputs differ", "normalisation"):
        ours.check(intertwine.features(model, [(x + 1, y) for x, y in data]).collect())
    with refused(InputError, "known once both are collected"):
        ours.check(intertwine.features(model, data))


def test_a_stream_knows_the_fingerprint_of_what_it_has_given() -> None:
    data = batches(3)
    found = intertwine.features(nn.Linear(3, 2), data)
    stream = iter(found)
    assert stream.fingerprint.samples == 0
    next(stream)
    assert stream.fingerprint == fingerprint(data[:1])
    list(stream)
    assert stream.fingerprint == fingerprint(data) == found.collect().fingerprint
    again = iter(found.collect())
    assert [len(batch[""]) for batch in again] == [5]
    assert again.fingerprint == fingerprint(data)


# -- policies ----------------------------------------------------------------------------------------------------------


def test_policies_of_a_convolution() -> None:
    x = torch.randn(2, 3, 4, 5)
    rows = arrange(x, "channels")
    assert rows.shape == (40, 3)
    assert all(torch.equal(rows[n * 20 + i * 5 + j], x[n, :, i, j]) for n in (0, 1) for i in range(4) for j in range(5))
    assert torch.equal(arrange(x, "flatten"), x.flatten(1))
    assert torch.equal(arrange(x, "structured"), x.flatten(2))
    torch.testing.assert_close(arrange(x, "pool"), x.mean((2, 3)))
    last = x.permute(0, 2, 3, 1)
    for policy in ("channels", "flatten", "structured", "pool"):
        torch.testing.assert_close(arrange(last, policy, "nppc"), arrange(x, policy))


def test_policies_of_tokens_vectors_and_scalars() -> None:
    x = torch.randn(2, 7, 5)
    assert torch.equal(arrange(x, "tokens"), x.reshape(14, 5))
    assert torch.equal(arrange(x, "channels"), x.reshape(14, 5))
    assert torch.equal(arrange(x, "structured"), x.transpose(1, 2))
    assert torch.equal(arrange(x, "flatten"), x.transpose(1, 2).flatten(1))
    torch.testing.assert_close(arrange(x, "pool"), x.mean(1))
    assert torch.equal(arrange(x.transpose(0, 1), "tokens", "tnc"), x.reshape(14, 5))
    assert torch.equal(arrange(x, "channels", "ncp"), x.transpose(1, 2).reshape(10, 7))
    state = torch.randn(2, 4, 3)  # layers, samples, units
    assert torch.equal(arrange(state, "flatten", "cnc"), state.transpose(0, 1).flatten(1))
    for policy in ("channels", "flatten", "pool"):
        assert torch.equal(arrange(x[:, 0], policy), x[:, 0])
        assert arrange(x[:, 0, 0], policy).shape == (2, 1)
    assert arrange(x[:, 0], "structured").shape == (2, 5, 1)


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (6, 4), (7, 3)])
def test_unequal_resolutions_are_averaged_onto_the_smaller(sizes: tuple[int, int]) -> None:
    x, y = torch.randn(2, 3, sizes[0], sizes[0]), torch.randn(2, 5, sizes[1], sizes[1])
    a, b = arrange_pair(x, y)
    small = min(sizes)
    assert a.shape == (2 * small * small, 3)
    assert b.shape == (2 * small * small, 5)
    pool = nn.AdaptiveAvgPool2d(small)
    torch.testing.assert_close(a, arrange(pool(x)))
    torch.testing.assert_close(b, arrange(pool(y)))


def test_unequal_resolutions_axis_by_axis_and_in_other_dimensions() -> None:
    a, b = arrange_pair(torch.randn(2, 3, 8, 2), torch.randn(2, 3, 4, 6), "structured")
    assert a.shape == b.shape == (2, 3, 8)
    x = torch.randn(2, 3, 8)
    a, b = arrange_pair(x, torch.randn(2, 3, 4), layouts=("ncp", "ncp"))
    torch.testing.assert_close(a, arrange(x.unflatten(2, (4, 2)).mean(3), layout="ncp"))
    x, y = torch.randn(2, 3, 4, 4), torch.randn(2, 5)
    a, b = arrange_pair(x, y)
    torch.testing.assert_close(a, x.mean((2, 3)))
    assert torch.equal(b, y)
    a, b = arrange_pair(x, y, "flatten")
    assert (a.shape, b.shape) == ((2, 48), (2, 5))
    x, y = torch.randn(2, 4, 4, 3), torch.randn(2, 5, 2, 2)
    a, b = arrange_pair(x, y, layouts=("nppc", None))
    torch.testing.assert_close(a, arrange_pair(x.permute(0, 3, 1, 2), y)[0])
    between = torch.tensor([[[1.0, 1.0 + 2**-10]]]).half()
    assert resized(between, [1]).item() == 1.0 + 2**-11, "half precision has no number between these two"


@pytest.mark.parametrize(
    ("shapes", "layouts", "words"),
    [
        (((2, 5, 3), (2, 6, 3)), (None, None), ["different tokens", "\\(2, 5, 3\\)", "cannot be averaged", '"pool"']),
        (((2, 5, 3), (2, 3)), (None, None), ["different tokens"]),
        (((2, 5, 3), (2, 3, 2, 2)), (None, None), ["different tokens", "class token"]),
        (((2, 3, 8), (2, 3, 4, 4)), ("ncp", None), ["different numbers of axes", '"pool"']),
        (((2, 3), (4, 3)), (None, None), ["one has 2 samples and the other 4", "same order"]),
    ],
)
def test_pairs_that_do_not_match(shapes: Any, layouts: Any, words: list[str]) -> None:
    with refused(MismatchError, *words):
        arrange_pair(torch.randn(shapes[0]), torch.randn(shapes[1]), "channels", layouts)


@pytest.mark.parametrize(
    ("shape", "policy", "layout", "words"),
    [
        ((2, 3), "chanels", None, ["'chanels'", "Did you mean 'channels", "structured"]),
        ((2, 3, 4, 4), "tokens", None, ["no axis of tokens", '"channels"', "letter t"]),
        ((2, 3), "pool", "ncp", ["'ncp' does not fit a tensor \\(2, 3\\)", "one letter per axis"]),
        ((2, 3), "pool", "cc", ["'cc'", "n samples \\(once\\)"]),
        ((2, 3), "pool", "nx", ["'nx'", "one letter per axis"]),
        ((2,) * 6, "pool", None, ["6 axes and no default layout"]),
    ],
)
def test_arrangements_that_are_refused(shape: Any, policy: str, layout: Any, words: list[str]) -> None:
    with refused(InputError, *words):
        arrange(torch.zeros(shape), policy, layout)


def test_whole_numbers_are_no_features() -> None:
    with refused(InputError, "A layer \\(2, 3\\) of dtype int64", "must hold floats"):
        arrange(torch.zeros(2, 3, dtype=torch.int64))


class LayerNorm2d(nn.LayerNorm):
    """As in timm and torchvision: over channels that come first."""


@pytest.mark.parametrize(
    ("module", "axes", "layout"),
    [
        (nn.Conv2d(1, 1, 1), 4, "ncpp"),
        (nn.ConvTranspose1d(1, 1, 1), 3, "ncp"),
        (nn.BatchNorm1d(1), 2, "nc"),
        (nn.BatchNorm1d(1), 3, "ncp"),
        (nn.GroupNorm(1, 1), 3, "ncp"),
        (nn.AdaptiveAvgPool3d(1), 5, "ncppp"),
        (nn.Linear(1, 1), 3, "ntc"),
        (nn.LayerNorm(1), 4, "nppc"),
        (LayerNorm2d(1), 4, "ncpp"),
        (nn.LSTM(1, 1), 3, "tnc"),
        (nn.LSTM(1, 1, batch_first=True), 3, "ntc"),
        (nn.MultiheadAttention(1, 1), 3, "tnc"),
        (nn.ReLU(), 4, None),
    ],
    ids=str,
)
def test_the_kind_of_module_tells_its_layout(module: nn.Module, axes: int, layout: str | None) -> None:
    assert layout_of(module, axes) == layout
    assert check_layout(torch.zeros([2] * axes), layout) == (layout or "ncpp")


def test_other_modules_take_the_layout_of_their_surroundings() -> None:
    signal = intertwine.features(
        nn.Sequential(nn.ReLU(), nn.Conv1d(3, 4, 1), nn.ReLU()), batches(3, 6), ["1:input", "2"]
    )
    assert [layer.layout for layer in signal.layers] == ["ncp", "ncp"]
    image = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Sequential(nn.Tanh()))
    assert [layer.layout for layer in intertwine.features(image, batches(5, 5, 3), "**").layers] == ["nppc"] * 4
    before = nn.Sequential(nn.Tanh(), nn.LayerNorm(4))
    assert [layer.layout for layer in intertwine.features(before, batches(5, 5, 4)).layers] == ["nppc"] * 2
    alone = intertwine.features(nn.Sequential(nn.Tanh()), batches(6, 3))
    assert alone.layers[0].layout == "ntc"
    given = intertwine.features(nn.Sequential(nn.Tanh()), batches(6, 3), layouts={"0": "ncp"})
    assert given.collect("pool")["0"].shape == (5, 6)


# -- Features ----------------------------------------------------------------------------------------------------------


def small() -> Features:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 2))
    return intertwine.features(model, batches(3, 5, 5))


def test_streamed_and_collected_agree() -> None:
    found = small()
    kept = found.collect()
    for name in found.names:
        assert torch.equal(torch.cat([batch[name] for batch in found]), kept[name])
        for policy in ("channels", "flatten", "pool"):
            torch.testing.assert_close(found.collect(policy)[name], kept.view(name, policy))
            torch.testing.assert_close(kept.collect(policy).view(name, policy), kept.view(name, policy))
    assert kept.collect() is kept
    assert kept.view("0", "pool", layout="ncpp").shape == (5, 4)
    assert "0" in kept
    assert "9" not in kept
    assert found.values is None


def test_features_are_readable() -> None:
    found = small()
    assert repr(found).splitlines() == [
        "Features(4 layers, streamed)",
        "  0  Conv2d   4×3×3  ncpp  float32",
        "  1  ReLU     4×3×3  ncpp  float32",
        "  2  Flatten  36     nc    float32",
        "  3  Linear   2      nc    float32",
    ]
    kept = found.collect("pool")
    assert kept.fingerprint is not None
    assert repr(kept).startswith(
        f"Features(4 layers, 5 samples under pool, 0.0 MB, data {kept.fingerprint.digest[:8]})"
    )
    assert repr(kept.fingerprint) == f"Fingerprint(5 samples, {kept.fingerprint.digest[:8]})"
    plain = kept.to_dict()
    assert plain["layers"][0] == {
        "name": "0", "module": "Conv2d", "shape": [4, 3, 3], "layout": "ncpp", "dtype": "float32",
    }  # fmt: skip
    assert plain["fingerprint"]["samples"] == 5
    assert plain["policy"] == "pool"
    many = intertwine.features(nn.Sequential(*[nn.ReLU() for _ in range(40)]), batches(3))
    assert repr(many).endswith("… and 10 more")
    assert "1 skipped" in repr(intertwine.features(Twice(), batches(3)))


def test_what_features_refuse() -> None:
    found = small()
    with refused(InputError, "streamed", "no tensor of '0'", "collect"):
        found["0"]
    with refused(InputError, "do not hold the layer '00'", "Did you mean '0"):
        found.collect()["00"]
    with refused(InputError, "'0' was collected under the policy 'pool'", "no view under 'flatten'"):
        found.collect("pool").view("0", "flatten")
    with refused(InputError, "layout is given for '77', which is not captured"):
        intertwine.features(nn.Sequential(nn.ReLU()), batches(3), layouts={"77": "nc"})


def test_sizes_that_change_from_batch_to_batch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    found = intertwine.features(model, [(torch.randn(2, 3, 8, 8), None), (torch.randn(3, 3, 6, 6), None)])
    with refused(MismatchError, "'0'", "\\(2, 4, 6, 6\\), \\(3, 4, 4, 4\\)", "pool"):
        found.collect()
    assert found.collect("pool")["0"].shape == (5, 4)
    assert found.collect("channels")["0"].shape == (2 * 36 + 3 * 16, 4)


def test_a_layer_without_an_axis_of_samples() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.reshape(-1, 3))

    with refused(InputError, "'fc' gives a tensor \\(8, 3\\) for 2 samples", "layouts="):
        intertwine.features(Windows(), batches(12), "fc")
    with refused(InputError, "None of the layers has features", "\\(8, 3\\) for 2 samples"):
        intertwine.features(Windows(), batches(12))


def test_a_layer_that_loses_its_axis_of_samples_in_a_later_batch() -> None:
    class Mean(Sum):
        def forward(self, left: Tensor) -> Tensor:  # type: ignore[override]
            return self.fc(left.mean(0, keepdim=True))

    found = intertwine.features(Mean(), [(torch.ones(1, 3), None), (torch.ones(4, 3), None)])
    with refused(MismatchError, "'fc' gives a tensor \\(1, 2\\) for 4 samples", "its axis 0"):
        found.collect()


# -- recurrent nets, attention, real models ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_nets(batch_first: bool) -> None:
    model = nn.Sequential(nn.LSTM(3, 4, num_layers=2, batch_first=batch_first))
    x = torch.randn(6, 5, 3)  # six samples of five steps
    data = [(part if batch_first else part.transpose(0, 1), None) for part in x.split(4)]
    paths = ["0", "0[0]", "0[1]", "0[1][1]"]
    kept = intertwine.features(model, data, paths, sample_axis=0 if batch_first else 1).collect()
    assert [layer.layout for layer in kept.layers] == [*["ntc" if batch_first else "tnc"] * 2, "cnc", "cnc"]
    whole = copy.deepcopy(model[0])
    output, (hidden, cell) = whole(x if batch_first else x.transpose(0, 1))
    torch.testing.assert_close(kept["0"], output.detach())
    torch.testing.assert_close(kept["0[1]"], hidden.detach())
    torch.testing.assert_close(kept["0[1][1]"], cell.detach())
    rows = output if batch_first else output.transpose(0, 1)
    torch.testing.assert_close(kept.view("0", "tokens"), rows.reshape(30, 4).detach())
    assert kept.view("0[1]", "flatten").shape == (6, 8)
    assert kept.fingerprint is not None
    assert kept.fingerprint.samples == 6


def test_fused_attention_does_not_hide_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, data = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), batches(5, 8)
    one = intertwine.features(model, data, "layers.1.linear1").collect()
    every = intertwine.features(model, data).collect()
    assert torch.equal(one["layers.1.linear1"], every["layers.1.linear1"])
    assert {name for name, _ in every.skipped} == {"layers.0.self_attn.out_proj", "layers.1.self_attn.out_proj"}
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_network_of_the_zoo() -> None:
    model, data = intertwine.zoo.build("resnet20"), batches(3, 16, 16, samples=3)
    model(torch.randn(8, 3, 16, 16))  # statistics that are not those of a fresh network
    kept = intertwine.features(model, data, ["layer1.*.relu?", "layer2.0", "layer3.2.relu2:input", "fc"]).collect()
    assert kept.names == (
        *(f"layer1.{block}.relu{k}" for block in range(3) for k in (1, 2)),
        *("layer2.0", "layer3.2.relu2:input", "fc"),
    )
    for name in kept.names:
        if ":" not in name:
            assert torch.equal(kept[name], torch.cat([first for (first,) in by_plain_hooks(model, data, name)])), name
    assert torch.equal(kept["layer3.2.relu2:input"].relu(), _collected(model, data, "layer3.2.relu2"))
    a, b = arrange_pair(kept["layer1.0.relu1"], kept["layer2.0"])
    assert (a.shape, b.shape) == ((3 * 64, 16), (3 * 64, 32))


def _collected(model: nn.Module, data: Batches, name: str) -> Tensor:
    return features(model, data, name).collect()[name]


@pytest.mark.models
def test_a_network_of_torchvision() -> None:
    from torchvision.models import resnet18

    model, data = resnet18(), batches(3, 32, 32, samples=3)
    kept = intertwine.features(model, data, ["layer1.*.relu", "layer2.0.bn1", "avgpool"]).collect()
    assert kept.names[:3] == ("layer1.0.relu@1", "layer1.0.relu@2", "layer1.1.relu@1")
    expected = by_plain_hooks(model, data, "layer1.1.relu")
    assert torch.equal(kept["layer1.1.relu@2"], torch.cat([second for _, second in expected]))
    before = torch.cat([first for (first,) in by_plain_hooks(model, data, "layer2.0.bn1")])
    assert (kept["layer2.0.bn1"] < 0).any(), "an in-place ReLU follows"
    assert torch.equal(kept["layer2.0.bn1"], before)
    assert kept.view("avgpool", "channels").shape == (3, 512)


@pytest.mark.models
def test_a_network_of_timm() -> None:
    import timm

    model, data = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2), batches(3, 32, 32, samples=3)
    kept = intertwine.features(model, data, ["blocks.*", "blocks.1.mlp.act", "patch_embed.proj"]).collect()
    assert torch.equal(kept["blocks.1"], torch.cat([x for (x,) in by_plain_hooks(model, data, "blocks.1")]))
    assert kept.view("blocks.0", "tokens").shape == (3 * 5, 192)
    assert {layer.name: layer.layout for layer in kept.layers} == {
        "blocks.0": "ntc", "blocks.1": "ntc", "blocks.1.mlp.act": "ntc", "patch_embed.proj": "ncpp",
    }  # fmt: skip
    with refused(MismatchError, "different tokens", "class token"):
        arrange_pair(kept["patch_embed.proj"], kept["blocks.0"])


@pytest.mark.models
def test_channels_last_is_found_in_swin_and_convnext() -> None:
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer([4, 4], 24, [1, 1], [2, 4], [4, 4])
    found = intertwine.features(model, batches(3, 32, 32, samples=2), ["features.*", "norm", "features.0.1"])
    assert {layer.layout for layer in found.layers} == {"nppc"}


@pytest.mark.models
def test_a_network_of_transformers() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    model, ids = BertModel(config), torch.randint(0, 50, (5, 7))
    data: Batches = [({"input_ids": x, "attention_mask": torch.ones_like(x)}, None) for x in ids.split(2)]
    paths = ["", "[pooler_output]", "encoder.layer.1:input", "encoder.layer.*.output", "encoder[last_hidden_state]"]
    kept = intertwine.features(model, data, paths).collect()
    with torch.no_grad():
        expected = [copy.deepcopy(model).eval()(**inputs) for inputs, _ in data]
    torch.testing.assert_close(kept[""], torch.cat([out.last_hidden_state for out in expected]))
    torch.testing.assert_close(kept["[pooler_output]"], torch.cat([out.pooler_output for out in expected]))
    assert torch.equal(kept["encoder.layer.1:input"], kept["encoder.layer.0.output"])
    assert torch.equal(kept["encoder[last_hidden_state]"], kept["encoder.layer.1.output"])
    assert kept.view("", "tokens").shape == (35, 32)
    every = intertwine.features(model, data)
    assert "embeddings.position_embeddings" in {name for name, _ in every.skipped}, "one row for all samples"


def test_the_verb_is_public() -> None:
    assert intertwine.features is features
    assert "features" in dir(intertwine)


def test_streaming_keeps_no_batch_alive() -> None:
    """Memory is bounded by one batch: nothing refers to a batch once it was handed out and dropped."""
    inputs: list[weakref.ref[Tensor]] = []

    def data() -> Iterator[tuple[Tensor, None]]:
        for _ in range(3):
            x = torch.randn(2, 3)
            inputs.append(weakref.ref(x))
            yield x, None

    stream = iter(intertwine.features(nn.Linear(3, 2), data()))
    outputs = []
    for number, batch in enumerate(stream):  # asked while the stream is alive
        outputs.append(weakref.ref(batch[""]))
        assert [ref() is None for ref in outputs] == [True] * number + [False]
        assert [ref() is None for ref in inputs[:number]] == [True] * number
