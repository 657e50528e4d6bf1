"""The reference: every public name of intertwine by the room it lives in, and the classes that the functions return.

What stands there comes from the docstrings, through Sphinx's autodoc. Their examples run with the tests.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import intertwine

#: Rooms that users reach by name, `intertwine.zoo.train`; the names of all others are names of `intertwine` itself.
OPEN_ROOMS = ("zoo", "study", "report", "testing")
#: What fewer users need is imported from the module that defines it. Module → its public names.
FURTHER = {
    "align.correlations": ("matched_correlations",),
    "align.widths": ("align_widths",),
    "canonical.duality": ("self_transformations",),
    "canonical.naturality": ("naturality",),
    "connect.averaging": ("average",),
    "connect.direct_stitch": ("direct_stitch",),
    "connect.repair": ("repair",),
    "connect.scale_correction": ("correct_scales",),
    "connect.statistics": ("reset_statistics",),
    "connect.task_vectors": ("task_vector", "transport", "add"),
    "errors": ("CaptureError", "MismatchError", "RuleError"),
    "fold.activations": ("fold_activations",),
    "fold.curves": ("complexity_curves",),
    "fold.fold": ("fold_groups", "shrink"),
    "fold.heatmaps": ("distance_maps",),
    "fold.kmeans": ("fold_kmeans",),
    "fold.pruning": ("prune",),
    "fold.swaps": ("swap_barrier",),
    "fold.variances": ("repair_variances",),
    "graph.tape": ("Tape",),
    "inspect.broden": ("read_broden",),
    "inspect.rotation_penalty": ("rotation_penalty",),
    "inspect.rotation_scan": ("rotation_scan",),
    "inspect.top_images": ("top_images",),
    "inspect.unit_pictures": ("draw_units",),
    "measure.measure": ("Measure", "register", "degenerate"),
    "models.folded": ("save_folded", "load_folded"),
    "stitch.cross_validation": ("cross_validate",),
    "stitch.interpolation": ("interpolate", "along"),
    "symmetry.homogeneity": ("homogeneity_defect",),
    "symmetry.intertwiner": ("intertwines", "phi"),
    "symmetry.members": ("random_member", "nearest_member"),
}


def rooms() -> dict[str, list[str]]:
    """Room → its names that need no longer path than `intertwine.name`, or `intertwine.zoo.name` in an open room.

    >>> rooms()["report"], "align_many" in rooms()["align"]
    (['write'], True)
    """
    found: dict[str, list[str]] = {}
    for name, home in intertwine._HOMES.items():
        found.setdefault(_room(home), []).append(name)
    return found | {room: _names_of(room) for room in OPEN_ROOMS}


def further(room: str) -> list[tuple[str, str]]:
    """The names of a room that are imported from their own module, each with that module.

    >>> further("models")
    [('intertwine.models.folded', 'save_folded'), ('intertwine.models.folded', 'load_folded')]
    """
    return [(f"intertwine.{home}", name) for home, names in FURTHER.items() if _room(home) == room for name in names]


def reference(room: str) -> str:
    """What Sphinx is asked to write for a room: its names, what they return, then the names with a longer path."""
    place = f"intertwine.{room}" if room in OPEN_ROOMS else "intertwine"
    near, far = [(place, name) for name in rooms().get(room, [])], further(room)
    listed = [getattr(import_module(module), name) for module, name in [*near, *far]]
    parts = [_described(near, room, listed)] if near else []
    parts += ["## Imported from their own module"] if near and far else []
    for module, name in far:
        parts += [f"`from {module} import {name}`", _described([(module, name)], room, listed)]
    return "\n\n".join(parts)


def _room(home: str) -> str:
    return home.partition(".")[0]


def _described(named: Sequence[tuple[str, str]], room: str, listed: list[Any]) -> str:
    """The directives for these names, and behind them for the classes that they return."""
    values = [(module, name, getattr(import_module(module), name)) for module, name in named]
    lines = [_directive(*value) for value in values]
    returned = dict.fromkeys(cls for *_, value in values for cls in _returned(value, room) if cls not in listed)
    listed.extend(returned)
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
    """Classes in what a function returns, where they are at home in the same room."""
    if not inspect.isfunction(value):
        return
    known = {"Figure": object} | vars(sys.modules[value.__module__])  # matplotlib's is known to type checkers only
    for cls in _classes(typing.get_type_hints(value, known).get("return")):
        if cls.__module__.startswith(f"intertwine.{room}."):
            yield cls


def _classes(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)
