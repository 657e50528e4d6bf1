"""Checkpoint files: read as data, never as code, and loaded only into a model that they fit."""

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

#: Keys under which training scripts store the weights, and prefixes that wrappers put before names.
NESTS = ("state_dict", "model_state_dict", "model", "module", "params", "weights")
WRAPPERS = ("module.", "_orig_mod.")
#: The largest ratio of unpacked to packed size. `torch.save` does not compress, and deflate gains little on weights; a
#: zip bomb gains a thousandfold.
MOST_UNPACKED = 20


def digest(model: nn.Module) -> str:
    """A hash of the weights, by which a resumed run checks that they are still the same.

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
        raise InputError(f"There is no file {path}. Give the path of one checkpoint file.")
    try:
        with warnings.catch_warnings(action="ignore"):  # about an unusual pickle, which is read or refused anyway
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
                f"{file} is refused: it has {size:,} bytes and would unpack to {unpacked:,}, which no checkpoint "
                "does. Save its tensors again where it comes from, with torch.save or as safetensors."
            )
        return torch.load(file, "cpu", weights_only=True)
    with file.open("rb") as stream:
        pickled = stream.read(1) == b"\x80"  # the first byte of every pickle since 2003
    if not pickled and not tarfile.is_tarfile(file):
        raise InputError(
            f"{file} is not a checkpoint, or a damaged one: it is neither a safetensors file, whose name ends in "
            ".safetensors, nor a file of torch.save. Give the file that holds the weights."
        )
    return torch.load(file, "cpu", weights_only=True)


def _refusal(path: str | Path, error: Exception) -> InputError:
    if not isinstance(error, pickle.UnpicklingError) or "weights_only" not in str(error).lower():
        first = str(error).strip().partition("\n")[0].partition(". ")[0]
        return InputError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {first}). "
            "Give a safetensors file, or one written by torch.save."
        )
    names = re.findall(r"GLOBAL ([\w.]+)", str(error))
    needs = f"it needs {names[0]}" if names else "it holds more than tensors"
    return InputError(
        f"{path} is refused: reading it could run code ({needs}), and a checkpoint must be data. If you trust its "
        "source, open it there and save its tensors alone: "
        "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')."
    )


def _tensors(found: Any, path: str | Path) -> dict[str, Tensor]:
    for nest in NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(nest), Mapping):
            found = found[nest]
    state = {str(k): v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, Mapping) else {}
    if not state:
        raise InputError(
            f"{path} holds no named tensors (it holds a {type(found).__name__}). Save a state dict: "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')."
        )
    for name, tensor in state.items():
        kinds = {"nested": tensor.is_nested, "quantised": tensor.is_quantized, "meta": tensor.is_meta}
        kinds["sparse"] = tensor.layout != torch.strided
        if any(kinds.values()):
            kind = next(kind for kind, holds in kinds.items() if holds)
            raise InputError(
                f"{path} holds {name!r} as a {kind} tensor, which cannot be copied into a network. Save it as a plain "
                "tensor where the checkpoint comes from."
            )
    return state


def write_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Write the weights as safetensors; tied tensors are written once, under their first name."""
    tied = tied_names(model)
    write_tensors(Path(path), {name: t for name, t in model.state_dict().items() if tied.get(name, name) == name})


def fill(model: nn.Module, state: Mapping[str, Tensor], path: str) -> None:
    """Load a state dict into a model that was just built; every name and shape must fit.

    One of several tied names is enough; the step counters of BatchNorm may be missing.
    """
    own = model.state_dict()
    wanted = {name: tuple(t.shape) for name, t in own.items()}
    for prefix in WRAPPERS:  # of parallel and compiled modules
        if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in wanted):
            state = {name.removeprefix(prefix): t for name, t in state.items()}
    tied = tied_names(model)
    known = {tied.get(name, name) for name in state}
    missing = [n for n in wanted if tied.get(n, n) not in known and not n.endswith("num_batches_tracked")]
    both = [(name, t) for name, t in state.items() if name in wanted]
    kinds = {
        "missing from the file": missing,
        "not in the model": [name for name in state if name not in wanted],
        "of another shape": [
            f"{n} (file {tuple(t.shape)}, model {wanted[n]})" for n, t in both if tuple(t.shape) != wanted[n]
        ],
        # copying these would drop imaginary parts, or take the codes of a quantised file for its weights
        "of another kind": [
            f"{n} (file {_kind(t)}, model {_kind(own[n])})" for n, t in both if _kind(t) != _kind(own[n])
        ],
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
