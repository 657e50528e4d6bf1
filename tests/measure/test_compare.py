"""`compare`: all layers against all layers, in one pass if that is exact; mismatched data is refused."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import intertwine as it
from intertwine.data.layouts import arrange, arrange_pair
from intertwine.errors import InputError, MismatchError
from intertwine.measure.compare import STREAMED, available_memory
from intertwine.measure.measure import find

LAYERS = ["conv1", "layer1.0.relu1", "layer2.0.relu2", "layer3.0.relu2", "fc"]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return it.zoo.build("resnet20", width=0.25).eval()


def batches(sizes: tuple[int, ...] = (5, 5, 3), seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(sum(sizes), 3, 16, 16, generator=g)
    return [(x, torch.zeros(len(x))) for x in images.split(list(sizes))]


def hooked(model: nn.Module, layer: str, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The same features by a plain hook."""
    kept: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, args, y: kept.append(y.detach().clone()))
    with torch.no_grad():
        model(torch.cat([x for x, _ in data]))
    handle.remove()
    return kept[0]


@pytest.mark.parametrize("policy", ["channels", "flatten", "pool"])
@pytest.mark.parametrize(
    "name", ["linear_cka", "linear_cka_biased", "kernel_alignment", "relu_procrustes", "cca", "relu_cka"]
)
def test_every_pair_is_what_measure_gives(name: str, policy: str) -> None:
    """Whichever way it was computed, against plain hooks and one call per pair."""
    a, b, data = net(0), net(1), batches()
    found = it.compare(a, b, data, LAYERS, [name], policy)
    for first in LAYERS:
        for second in LAYERS:
            x, y = hooked(a, first, data), hooked(b, second, data)
            if find(name).positions and not find(name).meets and policy == "channels":
                x, y = arrange(x, "structured"), arrange(y, "structured")
            else:
                x, y = arrange_pair(x, y, policy)
            expected, got = it.measure(x, y, name), found.result(first, second)
            assert (expected.degenerate is None) == (got.degenerate is None), (first, second)
            if expected.degenerate is None:
                assert got.value == pytest.approx(expected.value, abs=2e-5), (first, second)


def test_the_size_of_batches_does_not_matter() -> None:
    one, three = (it.compare(net(0), net(1), batches(sizes), LAYERS) for sizes in ((13,), (5, 5, 3)))
    assert torch.allclose(one.matrix(), three.matrix(), atol=1e-6)


def test_several_measures_and_other_layers() -> None:
    found = it.compare(
        net(0), net(1), batches(), "conv1", ["cca", "linear_cka"], "pool", layers_b=["fc", "layer1.*.relu2"]
    )
    assert found.first == ("conv1",)
    assert found.second == ("fc", "layer1.0.relu2", "layer1.1.relu2", "layer1.2.relu2")
    assert found.matrix("linear_cka").shape == (1, 4)
    assert [row["measure"] for row in found.to_rows()] == ["cca"] * 4 + ["linear_cka"] * 4
    assert repr(found) == "Comparison(1 × 4 layers by cca, linear_cka, 13 samples, pool)"


def test_a_generator_is_walked_for_both() -> None:
    def once() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches()

    assert torch.equal(
        it.compare(net(0), net(1), once(), LAYERS).matrix(), it.compare(net(0), net(1), batches(), LAYERS).matrix()
    )


def test_data_in_another_order_at_every_walk_is_refused() -> None:
    class Shuffled:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            data = batches((4, 4, 4))
            return iter([data[i] for i in torch.randperm(3)])

    def eight_times(name: str) -> None:
        """Eight walks in the same order by chance are one in 6^8."""
        for _ in range(8):
            it.compare(net(0), net(1), Shuffled(), LAYERS[:2], [name], "pool")

    for name in ("linear_cka", "cca"):
        with pytest.raises(MismatchError):
            eight_times(name)


def test_models_are_left_as_they_were() -> None:
    a = net(0).train()
    before = {name: t.clone() for name, t in a.state_dict().items()}
    it.compare(a, a, batches(), LAYERS)
    assert a.training
    assert all(torch.equal(t, before[name]) for name, t in a.state_dict().items())
    assert not any(module._forward_hooks for module in a.modules())


def test_a_heat_map(tmp_path: Path) -> None:
    found = it.compare(net(0), net(1), batches(), LAYERS, ["linear_cka", "rsa"])
    figure = found.plot("rsa")
    figure.savefig(tmp_path / "map.svg")
    picture = (tmp_path / "map.svg").read_text(encoding="utf-8")
    assert len(picture) > 1000
    assert figure.axes[0].get_title() == "rsa, 13 samples, channels"
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == LAYERS


def test_000_D5_the_heat_map_says_what_unrelated_features_score() -> None:
    found = it.compare(net(0), net(1), batches(), LAYERS[:2], ["relu_procrustes"])
    low, high = sorted(r.baseline for r in found.results.values() if r.baseline is not None)[:: len(found.results) - 1]
    title = found.plot().axes[0].get_title()
    assert title.splitlines()[1] == f"unrelated features: {low:.2f} to {high:.2f}"
    assert all(row["baseline"] == found.result(row["first"], row["second"]).baseline for row in found.to_rows())


def test_no_data_frames_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(
        InputError, match=re.escape("polars is not installed: pip install 'intertwine[frames]'. Or use")
    ):
        it.compare(net(0), net(1), batches(), LAYERS[:1]).to_frame()
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert extras["project"]["optional-dependencies"]["frames"] == ["polars"]


