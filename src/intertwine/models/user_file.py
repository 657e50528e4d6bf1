"""Models made by a function in the user's own Python file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from intertwine.errors import InputError
from intertwine.models.inputs import Example, as_example


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
