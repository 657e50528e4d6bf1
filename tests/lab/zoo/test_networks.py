"""The architectures of the zoo: published parameter counts, module paths, tracing, symmetry, and error messages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn

import intertwine as it
from intertwine.checkpoints import load
from intertwine.checkpoints.weights import fill, read_checkpoint
from intertwine.errors import InputError
from intertwine.lab.papers.work import PublishedNetworks
from intertwine.lab.zoo.networks.options import MODULES, maker, one_of
from intertwine.lab.zoo.networks.registry import architecture, architectures, build, figure_numbers, relu_paths

ROOT = Path(__file__).parents[3]


def count(name: str, **options: Any) -> int:
    with torch.device("meta"):  # shapes alone: the large networks need not be filled
        model = build(name, **options)
    return sum(p.numel() for p in model.parameters())


# -- parameters --------------------------------------------------------------------------------------------------------

COUNTS = [
    ("mlp", {}, 407_050),
    ("mlp", {"widths": (784, 512, 512, 512, 10)}, 932_362),  # Zhou et al. 2023
    ("mlp", {"widths": (784, 512, 10), "bias": False}, 406_528),
    ("lenet", {}, 61_706),
    ("lenet", {"padding": 0}, 44_426),
    ("lenet", {"padding": 0, "in_channels": 3, "side": 32}, 62_006),
    ("tiny10", {}, 86_778),  # Csiszárik et al. print 87.4k
    ("resnet20", {}, 269_722),  # Godfrey et al. 2022, figure 27
    ("resnet20", {"shortcut": "B"}, 272_474),  # Csiszárik et al. 2021
    ("resnet20", {"shortcut": "B", "width": 2}, 4 * 269_824 + 2 * (432 + 1_568 + 640) + 10),  # inner, outer, bias
    ("resnet32", {}, 464_154),
    ("resnet44", {}, 658_586),
    ("resnet56", {}, 853_018),
    ("resnet110", {}, 1_727_962),
    ("resnet18", {}, 11_173_962),  # Godfrey et al. 2022, figure 28
    ("resnet34", {}, 21_282_122),
    ("resnet50", {}, 23_520_842),
    ("resnet50", {"residual_relu": False}, 23_520_842),
    ("vgg11", {"norm": True}, 9_231_114),
    ("vgg11_bn", {}, 9_231_114),
    ("vgg13_bn", {}, 9_416_010),
    ("vgg16", {}, 14_719_818),
    ("vgg16_bn", {}, 14_728_266),
    ("vgg19_bn", {}, 20_040_522),
    ("vgg16", {"classifier": "mlp"}, 14_714_688 + 513 * 4096 + 4097 * 4096 + 4097 * 10),
    ("cct", {}, 3_168_267),  # published as 3.17 M
    ("gpt", {"tied": False}, count("gpt") + 256 * 128),
]


@pytest.mark.parametrize(("name", "options", "parameters"), COUNTS, ids=str)
def test_parameters_are_those_published(name: str, options: dict[str, Any], parameters: int) -> None:
    assert count(name, **options) == parameters


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, 1_558_026),  # figure 26a: BatchNorm and all biases
        ({"norm": False, "bias": "first", "head_bias": False}, 1_555_200),  # figure 26b: only the first convolution's
        ({"bias": False}, 1_557_066),  # the published code with BatchNorm: no biases of convolutions
        ({"norm": False}, 1_556_106),  # the published code without BatchNorm: all biases
    ],
    ids=["figure 26a", "figure 26b", "code, BN", "code, no BN"],
)
def test_000_G51_the_myrtle_cnn_is_counted_both_ways(options: dict[str, Any], parameters: int) -> None:
    assert count("myrtle", **options) == parameters


def test_000_G51_figure_and_code_differ_by_the_biases() -> None:
    channels = 64 + 128 + 256 + 512
    assert count("myrtle") - count("myrtle", bias=False) == channels
    assert (
        count("myrtle", norm=False) - count("myrtle", norm=False, bias="first", head_bias=False) == channels - 64 + 10
    )


def test_000_G54_constant_width() -> None:
    assert count("myrtle", width=512) == count("myrtle", widths=(512, 512, 512, 512))
    model = build("myrtle", width=6)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [6] * 4


def test_001_C33_the_width_multiplies_every_stage() -> None:
    model = build("resnet20", shortcut="B", width=2)
    stages = [len(model.get_parameter(f"layer{i}.2.conv2.weight")) for i in (1, 2, 3)]
    assert stages == [32, 64, 128]


# -- paths -------------------------------------------------------------------------------------------------------------


def test_000_G51_relus_of_the_myrtle_cnn() -> None:
    """The ReLUs are modules 3, 6, 10, 14 of figure 26a and 2, 4, 7, 10 of figure 26b: path + 1."""
    for norm, numbers in ((True, [3, 6, 10, 14]), (False, [2, 4, 7, 10])):
        model = build("myrtle", widths=(2, 3, 4, 5), norm=norm)
        assert list(figure_numbers(model).values()) == numbers
        assert [int(path) + 1 for path in relu_paths(model)] == numbers


def test_000_G52_relus_of_resnet20() -> None:
    numbers = figure_numbers(build("resnet20", width=0.25))
    assert len(numbers) == 19
    assert list(numbers.values()) == [3, *(n for block in range(9) for n in (8 + 8 * block, 11 + 8 * block))]
    assert (numbers["relu"], numbers["layer1.0.relu1"], numbers["layer1.0.relu2"]) == (3, 8, 11)
    assert numbers["layer3.2.relu2"] == 75


def test_000_G53_relus_of_resnet18() -> None:
    """Three of its blocks hold two more modules each, the 1×1 convolution and its BatchNorm."""
    numbers = figure_numbers(build("resnet18", width=0.125))
    assert list(numbers.values()) == [3, 8, 11, 16, 19, 24, 27, 34, 37, 42, 45, 52, 55, 60, 63, 70, 73]
    assert tuple(numbers) == relu_paths(build("resnet18", width=0.125))


@pytest.mark.parametrize(("name", "options"), [("resnet20", {"width": 0.25}), ("resnet50", {"width": 0.0625})])
def test_relu_paths_are_in_the_order_of_computation(name: str, options: dict[str, Any]) -> None:
    model, seen = build(name, **options).eval(), []
    for path, module in model.named_modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda *_, path=path: seen.append(path))
    model(torch.randn(1, 3, 8, 8))
    assert tuple(seen) == relu_paths(model)


@pytest.mark.parametrize("path", ["relu", "layer1.0.relu1", "layer1.0.relu2", "layer2.0.relu2"])
def test_both_sides_of_a_relu_can_be_taken(path: str) -> None:
    model, sides = build("resnet20", width=0.25).eval(), []
    model.get_submodule(path).register_forward_hook(lambda _, args, out: sides.extend([args[0], out]))
    model(torch.randn(2, 3, 16, 16))
    before, after = sides
    assert before.min() < 0
    assert torch.equal(after, before.clamp(min=0))


def test_000_G56_without_the_residual_relu() -> None:
    """The sum leaves the block as it is; the ReLUs inside the block stay."""
    model = build("resnet50", width=0.0625, residual_relu=False).eval()
    assert relu_paths(model)[:3] == ("relu", "layer1.0.relu1", "layer1.0.relu2")
    assert len(relu_paths(model)) == 1 + 2 * 16
    with torch.no_grad():
        out = model.get_submodule("layer1")(torch.randn(1, 4, 8, 8))
    assert out.min() < 0


def test_option_a_takes_every_second_pixel_and_adds_zeros() -> None:
    shortcut = build("resnet20", width=0.25).get_submodule("layer2.0.shortcut")
    x = torch.randn(2, 4, 6, 6)
    out = shortcut(x)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert out.shape == (2, 8, 3, 3)
    assert not out[:, :2].any()
    assert not out[:, 6:].any()


# -- initialisation ----------------------------------------------------------------------------------------------------


def test_resnets_start_from_kaiming() -> None:
    weight = build("resnet20").requires_grad_(False).get_parameter("layer3.1.conv1.weight")
    assert float(weight.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    weight = build("resnet20", init="torch").requires_grad_(False).get_parameter("layer3.1.conv1.weight")
    assert float(weight.std()) == pytest.approx((1 / (3 * 64 * 9)) ** 0.5, rel=0.02)


def test_a_seed_gives_the_network() -> None:
    first, again = [(torch.manual_seed(3), build("tiny10"))[1].state_dict() for _ in range(2)]
    assert all(torch.equal(first[name], again[name]) for name in first)


# -- tracing, shapes and symmetry --------------------------------------------------------------------------------------

#: Small versions of every kind of network: options, and an input that they read.
SMALL: dict[str, tuple[str, dict[str, Any], tuple[int, ...], int]] = {
    "mlp": ("mlp", {"widths": (12, 6, 5, 4)}, (3, 2, 2), 4),
    "lenet": ("lenet", {"widths": (3, 4, 6, 5), "side": 16}, (1, 16, 16), 10),
    "myrtle": ("myrtle", {"widths": (3, 4, 5, 6)}, (3, 32, 32), 10),
    "myrtle, no BN": ("myrtle", {"width": 4, "norm": False, "activation": "leaky_relu:0.1"}, (3, 32, 32), 10),
    "tiny10": ("tiny10", {"width": 0.25, "classes": 3}, (3, 32, 32), 3),
    "resnet20": ("resnet20", {"width": 0.25}, (3, 8, 8), 10),
    "resnet20, B": ("resnet20", {"width": 0.25, "shortcut": "B", "in_channels": 1}, (1, 8, 8), 10),
    "resnet18": ("resnet18", {"width": 0.0625}, (3, 8, 8), 10),
    "resnet50": ("resnet50", {"width": 0.03125, "residual_relu": False}, (3, 8, 8), 10),
    "vgg11": ("vgg11", {"width": 0.0625}, (3, 32, 32), 10),
    "vgg16": ("vgg16_bn", {"width": 0.0625, "classifier": "mlp", "hidden": 6}, (3, 32, 32), 10),
    "cct": ("cct", {"dim": 8, "depth": 2, "heads": 2, "side": 8}, (3, 8, 8), 10),
    "vit": ("vit", {"dim": 8, "depth": 2, "heads": 2, "side": 8}, (3, 8, 8), 10),
    "vit, mean": ("vit", {"dim": 8, "depth": 1, "heads": 2, "side": 8, "pool": "mean"}, (3, 8, 8), 10),
    "gpt": ("gpt", {"dim": 8, "depth": 2, "heads": 2, "vocab": 11, "context": 6}, (5,), 11),
    "gpt, free head": ("gpt", {"dim": 8, "depth": 1, "heads": 2, "vocab": 11, "tied": False}, (5,), 11),
    "gpt, rms": (
        "gpt",
        {"dim": 8, "depth": 1, "heads": 2, "vocab": 11, "context": 5, "tied": False, "norm": "rms"},
        (5,),
        11,
    ),
    "vit, rms": ("vit", {"dim": 8, "depth": 1, "heads": 2, "side": 8, "norm": "rms"}, (3, 8, 8), 10),
}


def small(case: str, batch: int = 2) -> tuple[nn.Module, Tensor]:
    name, options, shape, classes = SMALL[case]
    x = torch.randint(0, classes, (batch, *shape)) if name == "gpt" else torch.randn(batch, *shape)
    return build(name, **options).eval(), x


@pytest.mark.parametrize("case", SMALL)
def test_forward_and_trace(case: str) -> None:
    """One row of logits for each example, from the network and from its fx trace, whatever the size of the batch."""
    classes = SMALL[case][-1]
    model, batch = small(case, 3)
    traced = fx.symbolic_trace(model)
    with torch.no_grad():
        for x in (batch, batch[:1]):
            out = model(x)
            assert out.shape == ((len(x), 5, classes) if case.startswith("gpt") else (len(x), classes))
            assert torch.equal(traced(x), out)


@pytest.mark.parametrize("name", architectures())
def test_every_network_of_the_registry_can_be_traced(name: str) -> None:
    """At full size, in training mode, on its own example input; on the meta device, where nothing is computed."""
    with torch.device("meta"):
        model, x = build(name), architecture(name).example(2)
    out = fx.symbolic_trace(model)(x)
    assert out.shape[0] == 2
    assert out.shape[-1] == (256 if name == "gpt" else 10)


@pytest.mark.parametrize("case", SMALL)
def test_the_symmetry_is_found_and_holds(case: str) -> None:
    model, x = small(case)
    sym = it.symmetry(model, x)
    assert sym.wires
    certificate = sym.certify(model, x, trials=1)
    assert certificate.ok
    assert not certificate.broken
    assert sym.coverage(model) > 0.9


def test_a_wire_for_every_hidden_layer() -> None:
    model, x = small("myrtle")
    assert sorted(wire.size for wire in it.symmetry(model, x).wires) == [3, 4, 5, 6]


# -- transformers ------------------------------------------------------------------------------------------------------


def test_the_language_model_does_not_look_ahead() -> None:
    model, ids = small("gpt", 1)
    other = ids.clone()
    other[0, 3] = (ids[0, 3] + 1) % 11
    gap = (model(ids) - model(other)).abs().amax(2)[0]
    assert not gap[:3].any()
    assert gap[3:].all()


def test_a_tied_head_is_the_embedding() -> None:
    model, _ = small("gpt")
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")


def test_the_vision_transformer_reads_its_class_token_or_the_mean() -> None:
    assert "token" in dict(small("vit")[0].named_parameters())
    assert "token" not in dict(small("vit, mean")[0].named_parameters())


@pytest.mark.parametrize(
    ("case", "outside"),
    [
        ("gpt, rms", ["tokens.weight", "positions", "head.weight"]),
        ("vit, rms", ["token", "positions", "embed.weight", "embed.bias", "head.weight"]),
    ],
)
def test_rms_norms_let_the_tokens_be_rotated(case: str, outside: list[str]) -> None:
    """The rotation reaches every tensor that writes to the residual stream or reads from it, the outermost ones too."""
    model, x = small(case)
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    sym = it.symmetry(model, x, continuous=True)
    stream = sym.wires[0]
    assert str(stream.group) == "O(8)"
    assert {*outside} <= {slot.parameter for slot in stream.slots if "folded" not in slot.role}
    assert sym.certify(model, x, trials=1).ok


def test_a_tied_head_leaves_only_permutations_and_signs() -> None:
    """The weight of the last norm would have to be folded into the embeddings too."""
    model = build("gpt", dim=8, depth=1, heads=2, vocab=11, context=6, norm="rms")
    sym = it.symmetry(model, torch.zeros(1, 5, dtype=torch.long), continuous=True)
    assert {s.matrix for s in sym.wire_specs} == {None, "GL"}


def test_the_default_is_a_layer_norm() -> None:
    for name in ("gpt", "vit"):
        plain, rms = (build(name, dim=8, depth=2, heads=2, **more) for more in ({}, {"norm": "rms"}))
        assert sum(isinstance(m, nn.LayerNorm) for m in plain.modules()) == 5
        assert sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in rms.parameters()) == 5 * 8


def test_000_G55_sine_positions_are_saved_with_the_weights() -> None:
    """A reordering of the features reorders the positions too, so they belong to the checkpoint."""
    model, x = small("cct")
    assert "positions" in model.state_dict()
    assert "positions" not in dict(model.named_parameters())
    assert any(slot.parameter == "positions" for wire in it.symmetry(model, x).wires for slot in wire.slots)


# -- tiny10 and zoo:NAME -----------------------------------------------------------------------------------------------


def test_001_C32_tiny10_is_the_network_of_the_example(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_file(build("tiny10").state_dict(), tmp_path / "weights.safetensors")
    models = [
        load(name, tmp_path / "weights.safetensors", ["2x3x32x32"]).model
        for name in ("zoo:tiny10", f"{ROOT / 'examples' / 'tiny10.py'}:net")
    ]
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(models[0](x), models[1](x), atol=1e-6)


@pytest.mark.skipif(
    not PublishedNetworks("tiny10").files, reason="INTERTWINE_DATA names no folder that holds tiny10/seed*.safetensors"
)
def test_001_C32_the_published_checkpoints_fit() -> None:
    for file in PublishedNetworks("tiny10").files.values():
        state, model = read_checkpoint(file), build("tiny10")
        assert set(state) == set(model.state_dict())
        fill(model, state, str(file))
        assert model.eval()(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_a_network_of_the_zoo_is_loaded_by_name() -> None:
    loaded = load("zoo:myrtle")
    assert loaded.parameters == 1_558_026
    assert loaded.inputs == ("float32 1×3×32×32",)
    assert not loaded.model.training
    assert load("zoo:gpt").inputs == ("int64 1×64",)


def test_a_name_the_zoo_does_not_know() -> None:
    with pytest.raises(
        InputError, match=r"Unknown zoo network 'resnet21'\. Did you mean 'resnet\d+', .* one of: mlp, "
    ):
        load("zoo:resnet21")


# -- activations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_every_activation_by_name(name: str) -> None:
    assert isinstance(build("mlp", widths=(4, 3, 2), activation=name).get_submodule("2"), MODULES[name])


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "leaky_relu", "slope": 0.1},
        {"activation": "leaky_relu:0.1"},
        {"activation": lambda: nn.LeakyReLU(0.1)},
        {"activation": nn.LeakyReLU(0.1)},
    ],
    ids=["slope", "text", "function", "module"],
)
def test_every_way_to_ask_for_a_leaky_relu(options: dict[str, Any]) -> None:
    model = build("resnet20", width=0.25, **options)
    found = [module for module in model.modules() if isinstance(module, nn.LeakyReLU)]
    assert len(found) == len(relu_paths(model, nn.LeakyReLU)) == 19
    assert {module.negative_slope for module in found} == {0.1}
    assert relu_paths(model) == ()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet21",
            {},
            r"Unknown zoo network 'resnet21'\. Did you mean 'resnet\d+', .*\? Choose one of",
        ),
        ("zzz", {}, r"Unknown zoo network 'zzz'. Choose one of: mlp, lenet, .*, gpt.$"),
        (
            "tiny10",
            {"widht": 2},
            r"Unknown option of tiny10 'widht'. Did you mean 'width'.* Choose one of: width, in_channels, ",
        ),
        ("resnet20", {"depth": 32}, r"Unknown option of resnet20 'depth'"),
        ("vgg16_bn", {"norm": False}, r"Unknown option of vgg16_bn 'norm'"),
        (
            "mlp",
            {"classes": 3, "side": 2},
            r"option of mlp 'classes'. .*one of: widths, activation, bias, slope",
        ),
        ("resnet20", {"shortcut": "C"}, r"shortcut must be one of None, 'A', 'B', but is 'C'"),
        ("resnet20", {"init": "he"}, r"init must be one of 'kaiming', 'torch', but is 'he'"),
        ("resnet20", {"width": 0}, r"width must be a positive number .*, but is 0"),
        ("vgg11", {"classifier": "two"}, r"classifier must be one of 'linear', 'mlp', but is 'two'"),
        ("vit", {"pool": "max"}, r"pool must be one of 'token', 'mean', but is 'max'"),
        ("vit", {"patch": 5}, r"side must be a multiple of patch, but they are side=32, patch=5"),
        ("vit", {"dim": 10, "heads": 4}, r"dim must be a multiple of heads, but they are dim=10, heads=4"),
        ("vit", {"norm": "batch"}, r"norm must be one of 'layer', 'rms', but is 'batch'"),
        ("gpt", {"norm": "batch"}, r"norm must be one of 'layer', 'rms', but is 'batch'"),
        ("cct", {"dim": 9, "heads": 3}, r"dim must be even .*, but is 9"),
        ("gpt", {"vocab": 0}, r"vocab must be an integer of at least 1, but is 0"),
        ("myrtle", {"bias": "last"}, r"bias must be one of True, False, 'first', but is 'last'"),
        ("myrtle", {"widths": (1, 2, 3)}, r"widths must be four sizes .*, but is \(1, 2, 3\)"),
        ("myrtle", {"width": -1}, r"width must be an integer of at least 1, but is -1"),
        ("lenet", {"widths": (6, 16)}, r"widths must be four sizes .*, but is \(6, 16\)"),
        ("lenet", {"side": 8, "padding": 0}, r"side=8 with padding=0 are too small .* Give larger images"),
        ("mlp", {"widths": (784,)}, r"widths must be two sizes or more, .*, but is \(784,\)"),
        ("mlp", {"activation": "rellu"}, r"Unknown activation 'rellu'. Did you mean 'relu"),
        ("mlp", {"activation": "relu:0.1"}, r"relu takes none. Write 'relu', or use leaky_relu:NUMBER"),
        ("mlp", {"activation": "leaky_relu:x"}, r"'leaky_relu:x' needs a number after the colon, but has 'x'"),
        ("mlp", {"slope": 0.1}, r"slope=0.1 does not apply to the activation 'relu'. Leave"),
    ],
)
def test_errors_say_what_to_do(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(name, **options)


def test_an_activation_must_give_a_module() -> None:
    with pytest.raises(InputError, match=r"returns int instead of a module. Pass a function without arguments"):
        maker(lambda: 3)()


def test_a_number_does_not_pass_for_a_switch() -> None:
    with pytest.raises(InputError, match=r"bias must be one of True, False, 'first', but is 1"):
        one_of("bias", 1, (True, False, "first"))


def test_positions_of_gpt_begin_small() -> None:
    assert 0.015 < float(it.zoo.build("gpt").get_parameter("positions").detach().std()) < 0.025
