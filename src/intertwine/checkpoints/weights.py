"""Checkpoints: read as data, never as code, and loaded only into the architecture they belong to."""

from __future__ import annotations

import hashlib
import pickle
import re
import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from intertwine.errors import InputError, MismatchError
from intertwine.files import write_tensors
from intertwine.graph.model import tied_names

#: Keys under which training scripts keep the weights beside other things, and prefixes that wrappers put before names.
NESTS = ("state_dict", "model_state_dict", "model", "module", "params", "weights")
WRAPPERS = ("module.", "_orig_mod.")
#: A zip file may unpack to so many times its size. `torch.save` does not pack at all, and deflate gains little on
#: weights; a file made of zeros to fill the memory of whoever opens it gains a thousandfold.
MOST_UNPACKED = 20


def digest(model: nn.Module) -> str:
    """A name for the numbers that a network holds: runs that are taken up again ask whether they are still the same.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> digest(a) == digest(a), digest(a) == digest(b)
    (True, False)
    """
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)};".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a `torch.save` file that holds nothing but data.

    Raises:
        InputError: the file is missing, cannot be read, holds no tensors, or would run code when it is read.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(
            f"The weights {path} were asked for, but there is no such file. Give the path of one checkpoint file."
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # of an unusual pickle; it is read or refused all the same
            found = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
    except InputError:
        raise
    except Exception as error:  # a damaged file can make its reader stumble anywhere
        raise _refusal(path, error) from error
    return _tensors(found, path)


def _unpickled(file: Path) -> Any:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as packed:
            unpacked, size = sum(entry.file_size for entry in packed.infolist()), file.stat().st_size
        if unpacked > MOST_UNPACKED * size:
            raise InputError(
                f"{file} was refused: it has {size:,} bytes and would unpack to {unpacked:,}, which no checkpoint "
                "does. Save its tensors again where it comes from, with torch.save or as safetensors."
            )
    elif not _begins_as_pickle(file) and not tarfile.is_tarfile(file):
        raise InputError(
            f"{file} is no checkpoint, or a damaged one: it is neither a safetensors file, whose name ends in "
            ".safetensors, nor what torch.save writes. Give the file that holds the weights."
        )
    return torch.load(file, "cpu", weights_only=True)


def _begins_as_pickle(file: Path) -> bool:
    """Whether it begins as every pickle does since 2003, those of torch.save among them."""
    with file.open("rb") as stream:
        return stream.read(1) == b"\x80"


def _refusal(path: str | Path, error: Exception) -> InputError:
    if not isinstance(error, pickle.UnpicklingError) or "weights_only" not in str(error).lower():
        first = str(error).strip().partition("\n")[0].partition(". ")[0]
        return InputError(
            f"{path} could not be read as a checkpoint ({type(error).__name__}: {first}). "
            "Give a safetensors file, or one written by torch.save."
        )
    names = re.findall(r"GLOBAL ([\w.]+)", str(error))
    needs = f"it needs {names[0]}" if names else "it holds more than tensors"
    return InputError(
        f"{path} was refused: reading it could run code ({needs}), and a checkpoint must be data. If you trust where "
        "it comes from, open it there and save its tensors alone: "
        "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')."
    )


def _tensors(found: Any, path: str | Path) -> dict[str, Tensor]:
    for nest in NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(nest), Mapping):
            found = found[nest]
    state = {str(k): v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, Mapping) else {}
    if not state:
        raise InputError(
            f"{path} holds no tensors by name (it holds a {type(found).__name__}). Save a state dict: "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')."
        )
    for name, tensor in state.items():
        if odd := _oddity(tensor):
            raise InputError(
                f"{path} holds {name!r} as a {odd} tensor, which cannot be copied into a network as it is. Save it "
                "as a plain tensor where the checkpoint comes from."
            )
    return state


def _oddity(tensor: Tensor) -> str | None:
    """What makes a tensor more, or less, than an array of numbers."""
    kinds = {"nested": tensor.is_nested, "quantised": tensor.is_quantized, "meta": tensor.is_meta}
    kinds["sparse"] = tensor.layout != torch.strided
    return next((kind for kind, holds in kinds.items() if holds), None)


def write_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Write the weights as safetensors; of tied names the first stands for all."""
    tied = tied_names(model)
    write_tensors(Path(path), {name: t for name, t in model.state_dict().items() if tied.get(name, name) == name})


def fill(model: nn.Module, state: Mapping[str, Tensor], path: str) -> None:
    """Load a state dict into a model that was just built; every name and shape must fit.

    One of several tied names is enough, and step counters of BatchNorm may be missing.
    """
    own = model.state_dict()
    wanted = {name: tuple(t.shape) for name, t in own.items()}
    state = _unwrapped(state, wanted)
    tied = tied_names(model)
    known = {tied.get(name, name) for name in state}
    missing = [n for n in wanted if tied.get(n, n) not in known and not n.endswith("num_batches_tracked")]
    foreign = [name for name in state if name not in wanted]
    misshapen = [
        f"{n} (file {tuple(t.shape)}, model {wanted[n]})"
        for n, t in state.items()
        if n in wanted and tuple(t.shape) != wanted[n]
    ]
    unlike = [  # copying them would drop imaginary parts, or take the codes of a quantised file for its weights
        f"{n} (file {_kind(t)}, model {_kind(own[n])})"
        for n, t in state.items()
        if n in wanted and _kind(t) != _kind(own[n])
    ]
    kinds = {
        "missing from the file": missing,
        "not in the model": foreign,
        "of another shape": misshapen,
        "of another kind": unlike,
    }
    faults = [
        f"{len(names)} {kind}: {', '.join(names[:3])}{' …' * (len(names) > 3)}"
        for kind, names in kinds.items()
        if names
    ]
    if faults:
        raise MismatchError(
            f"The weights in {path} do not fit {type(model).__name__}: {'; '.join(faults)}. "
            "Give the checkpoint of this architecture, or name the architecture of this checkpoint."
        )
    model.load_state_dict(state, strict=False)


def _kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "integer"


def _unwrapped(state: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The state without the prefix that a parallel or compiled wrapper left on every name."""
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in wanted):
            state = {name.removeprefix(prefix): t for name, t in state.items()}
    return state
