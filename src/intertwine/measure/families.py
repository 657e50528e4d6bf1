"""Makes all measures known: imports every module of this folder, and those that hold a measure register it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

for _module in sorted(module.name for module in iter_modules([str(Path(__file__).parent)]) if not module.ispkg):
    import_module(f"{__package__}.{_module}")