def test_a_data_frame_holds_the_rows() -> None:
    found = it.compare(net(0), net(1), batches(), LAYERS[:2], ["linear_cka", "relu_procrustes"])
    assert found.to_frame().to_dicts() == found.to_rows()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_a_second_batch_is_run() -> None:
    """conv1 has 4 channels of 16 × 16 and fc 10 outputs, of two networks, as float32 and once more as float64."""
    a, b, calls = net(0), net(1), []
    a.register_forward_pre_hook(lambda *_: calls.append(1))
    needed = 15 * 2 * (4 * 16 * 16 + 10) * (4 + 8)  # three batches, of which the first has 5 samples
    text = "A comparison by mutual_knn with all samples in memory needs at least 0.000372 GB at once, but only"
    with pytest.raises(InputError, match=re.escape(text)) as caught:
        it.compare(a, b, batches(), ["conv1", "fc"], ["mutual_knn", "rv"], memory=needed - 1)
    names = "cca, kernel_alignment, linear_cka, linear_cka_biased, orthogonal_procrustes, permutation_procrustes, pwcca"
    assert f"only measures that go batch by batch: {names}, r2, relu_procrustes, rv, soft_matching, svcca." in str(
        caught.value
    )
    assert len(calls) == 1
    assert it.compare(a, b, batches(), ["conv1", "fc"], ["mutual_knn"], memory=needed).first == ("conv1", "fc")
    assert it.compare(a, b, batches(), ["conv1", "fc"], ["cca"], memory=needed // 10).first == ("conv1", "fc")
    assert it.compare(a, b, batches(), ["conv1", "fc"], ["rv"], memory=8 * (2 * (16 + 100) + 14**2)).first


def test_pooled_features_take_less() -> None:
    found = it.compare(net(0), net(1), batches(), ["conv1"], ["mutual_knn"], "pool", memory=15 * 2 * 4 * (4 + 8))
    plain = it.compare(net(0), net(1), batches(), ["conv1"], ["mutual_knn"], "pool")
    assert torch.equal(found.matrix(), plain.matrix())


def test_pairs_of_samples_are_counted() -> None:
    with pytest.raises(InputError, match=re.escape("by rsa with all samples in memory (rsa: every sample with every")):
        it.compare(net(0), net(1), batches(), ["conv1"], ["rsa"], memory=2 * (15 * 256) ** 2 * 4)
    it.compare(net(0), net(1), batches(), ["conv1"], ["relu_cka"], memory=2 * 15 * 4 * 256 * 12 + 2 * 15**2 * 4)


def test_layers_that_are_too_wide_to_be_summed_up() -> None:
    """Without a length of the data nobody knows whether the samples would fit, so the products are what counts."""

    class Endless:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(batches())

    with pytest.raises(InputError, match=r"comparison batch by batch needs.*The layers are wide: use the policy .pool"):
        it.compare(net(0), net(1), Endless(), ["conv1"], policy="flatten", memory=8 * 3 * 1024**2 - 1)
    with pytest.raises(InputError, match="of layers wider than the samples, under 'flatten', needs"):
        it.compare(net(0), net(1), batches(), ["conv1"], policy="flatten", memory=1e5)


def test_a_measure_says_what_it_holds() -> None:
    moments = {"cca", "svcca", "pwcca", "r2", "soft_matching"}
    moments |= {f"{group}_procrustes" for group in ("orthogonal", "permutation", "relu")}
    assert {m.name for m in it.measures() if m.memory == "features"} == set(STREAMED) | moments
    pairs = {m.name for m in it.measures() if m.memory == "pairs of samples"}
    assert pairs >= {"laplace_cka", "rbf_cka", "relu_cka", "rsa"}  # a new measure says so by itself


def test_free_memory_is_read() -> None:
    free = available_memory(torch.device("cpu"))
    assert free is None or 1e6 < free < 1e15


def test_errors() -> None:
    found = it.compare(net(0), net(1), batches(), LAYERS)
    with pytest.raises(InputError, match=re.escape("The layer 'conv2' is not compared. Did you mean 'conv1")):
        found.result("conv2", "fc")
    with pytest.raises(InputError, match="Unknown measure 'cca'"):
        found.matrix("cca")
    with pytest.raises(InputError, match="measures is empty"):
        it.compare(net(0), net(1), batches(), LAYERS, [])
    with pytest.raises(InputError, match=r"conv9.*Did you mean"):
        it.compare(net(0), net(1), batches(), ["conv9"])


def test_a_measure_by_its_name_alone() -> None:
    net, data = torch.nn.Sequential(torch.nn.Linear(3, 4)), [(torch.randn(9, 3), None)]
    assert it.compare(net, net, data, measures="cca").measures == ("cca",)


def test_a_layer_there_is_not_is_told_with_its_network() -> None:
    net, data = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), [(torch.randn(9, 3), None)]
    with pytest.raises(it.InputError, match=r"Unknown layer 'zz': the first network has .* Its modules: 0, 1\. "):
        it.compare(net, net, data, "zz")
    with pytest.raises(it.InputError, match=r"Unknown layer 'zz': the second network has no module"):
        it.compare(net, net, data, "0", layers_b=["zz"])


def test_a_whole_data_set_is_no_batches() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.Linear(4, 2))
    data = it.zoo.data("digits")
    x = torch.zeros(1, 1, 8, 8)
    calls = (
        lambda: it.compare(net, net, data),
        lambda: it.barrier(net, net, data),
        lambda: it.barrier(net, net, data, scales=True),
        lambda: it.align(net, net, x, method="activations", data=data),
    )
    for call in calls:
        with pytest.raises(it.InputError, match=r'found Dataset. Pass one part of it: data.batches\("test"\)'):
            call()
