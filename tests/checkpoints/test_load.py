"""Models named in text: each source, the checkpoints they take, the inputs they are given, and what goes wrong."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from intertwine.checkpoints import libraries, load
from intertwine.checkpoints.load import Loaded
from intertwine.errors import InputError, MismatchError

FILE = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11, bias=False)
        self.out.weight = self.table.weight
    def forward(self, ids, scale=None):
        return self.out(self.table(ids))

class Anything(nn.Module):
    def forward(self, x, *rest, **named):
        return x

def mlp():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))

ready = mlp()
number = lambda: 7
text = "not a function"
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a Python file and gives its path."""

    def written(code: str) -> str:
        path = tmp_path / "nets.py"
        path.write_text(code)
        return str(path)

    return written


@pytest.fixture
def nets(write: Write) -> str:
    return write(FILE)


# -- the user's file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["mlp", "ready"])
def test_a_function_or_a_module_of_a_file(nets: str, factory: str) -> None:
    loaded = load(f"{nets}:{factory}", inputs=["5x3"])
    assert (loaded.parameters, loaded.inputs) == (8 * 3 + 8 + 16 + 18, ("float32 5×3",))
    assert loaded.bytes == 4 * (loaded.parameters + 16) + 8
    assert not loaded.model.training
    assert loaded.model(*loaded.args, **loaded.kwargs).shape == (5, 2)


def test_a_class_of_a_file(nets: str) -> None:
    loaded = load(f"{nets}:Words", inputs=["int:2x5"])
    assert loaded.model(*loaded.args).shape == (2, 5, 11)
    assert loaded.parameters == 44, "tied weights count once"


@pytest.mark.parametrize(
    ("returned", "inputs"),
    [
        ("torch.zeros(2, 3)", ("float32 2×3",)),
        ("(torch.zeros(2, 3), 4)", ("float32 2×3", "4")),
        ("[torch.zeros(2, 3)]", ("float32 2×3",)),
        ("{'x': torch.zeros(2, 3)}", ("x: float32 2×3",)),
        ("((torch.zeros(2, 3),), {'mask': [torch.ones(2)]})", ("float32 2×3", "mask: list of float32 2")),
    ],
)
def test_a_file_gives_its_own_inputs(write: Write, returned: str, inputs: tuple[str, ...]) -> None:
    nets = write(f"{FILE}\ndef example_inputs():\n    return {returned}\n")
    assert load(f"{nets}:Anything").inputs == inputs
    assert load(f"{nets}:mlp", inputs=["9x3"]).inputs == ("float32 9×3",), "what is asked for comes first"


