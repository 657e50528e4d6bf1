"""Merging: the mean in a common frame, repair, scores and notes; averages of checkpoints; task vectors."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from digit_networks import IMAGE, accuracy, digits, loss, normed_convolutions, perceptrons
from networks import Net, gap
from orbits import distance, made, mlp, noisy, residual, symmetry_of
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import intertwine as it
from intertwine.connect.arithmetic import add, average, task_vector, transport
from intertwine.connect.merge import merge
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import MismatchError


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# -- merge -------------------------------------------------------------------------------------------------------------


def test_the_mean_of_the_moved_networks_by_hand() -> None:
    models = perceptrons(64, 16, 10)
    shares = (0.1, 0.2, 0.3, 0.4)
    merged = merge(models, IMAGE, weights=shares)
    assert merged.frame is not None
    moved = [merged.frame.symmetry.act(g, m) for g, m in zip(merged.elements, models, strict=True)]
    for p, *parts in zip(merged.model.parameters(), *(m.parameters() for m in moved), strict=True):
        torch.testing.assert_close(p, sum(w * q for w, q in zip(shares, parts, strict=True)))
    plain = merge(models, method="none")
    for p, *parts in zip(plain.model.parameters(), *(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, sum(parts) / 4)
    assert plain.elements == ()
    assert plain.frame is None
    assert plain.before == plain.after == pytest.approx(merged.before)
    assert merged.after < 0.8 * merged.before


@pytest.mark.parametrize("method", ["weights", "scale-aware", "sorted"])
def test_copies_merge_into_themselves(method: str) -> None:
    model, inputs = made("MLP with GELU")
    sym = symmetry_of("MLP with GELU")
    twins = [sym.act(sym.random(seed), model) for seed in range(3)]
    merged = merge(twins, *inputs, method=method)
    assert merged.after == 0
    assert gap(model, merged.model, *inputs) < 1e-12
    assert gap(model, merge(twins, method="none").model, *inputs) > 0.01


def test_a_method_that_looks_at_data() -> None:
    models, (train, test) = perceptrons(64, 32, 10), digits()
    found = merge(models, data=train, method="activations", check=False)
    assert accuracy(found.model) > accuracy(merge(models, method="none").model) + 0.1
    with pytest.raises(it.InputError, match="The method 'activations' needs data"):
        merge(models, IMAGE, method="activations")
    assert found.scores == ()
    assert len(merge(models[:2], data=test, method="activations").scores) == 4


def test_the_order_of_the_networks_makes_no_difference() -> None:
    models = perceptrons(64, 16, 10)
    first, second = merge(models, IMAGE), merge(models[::-1], IMAGE)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_the_place_between_two() -> None:
    models = perceptrons(64, 16, 10)[:2]
    sym = it.symmetry(models[0], IMAGE)
    found = merge(models, t=0.25, symmetry=sym)
    assert found.weights == (0.75, 0.25)
    assert same(found.model, merge(models, weights=(0.75, 0.25), symmetry=sym).model)
    assert gap(merge(models, t=0, symmetry=sym).model, models[0], torch.randn(5, 1, 8, 8)) < 1e-5


def test_it_is_a_normal_module(tmp_path: Path) -> None:
    models = normed_convolutions()[:2]
    before = [copy.deepcopy(m.state_dict()) for m in models]
    merged = merge(models, IMAGE, repair="scales").model
    assert type(merged) is type(models[0])
    save_model(merged, str(tmp_path / "merged.safetensors"))
    again = copy.deepcopy(models[0])
    load_model(again, str(tmp_path / "merged.safetensors"))
    assert same(again, merged)
    images, labels = digits()[0][0]
    merged.requires_grad_(True).train()
    optimizer = torch.optim.Adam(merged.parameters(), 2e-3)
    for some in torch.randperm(len(images)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(merged(images[some]), labels[some]).backward()
        optimizer.step()
    assert accuracy(merged.eval()) > 0.9
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_batch_norm_is_never_merged_silently() -> None:
    models, (train, _) = normed_convolutions()[2:4], digits()
    plain = merge(models, IMAGE)
    assert len(plain.notes) == 1
    assert "running statistics of BatchNorm are the mean" in plain.notes[0]
    assert "note: The running statistics" in repr(plain)
    estimated = merge(models, IMAGE, repair="scales")
    assert "variances are estimated from weights" in estimated.notes[0]
    reset = merge(models, data=train, repair="reset", check=False)
    assert reset.notes == ()
    assert same(reset.model, merge(models, data=train, repair="repair", check=False).model)
    assert same(reset.model, reset_statistics(plain.model, train))
    assert loss(reset.model) < loss(estimated.model) < loss(plain.model)


def test_repair_of_two_and_of_more() -> None:
    models, (train, _) = perceptrons(64, 16, 10), digits()
    two = merge(models[:2], data=train, repair="repair", check=False)
    assert loss(two.model) < loss(merge(models[:2], IMAGE).model)
    with pytest.raises(it.InputError, match="works on the mix of two networks, and 4 are given"):
        merge(models, data=train, repair="repair")
    three = merge(normed_convolutions()[:3], data=train, repair="repair", check=False)
    assert accuracy(three.model) > accuracy(merge(normed_convolutions()[:3], IMAGE).model) + 0.1


def test_scores_and_what_they_say() -> None:
    """Against the losses and accuracies taken by hand; the notes name every number that speaks against the merge."""
    models, (_, test) = perceptrons(64, 32, 32, 10)[:2], digits()
    found = merge(models, data=test)
    assert [s.name for s in found.scores] == ["merged", "plain mean", "network 0", "network 1"]
    networks = [found.model, merge(models, method="none").model, *models]
    for score, network in zip(found.scores, networks, strict=True):
        assert score.loss == pytest.approx(loss(network), rel=1e-5)
        assert score.error == pytest.approx(1 - accuracy(network))
    assert found.scores[0].loss < found.scores[1].loss
    (note,) = found.notes
    start = "The loss of the merged network is larger than that of every given one: "
    assert re.fullmatch(re.escape(start) + r"0\.\d+ against 0\.\d+ to 0\.\d+\. Its error is 0\.\d+, against.*", note)
    assert f"{found.scores[0].loss:.4g}" in note
    stored = found.to_dict()
    assert stored["scores"][0] == {"name": "merged", "loss": found.scores[0].loss, "error": found.scores[0].error}
    assert merge(models, data=test, check=False).scores == ()


def test_a_merge_worse_than_the_plain_mean_says_so() -> None:
    """Two near copies of one network are best averaged as they are; sorting them apart is worse."""
    a = mlp(torch.nn.functional.gelu, (3, 40, 2)).double().requires_grad_(False)
    b = noisy(a, 0.05)
    x = torch.randn(64, 3, dtype=torch.float64)
    data = [(x, a(x))]
    found = merge([a, b], data=data, method="sorted", loss=lambda y, t: (y - t).square().mean())
    assert found.scores[0].loss > found.scores[1].loss
    assert any(
        note.startswith("The loss of the merged network is larger than that of the plain mean: ")
        for note in found.notes
    )
    kept = merge([a, b], data=data, loss=lambda y, t: (y - t).square().mean())
    assert not any("plain mean" in note for note in kept.notes)


def test_what_is_refused() -> None:
    models = perceptrons(64, 16, 10)
    two = models[:2]
    with pytest.raises(it.InputError, match=r"none are given\. Pass them after the models, as in merge\(models"):
        merge(two)
    with pytest.raises(it.InputError, match="Two networks or more are needed to merge them; found 1"):
        merge(models[:1], IMAGE)
    with pytest.raises(it.InputError, match=r"Unknown method 'sort'\. Did you mean 'sorted"):
        merge(two, IMAGE, method="sort")
    with pytest.raises(it.InputError, match=r"Unknown repair 'scale'\. Did you mean 'scales'\?"):
        merge(two, IMAGE, repair="scale")
    with pytest.raises(it.InputError, match="repair='reset' measures on data, and none is given"):
        merge(two, IMAGE, repair="reset")
    with pytest.raises(it.InputError, match="needs BatchNorm, and the network has none"):
        merge(two, data=digits()[0], repair="reset")
    with pytest.raises(it.InputError, match="a generator can be read once"):
        merge(two, data=iter(digits()[0]))
    for shares in ((0.5, 0.6), (1.5, -0.5), (1.0,), (float("nan"), 1.0)):
        with pytest.raises(it.InputError, match="one per network, none negative, and add up to 1"):
            merge(two, IMAGE, weights=shares)
    with pytest.raises(it.InputError, match=r"t=0\.5 is the position between two networks, but there are 4 networks"):
        merge(models, IMAGE, t=0.5)
    with pytest.raises(it.InputError, match=r"but weights= are given too"):
        merge(two, IMAGE, t=0.5, weights=(0.5, 0.5))
    with pytest.raises(MismatchError, match="The two networks differ"):
        merge([two[0], perceptrons(64, 32, 32, 10)[0]], IMAGE)


# -- average -----------------------------------------------------------------------------------------------------------


def steps(count: int = 5) -> Iterator[nn.Module]:
    model = residual(nn.BatchNorm2d)
    for _ in range(count):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        yield copy.deepcopy(model)


def test_averages_are_those_of_torch() -> None:
    models = list(steps())
    oracle = AveragedModel(models[0])
    for model in models:
        oracle.update_parameters(model)
    found = average(iter(models))
    for p, q in zip(found.parameters(), oracle.module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    states = average(m.state_dict() for m in models)
    assert states.keys() == found.state_dict().keys()
    assert all(torch.equal(states[k], v) for k, v in found.state_dict().items())


def test_statistics_of_an_average() -> None:
    models = list(steps())
    data = [(torch.randn(16, 3, 6, 6), torch.zeros(16))]
    assert same(average(models, data=data), reset_statistics(average(models), data))
    with pytest.raises(it.InputError, match="State dicts cannot run on data"):
        average([m.state_dict() for m in models], data=data)  # pyrefly: ignore[no-matching-overload]
    with pytest.raises(it.InputError, match="nothing to average"):
        average([])


# -- task vectors ------------------------------------------------------------------------------------------------------


def tuned(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy with all numbers changed a little, statistics too."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for x in [*other.parameters(), *other.buffers()]:
            if x.is_floating_point():
                x.add_(0.01 * torch.rand_like(x))
    return other


@pytest.mark.parametrize("kind", ["MLP with ReLU", "MLP with tanh", "residual with batch norm", "attention"])
def test_tuning_is_carried_from_one_basis_to_another(kind: str) -> None:
    """b = g·a was tuned to g·a′. Its task vector, carried to a, makes a into a′."""
    a, _ = made(kind)
    sym = symmetry_of(kind)
    wanted = tuned(a)
    g = sym.random(4)
    b, b_tuned = sym.act(g, a), sym.act(g, wanted)
    delta = task_vector(b_tuned, b)
    carried = transport(delta, g.inverse(), sym)
    found = add(a, carried)
    assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in _pairs(found, wanted))
    assert not all(torch.allclose(x, y, rtol=1e-3) for x, y in _pairs(add(a, delta), wanted)), (
        "as it is it does not fit"
    )
    alignment = it.align(a, b, symmetry=sym, method="scale-aware")
    again = add(a, transport(delta, alignment))
    assert distance(sym, again, wanted) < 1e-6


def _pairs(a: nn.Module, b: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(a.state_dict().values(), b.state_dict().values(), strict=True)


def test_part_of_a_task_vector_and_half_of_it() -> None:
    a, _ = made("MLP with ReLU")
    sym = symmetry_of("MLP with ReLU")
    g = sym.random(1)
    delta = {"a.bias": torch.ones(5, dtype=torch.float64)}
    carried = transport(delta, g, sym)
    assert list(carried) == ["a.bias"]
    moved = sym.act(g, add(a, delta, 0.5)).state_dict()["a.bias"] - sym.act(g, a).state_dict()["a.bias"]
    torch.testing.assert_close(moved, 0.5 * carried["a.bias"])


def test_tied_weights_change_once() -> None:
    model = Net(lambda m, x: m.b(m.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model.b.weight = model.a.weight
    changed = add(model, {"a.weight": torch.ones(3, 3), "b.weight": torch.ones(3, 3)})
    torch.testing.assert_close(changed.state_dict()["a.weight"], model.a.weight.detach() + 1)


def test_task_vectors_that_do_not_fit() -> None:
    a, _ = made("MLP with ReLU")
    sym = symmetry_of("MLP with ReLU")
    with pytest.raises(it.InputError, match="An element needs its symmetry"):
        transport({}, sym.identity())
    with pytest.raises(MismatchError, match=r"'a.bias' has shape \(4,\), but in the symmetry it has shape \(5,\)"):
        transport({"a.bias": torch.zeros(4)}, sym.identity(), sym)
    with pytest.raises(MismatchError, match="changes 'z', which the network does not have"):
        add(a, {"z": torch.zeros(4)})
    with pytest.raises(MismatchError, match=r"'a.weight' has shape \(5, 3\) in the tuned one and has shape \(6, 3\)"):
        task_vector(a, mlp(torch.relu, (3, 6, 4, 2)))
    block = Net(
        lambda m, x: m.out(m.norm(m.stem(x))),
        stem=nn.Linear(3, 4, False), norm=nn.RMSNorm(4), out=nn.Linear(4, 2),
    )  # fmt: skip
    folded = it.symmetry(block, torch.zeros(1, 3), continuous=True)
    with pytest.raises(it.InputError, match=r"first folds 'norm\.weight' into the layers that read it"):
        transport({}, folded.identity(), folded)


@pytest.mark.parametrize("method", ["none", "sorted"])
def test_options_that_nothing_reads_are_refused(method: str) -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)) for _ in range(2)]
    with pytest.raises(it.InputError, match=f"'{method}' searches for nothing and has no options; found"):
        it.merge(models, torch.zeros(1, 3), method=method, options={"relative": True})


def test_a_repair_is_scored_beside_both_plain_means() -> None:
    models, (_, test) = perceptrons(64, 32, 32, 10)[:2], digits()
    found = merge(models, data=test, repair="repair")
    assert [s.name for s in found.scores][:3] == ["merged", "plain mean", "plain mean, same repair"]
    assert found.scores[1].loss == pytest.approx(loss(merge(models, method="none").model), rel=1e-5)
    repaired = merge(models, data=test, method="none", repair="repair", check=False).model
    assert found.scores[2].loss == pytest.approx(loss(repaired), rel=1e-5)


def test_one_network_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as a user runs it
    a, b = perceptrons(64, 16, 10)[:2]
    with pytest.raises(
        it.InputError,
        match=r"merge needs a list of networks, but got one Sequential. Put them into a list: merge\(\[a, b\], x\)",
    ):
        merge(a, b, IMAGE)  # pyrefly: ignore


def test_the_method_of_the_frame_is_in_the_result() -> None:
    networks, x = [nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2)], torch.zeros(1, 3)
    assert it.merge(networks, x).to_dict()["frame"]["method"] == "weights"
    assert it.merge(networks, x, method="none").to_dict()["frame"] is None
