"""Where models come from: a name in, the model and an example of its inputs out; one function per source."""

from __future__ import annotations

import importlib
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
from intertwine.checkpoints.libraries import from_transformers, import_library
from intertwine.errors import InputError, did_you_mean


def from_file(name: str) -> tuple[nn.Module, Example | None]:
    """Run `path/to/file.py:factory` and, where the file has one, its function `example_inputs()`.

    The factory may be a function without arguments, a module class, or a module.
    """
    path, _, factory = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    file = Path(path)
    if not file.is_file():
        raise InputError(
            f"There is no file {path} for the model {name}. Give the path of a Python file, a colon, and the name of a "
            "function in it that returns the model."
        )
    with _running(file):
        module = _execute(file)
        made = _member(module, factory, path)
        model = made if isinstance(made, nn.Module) else made()
        example = as_example(module.example_inputs()) if hasattr(module, "example_inputs") else None
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returns {type(model).__name__}, not a torch.nn.Module. Return the model itself.")
    return model, example


@contextmanager
def _running(file: Path) -> Iterator[None]:
    """While the user's code runs, its neighbours can be imported, and an error in it is reported with its line.

    Its output goes to standard error: standard output is for results, with --json for JSON alone.
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
            f"{file} stopped{where} with {type(error).__name__}: {error}. Fix the file, or check that its "
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
        raise InputError(f"{path} is given without the name of a function. Write {path}:NAME. {offers}")
    made = getattr(module, factory, None)
    if not callable(made):
        raise InputError(f"Unknown function {factory!r} in {path}. {offers}")
    return made


def from_timm(name: str) -> tuple[nn.Module, Example | None]:
    """A timm model by its name, and one image of the size it was designed for."""
    timm = import_library("timm")
    if not timm.is_model(name):
        meant = did_you_mean(name, timm.list_models())
        raise InputError(f"Unknown timm model {name!r}. {meant}List them with timm.list_models().")
    with warnings.catch_warnings(action="ignore"):
        model = timm.create_model(name, pretrained=False)
    return model, ((torch.randn(1, *model.default_cfg["input_size"]),), {})


def from_torchvision(name: str) -> tuple[nn.Module, Example | None]:
    """A torchvision model by its name, and one image; a clip of 16 frames for the models of videos."""
    models = import_library("torchvision").models
    if name not in models.list_models():
        meant = did_you_mean(name, models.list_models())
        raise InputError(f"Unknown torchvision model {name!r}. {meant}List them with torchvision.models.list_models().")
    with warnings.catch_warnings(action="ignore"):
        model = models.get_model(name, weights=None)
    if name in models.list_models(module=models.video):
        side = 224 if name.startswith(("mvit", "swin")) else 112
        return model, ((torch.randn(1, 3, 16, side, side),), {})
    side = 299 if name == "inception_v3" else 224
    return model, ((torch.randn(1, 3, side, side),), {})


Opener = Callable[[str], Any]
#: Prefix of a model's name → the function that builds it. Text names a function that is imported on first use.
SOURCES: dict[str, Opener | str] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "hf": from_transformers,
    "zoo": "intertwine.lab.zoo.sources:from_zoo",
}
#: Functions for names without such a prefix; each gives None for a name that is not its own.
FOLDER_SOURCES: list[Opener | str] = ["intertwine.lab.zoo.sources:from_zoo_folder"]


def build(name: str) -> tuple[nn.Module, Example | None]:
    """The model of a name, and an example of its inputs where its source has one."""
    prefix, colon, rest = name.partition(":")
    if colon and prefix in SOURCES:
        return _opener(SOURCES[prefix])(rest)
    if name.endswith(".py") or name.rpartition(":")[0].endswith(".py"):
        return from_file(name)
    for source in FOLDER_SOURCES:
        if (found := _opener(source)(name)) is not None:
            return found
    raise InputError(
        f"Unknown model {name!r}. Name it in one of these ways: path/to/file.py:factory, "
        f"{', '.join(f'{source}:NAME' for source in SOURCES)}, ZOO_FOLDER:SEED."
    )


def _opener(source: Opener | str) -> Opener:
    if not isinstance(source, str):
        return source
    module, _, function = source.partition(":")
    return getattr(importlib.import_module(module), function)