def test_a_file_may_import_its_neighbours(write: Write, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_nets.py").write_text("from torch import nn\nbuild = lambda: nn.Linear(3, 3)\n")
    nets = write("from neighbour_of_nets import build\n")
    before = list(sys.path)
    assert isinstance(load(f"{nets}:build", inputs=["1x3"]).model, nn.Linear)
    assert sys.path == before


def test_weights_are_the_same_each_time_and_the_callers_random_numbers_stay(nets: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second = (load(f"{nets}:mlp", inputs=["1x3"]) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.model[0].weight, second.model[0].weight)  # type: ignore[index]
    assert torch.equal(first.args[0], second.args[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", r"'resnet18'. Name it .* path/to/file.py:factory, timm:NAME, torchvision:NAME, hf:NAME"),
        ("keras:resnet", r"'keras:resnet'. Name it .* path/to/file.py:factory"),
        ("nowhere/nets.py:mlp", r"There is no file nowhere/nets.py"),
        ("nowhere/nets.py", r"There is no file nowhere/nets.py"),
        ("{nets}", r"without the name of a function. Write .*nets.py:NAME. It offers: Words, Anything, mlp"),
        ("{nets}:cnn", r"Unknown function 'cnn' in .*nets.py. It offers: Words, Anything, mlp"),
        ("{nets}:text", r"Unknown function 'text'"),
        ("{nets}:number", r"returns int, not a torch.nn.Module"),
        ("{nets}:mlp", r"No example input is known for .*--input 1x3x224x224 .*example_inputs"),
    ],
)
def test_what_is_no_model_is_explained(nets: str, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(name.format(nets=nets))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_package_anywhere", "stopped at line 1 with ModuleNotFoundError: No module named 'no_such"),
        ("def build():\n    return 1 / 0", "stopped at line 2 with ZeroDivisionError: division by zero"),
        ("def build(width):\n    pass", r"TypeError: build\(\) missing 1 required .* called without arguments"),
        ("def build(:", "stopped at line 1 with SyntaxError"),
    ],
)
def test_an_error_in_the_file_is_told_with_its_line(write: Write, code: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(f"{write(code)}:build", inputs=["1"])


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_integer_ids_fit_every_table(nets: str) -> None:
    ids = load(f"{nets}:Words", inputs=["int:40x40"]).args[0]
    assert ids.dtype == torch.int64
    assert set(ids.unique().tolist()) == set(range(11))


def test_named_inputs_go_by_keyword(nets: str) -> None:
    loaded = load(f"{nets}:Words", inputs=["ids=int:1x5", "scale=float:2"])
    assert loaded.inputs == ("ids: int64 1×5", "scale: float32 2")


@pytest.mark.parametrize("text", ["", "x", "1,3", "1x", "int:", "long:1x3", "1x-3", "a b=1x3"])
def test_an_input_that_is_not_understood(nets: str, text: str) -> None:
    with pytest.raises(InputError, match=r"is not understood. Give its sizes joined by x"):
        load(f"{nets}:mlp", inputs=[text])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["2x5"], r"forward of .*mlp raises RuntimeError when called with float32 2×5: mat1 and mat2 shapes"),
        (["int:2x3"], r"raises RuntimeError when called with int64 2×3: .* such as --input 1x3x224x224"),
        (["2x3", "2x3"], r"raises TypeError when called with float32 2×3, float32 2×3"),
        (["x=2x3"], r"raises TypeError when called with x: float32 2×3: .* unexpected keyword argument 'x'"),
    ],
)
def test_an_input_the_model_does_not_take(nets: str, inputs: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(f"{nets}:mlp", inputs=inputs)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def other_weights(nets: str) -> dict[str, torch.Tensor]:
    model = load(f"{nets}:mlp", inputs=["1x3"]).model
    return {name: torch.randn_like(t) if t.is_floating_point() else t + 5 for name, t in model.state_dict().items()}


def holds(loaded: Loaded, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, state[name]) for name, t in loaded.model.state_dict().items())


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: t for name, t in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": prefixed(state, "module.")},
        lambda state: prefixed(state, "module._orig_mod."),
    ],
    ids=["plain", "nested", "parallel", "compiled"],
)
def test_a_torch_file_is_loaded(nets: str, tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    state = other_weights(nets)
    torch.save(wrap(state), tmp_path / "weights.pt")
    assert holds(load(f"{nets}:mlp", tmp_path / "weights.pt", ["1x3"]), state)


def test_a_safetensors_file_is_loaded(nets: str, tmp_path: Path) -> None:
    state = other_weights(nets)
    save_file(state, tmp_path / "weights.safetensors")
    assert holds(load(f"{nets}:mlp", str(tmp_path / "weights.safetensors"), ["1x3"]), state)


@pytest.mark.parametrize("kept", ["table.weight", "out.weight"])
def test_one_of_several_tied_names_is_enough(nets: str, tmp_path: Path, kept: str) -> None:
    table = torch.randn(11, 4)
    save_file({kept: table}, tmp_path / "tied.safetensors")
    model = load(f"{nets}:Words", tmp_path / "tied.safetensors", ["int:1x3"]).model
    assert torch.equal(model.table.weight, table)  # type: ignore[union-attr]
    assert model.table.weight is model.out.weight  # type: ignore[union-attr]


def test_step_counters_may_be_missing(nets: str, tmp_path: Path) -> None:
    state = other_weights(nets)
    del state["1.num_batches_tracked"]
    save_file(state, tmp_path / "weights.safetensors")
    load(f"{nets}:mlp", tmp_path / "weights.safetensors", ["1x3"])


def test_weights_that_do_not_fit(nets: str, tmp_path: Path) -> None:
    state = other_weights(nets)
    state["head.weight"] = state.pop("4.weight")
    state["0.weight"] = torch.zeros(9, 3)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(MismatchError) as caught:
        load(f"{nets}:mlp", tmp_path / "w.safetensors", ["1x3"])
    for fact in (
        "w.safetensors do not fit Sequential: 1 missing from the file: 4.weight; 1 not in the model: head.weight",
        "1 of another shape: 0.weight (file (9, 3), model (8, 3))",
        "Give the checkpoint of this architecture",
    ):
        assert fact in str(caught.value)


def test_a_long_list_of_faults_is_cut(nets: str, tmp_path: Path) -> None:
    save_file(prefixed(other_weights(nets), "backbone."), tmp_path / "w.safetensors")
    with pytest.raises(
        MismatchError, match=r"8 missing from the file: 0.weight, 0.bias, 1.weight …; 9 not in the model"
    ):
        load(f"{nets}:mlp", tmp_path / "w.safetensors", ["1x3"])


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused(nets: str, tmp_path: Path) -> None:
    torch.save({"0.weight": Bomb(tmp_path / "ran")}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"is refused: reading it could run code \(it needs \w+.mkdir\).*safetensors"):
        load(f"{nets}:mlp", tmp_path / "weights.pt", ["1x3"])
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_module_is_refused(nets: str, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"is refused: .*torch.nn.modules.linear.Linear.*save its tensors alone"):
        load(f"{nets}:mlp", tmp_path / "model.pt", ["1x3"])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 broken"])
def test_what_is_no_checkpoint(nets: str, tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    words = r"cannot be read as a checkpoint \(.*\)\. Give a safetensors file|is not a checkpoint, or a damaged one"
    with pytest.raises(InputError, match=words):
        load(f"{nets}:mlp", path, ["1x3"])


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [1.0], torch.zeros(3)])
def test_a_checkpoint_without_names(nets: str, tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(InputError, match="holds no named tensors"):
        load(f"{nets}:mlp", tmp_path / "weights.pt", ["1x3"])


def test_missing_weights(nets: str) -> None:
    with pytest.raises(InputError, match=r"There is no file nowhere.pt. Give the path"):
        load(f"{nets}:mlp", "nowhere.pt", ["1x3"])


# -- libraries ---------------------------------------------------------------------------------------------------------

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31, "n_positions": 12}


