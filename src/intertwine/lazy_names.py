"""Public names that are loaded on first use, so that importing a room costs nothing until one of them is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], rooms: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    Args:
        package: its `__name__`.
        homes: public name → the module inside the package that defines it.
        rooms: packages inside it that are public as they are.

    Example:
        >>> load, names = lazy_names("intertwine.report", {"write": "writing"}, rooms=["study"])
        >>> names(), load("write").__module__
        (['study', 'write'], 'intertwine.report.writing')
    """

    def load(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        if name in rooms:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: sorted([*homes, *rooms])
