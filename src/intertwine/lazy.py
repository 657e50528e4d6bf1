"""Lazy and optional imports: public names loaded on first use, and polars data frames if polars is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from intertwine.errors import InputError


def lazy_names(
    package: str, homes: Mapping[str, str], rooms: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    Args:
        package: its `__name__`.
        homes: public name → the module inside the package that defines it.
        rooms: public name → the package inside it that it stands for.

    Example:
        >>> load, names = lazy_names("intertwine.lab", {"write": "report.page"}, rooms={"studies": "study"})
        >>> names(), load("write").__module__
        (['studies', 'write'], 'intertwine.lab.report.page')
    """

    def load(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        if name in rooms:
            return import_module(f"{package}.{rooms[name]}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: sorted([*homes, *rooms])


def data_frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as a polars data frame.

    >>> data_frame([{"layer": "2", "penalty": 0.1}]).shape
    (1, 2)
    """
    try:
        polars = import_module("polars")
    except ImportError as error:
        raise InputError(
            "Data frames need polars, but polars is not installed: pip install 'intertwine[frames]'. Or use "
            ".to_rows(), which any data frame library reads."
        ) from error
    return polars.DataFrame(rows, infer_schema_length=None)