def config_file(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("timm:test_resnet", ("float32 1×3×160×160",)),
        ("torchvision:squeezenet1_1", ("float32 1×3×224×224",)),
        ("torchvision:mc3_18", ("float32 1×3×16×112×112",)),
    ],
)
def test_vision_models_come_with_their_inputs(name: str, inputs: tuple[str, ...]) -> None:
    assert load(name).inputs == inputs


@pytest.mark.models
def test_a_configuration_of_transformers(tmp_path: Path) -> None:
    path = config_file(tmp_path, GPT2)
    for name in (f"hf:{path}", f"hf:{tmp_path}"):
        loaded = load(name)
        assert type(loaded.model).__name__ == "GPT2LMHeadModel"
        assert loaded.inputs == ("input_ids: int64 1×12",)
        with torch.no_grad():
            assert loaded.model(**loaded.kwargs).logits.shape == (1, 12, 31)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
PICTURE = {**SMALL, "image_size": 32, "patch_size": 8}
ONE_SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 20}
BOTH_SIDES = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in ONE_SIDE.items()}
BART = {
    **BOTH_SIDES,
    "d_model": 16,
    "vocab_size": 31,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
CLIP = {"projection_dim": 8, "vision_config": PICTURE, "text_config": {**SMALL, "vocab_size": 31, "eos_token_id": 2}}


@pytest.mark.models
@pytest.mark.parametrize(
    ("config", "kind", "inputs"),
    [
        ({"model_type": "vit", **PICTURE}, "ViTForImageClassification", ("pixel_values: float32 1×3×32×32",)),
        (
            {"model_type": "bert", **SMALL, "vocab_size": 31, "architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM",
            ("input_ids: int64 1×16",),
        ),
        (
            {"model_type": "bart", **BART},
            "BartForConditionalGeneration",
            ("input_ids: int64 1×16", "decoder_input_ids: int64 1×16"),
        ),
        ({"model_type": "clip", **CLIP}, "CLIPModel", ("input_ids: int64 1×16", "pixel_values: float32 1×3×32×32")),
    ],
    ids=["image", "named class", "two parts", "two towers"],
)
def test_transformers_of_many_kinds_run_on_their_inputs(
    tmp_path: Path, config: dict[str, Any], kind: str, inputs: tuple[str, ...]
) -> None:
    loaded = load(f"hf:{config_file(tmp_path, config)}")
    assert type(loaded.model).__name__ == kind
    assert loaded.inputs == inputs
    with torch.no_grad():
        loaded.model(**loaded.kwargs)


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnet81", r"Unknown timm model 'resnet81'. Did you mean 'resnet18"),
        ("torchvision:resnet180", r"Unknown torchvision model 'resnet180'. Did you mean 'resnet18"),
        ("hf:gpt3", r"Unknown transformers model type 'gpt3'. Did you mean .*gpt2.* Or give the path of a config.json"),
        ("hf:nowhere/config.json", r"nowhere.config.json cannot be read as JSON"),
    ],
)
def test_a_name_a_library_does_not_know(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(name)


@pytest.mark.models
@pytest.mark.parametrize("config", [{"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}, {}, []])
def test_a_configuration_of_an_unknown_type(tmp_path: Path, config: Any) -> None:
    with pytest.raises(InputError, match=r"names the model type .* \(remote code is never run\)"):
        load(f"hf:{config_file(tmp_path, config)}")


@pytest.mark.models
def test_a_model_larger_than_the_machine_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "physical_memory", lambda: 1000)
    with pytest.raises(InputError, match=r"GB for its weights alone, and this machine has .* lower num_hidden_layers"):
        load(f"hf:{config_file(tmp_path, GPT2)}")


@pytest.mark.parametrize(("name", "extra"), [("timm:a", "timm"), ("torchvision:a", "vision"), ("hf:a", "hf")])
def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(InputError, match=rf"is not installed. Install it: pip install 'intertwine\[{extra}\]'"):
        load(name)
