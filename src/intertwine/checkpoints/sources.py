"""One function per source of models: timm, torchvision, transformers, a zoo, or a factory in the user's Python file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from intertwine.checkpoints.inputs import Example, as_example
from intertwine.checkpoints.libraries import from_transformers, import_library, unknown_name_error
from intertwine.errors import InputError

# ----------------------------------------------------------------------------------------------------
# Models made by a function in the user's own Python file.


def from_file(name: str) -> tuple[nn.Module, Example | None]:
    """Run `path/to/file.py:factory` and, where the file has one, its function `example_inputs()`.

    The factory may be a function without arguments, a module class, or a module.
    """
    path, _, factory = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    file = Path(path)
    if not file.is_file():
        raise InputError(
            f"The model {name} was asked for, but there is no file {path}. "
            "Give the path of a Python file, a colon, and the name of a function in it that returns the model."
        )
    with _running(file):
        module = _execute(file)
        made = _member(module, factory, path)
        model = made if isinstance(made, nn.Module) else made()
        example = as_example(module.example_inputs()) if hasattr(module, "example_inputs") else None
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} returned {type(model).__name__}, but a torch.nn.Module is needed. Return the model itself."
        )
    return model, example


@contextmanager
def _running(file: Path) -> Iterator[None]:
    """While the user's code runs, its neighbours can be imported, and what it raises is told with its line.

    What it prints goes to the error stream: standard output is for results, and by --json for JSON alone.
    """
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except InputError:
        raise
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        where = "" if line is None else f" at line {line}"
        raise InputError(
            f"{file} stopped{where} with {type(error).__name__}: {error}. Mend the file, or check that its "
            "factory can be called without arguments."
        ) from error
    finally:
        sys.path.remove(folder)


def _execute(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"intertwine_user_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up by name
    spec.loader.exec_module(module)
    return module


def _member(module: ModuleType, factory: str, path: str) -> Any:
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    offers = f"It offers: {', '.join(own)}." if own else "It defines no function."
    if not factory:
        raise InputError(f"{path} was given without the name of a function. Write {path}:NAME. {offers}")
    made = getattr(module, factory, None)
    if not callable(made):
        raise InputError(f"A function {factory!r} was asked for, but {path} has none of that name. {offers}")
    return made


# ----------------------------------------------------------------------------------------------------
# Where models come from: a name in, the model and an example of its inputs out. One function per library.


def from_timm(name: str) -> tuple[nn.Module, Example | None]:
    """A timm model by its name, and one image of the size it was designed for."""
    timm = import_library("timm")
    if not timm.is_model(name):
        raise unknown_name_error("The timm model", name, timm.list_models(), "List them with timm.list_models().")
    with warnings.catch_warnings(action="ignore"):
        model = timm.create_model(name, pretrained=False)
    return model, ((torch.randn(1, *model.default_cfg["input_size"]),), {})


def from_torchvision(name: str) -> tuple[nn.Module, Example | None]:
    """A torchvision model by its name, and one image; a clip of 16 frames for the models of videos."""
    models = import_library("torchvision").models
    if name not in models.list_models():
        raise unknown_name_error(
            "The torchvision model", name, models.list_models(), "List them with torchvision.models.list_models()."
        )
    with warnings.catch_warnings(action="ignore"):
        model = models.get_model(name, weights=None)
    if name in models.list_models(module=models.video):
        side = 224 if name.startswith(("mvit", "swin")) else 112
        return model, ((torch.randn(1, 3, 16, side, side),), {})
    side = 299 if name == "inception_v3" else 224
    return model, ((torch.randn(1, 3, side, side),), {})


def from_zoo(name: str) -> tuple[nn.Module, Example | None]:
    """A network of intertwine's own zoo by its name, as it stands without options, and one input of its size."""
    from intertwine.lab.zoo.networks.registry import architecture  # here, because a zoo takes its time to load

    entry = architecture(name)
    return entry.factory(), ((entry.example(),), {})


def from_zoo_folder(folder: str, seed: str) -> tuple[nn.Module, Example | None]:
    """A trained network out of a zoo's folder by its seed, and one image of the size it was trained on."""
    from intertwine.lab.zoo.folder import load

    zoo = load(folder)
    if not seed.isdigit():
        raise InputError(
            f"The network {seed!r} of the zoo {folder} was asked for. Give its seed, such as {folder}:{zoo.seeds[0]}."
        )
    return zoo.seed(int(seed)), ((torch.randn(1, *zoo.manifest.plan.data["shape"]),), {})


#: Prefix of a model's name → the function that builds it.
SOURCES: dict[str, Callable[[str], tuple[nn.Module, Example | None]]] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "hf": from_transformers,
    "zoo": from_zoo,
}
