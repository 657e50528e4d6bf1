"""The reference: every public name of intertwine by the room it lives in, and the classes that the functions return.

What stands there comes from the docstrings, through Sphinx's autodoc. Their examples run with the tests.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import intertwine

#: Rooms that users reach by name, `intertwine.zoo.train`; the names of all others are names of `intertwine` itself.
OPEN_ROOMS = ("zoo", "study", "report", "testing")


def rooms() -> dict[str, list[str]]:
    """Room → its public names.

    >>> rooms()["report"], "align_many" in rooms()["align"]
    (['write'], True)
    """
    found: dict[str, list[str]] = {}
    for name, home in intertwine._HOMES.items():
        found.setdefault(home.partition(".")[0], []).append(name)
    return found | {room: _names_of(room) for room in OPEN_ROOMS}


def reference(room: str) -> str:
    """What Sphinx is asked to write for a room: its names, then what they return."""
    place = f"intertwine.{room}" if room in OPEN_ROOMS else "intertwine"
    module = import_module(place)
    named = [(place, name, getattr(module, name)) for name in rooms()[room]]
    lines = [_directive(place, name, value) for place, name, value in named]
    returned = [*dict.fromkeys(cls for *_, value in named for cls in _returned(value, room))]
    lines += [_directive(cls.__module__, cls.__qualname__, cls) for cls in returned]
    return "```{eval-rst}\n" + "\n".join(lines) + "```"


def _names_of(room: str) -> list[str]:
    """A room's own names: those it offers lazily, or those it has imported for its users."""
    module = import_module(f"intertwine.{room}")
    if "__dir__" in vars(module):
        return dir(module)
    return [name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)]


def _directive(module: str, name: str, value: Any) -> str:
    if inspect.isclass(value):
        return f".. autoclass:: {module}::{name}\n   :members:\n"
    kind = "autofunction" if callable(value) else "autodata"
    return f".. {kind}:: {module}::{name}\n"


def _returned(value: Any, room: str) -> Iterator[type]:
    """Classes in what a function returns, where they are at home in the same room and not public names themselves."""
    if not inspect.isfunction(value):
        return
    public = {getattr(intertwine, name) for name in intertwine._HOMES}
    for cls in _classes(typing.get_type_hints(value, vars(sys.modules[value.__module__])).get("return")):
        at_home = cls.__module__.startswith(f"intertwine.{room}.")
        if at_home and cls not in public and cls.__name__ not in rooms()[room]:
            yield cls


def _classes(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)
