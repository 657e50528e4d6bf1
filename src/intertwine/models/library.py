"""The optional packages that models come from: imported when asked for, with a way out when one is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

from intertwine.errors import InputError, did_you_mean
from intertwine.models.torchvision_ops import declare_missing_ops

#: Package → the extra of intertwine that installs it.
EXTRAS = {"timm": "timm", "torchvision": "vision", "transformers": "hf"}


def import_library(package: str) -> ModuleType:
    """Import timm, torchvision or transformers."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"A model of {package} was asked for, but {package} is not installed. "
            f"Install it: pip install 'intertwine[{EXTRAS[package]}]'."
        )
    declare_missing_ops()
    return importlib.import_module(package)


def unknown(kind: str, name: str, known: Iterable[str], hint: str) -> InputError:
    """The error for a name that a library does not know, with the names nearest to it."""
    meant = did_you_mean(name, known)
    return InputError(f"{kind} {name!r} was asked for, but there is none of that name. {meant}{hint}")
