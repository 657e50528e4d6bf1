"""Folded networks on disk: weights, the account of the folding, and how to have the network back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from intertwine.checkpoint import fill, read_checkpoint, write_checkpoint
from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.fold.fold import shrink
from intertwine.fold.folded import Fold
from intertwine.graph.copies import copied
from intertwine.models.load import Loaded, load

#: What a folder of a folded network holds.
WEIGHTS, ACCOUNT = "folded.safetensors", "fold.json"
HOW = (
    "intertwine.models.folded.load_folded(FOLDER) makes the network that was folded, cuts it to `widths` "
    "(intertwine.fold.fold.shrink) and fills it with folded.safetensors"
)


def save_folded(
    folder: str | Path, folded: Fold, source: str, inputs: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write the weights of a folded network and the account; gives the files.

    Args:
        source, inputs: the name and the inputs with which `intertwine.models.load` makes the network that was folded.
        about: more for the account.
    """
    place = Path(folder)
    write_checkpoint(folded.model, place / WEIGHTS)
    made = {"model": _whole(source), "inputs": list(inputs), "how": HOW}
    write_json(place / ACCOUNT, {"made_of": made, **folded.to_dict(), **(about or {})})
    return place / WEIGHTS, place / ACCOUNT


def load_folded(folder: str | Path, model: nn.Module | None = None, *example_args: Any) -> Loaded:
    """A folded network from its folder.

    Args:
        model, *example_args: made as the network that was folded, and inputs it can be called with. Without these it
            is made by the name that it had on the command line.

    Raises:
        InputError: no such folder, or the network cannot be made again. MismatchError: it is another architecture.

    >>> import tempfile
    >>> import torch, intertwine
    >>> from intertwine.models.folded import load_folded, save_folded
    >>> folded = intertwine.fold(intertwine.zoo.build("mlp"), torch.randn(1, 1, 28, 28), beta=0.6)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_folded(folder, folded, "zoo:mlp")
    ...     again = load_folded(folder)
    >>> x = torch.randn(2, 1, 28, 28)
    >>> torch.equal(again.model(x), folded.model(x)), again.parameters == folded.parameters.after
    (True, True)
    """
    place = Path(folder)
    if not (place / ACCOUNT).is_file():
        raise InputError(
            f"A folded network was asked for, but {place} has no {ACCOUNT}. Give a folder that `intertwine fold --out` "
            "wrote."
        )
    source, inputs, widths = _account(place / ACCOUNT)
    if model is None:
        made = load(source, None, inputs)
    else:
        made = Loaded(str(place), copied(model).eval(), example_args, {})
    small = shrink(made.model, *made.args, widths=widths, **made.kwargs)
    fill(small, read_checkpoint(place / WEIGHTS), str(place / WEIGHTS))
    return Loaded(str(place), small.eval(), made.args, made.kwargs)


def _account(file: Path) -> tuple[str, list[str], dict[str, int]]:
    """Of which network, with which inputs, and to which widths."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        made, widths = told["made_of"], {name: int(change["after"]) for name, change in told["widths"].items()}
        return str(made["model"]), [str(text) for text in made["inputs"]], widths
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} is damaged or no account of a folding ({type(error).__name__}: {error}). Copy the folder again, "
            "or fold the network once more."
        ) from error


def _whole(source: str) -> str:
    """A name that holds in every folder: paths in it from the root.

    >>> _whole("zoo:mlp")
    'zoo:mlp'
    """
    path, colon, rest = source.rpartition(":")
    return f"{Path(path).resolve()}{colon}{rest}" if path and Path(path).exists() else source
