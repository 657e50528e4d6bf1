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
#: Rooms of the laboratory, which lie one level deeper.
LAB = ("zoo", "study", "report", "papers", "measure_benchmark")
#: What fewer users need is imported from the module that defines it. Module → its public names.
FURTHER = {
    "align.correlations": ("matched_correlations",),
    "align.widths": ("align_widths",),
    "connect.arithmetic": (
        "average",
        "task_vector",
        "transport",
        "add",
    ),
    "connect.direct_stitch": ("direct_stitch",),
    "connect.repair": (
        "repair",
        "correct_scales",
    ),
    "data.batchnorm": ("reset_statistics",),
    "errors": (
        "CaptureError",
        "MismatchError",
        "RuleError",
    ),
    "fold.clustering": (
        "fold_activations",
        "fold_kmeans",
    ),
    "fold.complexity": (
        "complexity_curves",
        "distance_maps",
    ),
    "fold.fold": ("fold_groups",),
    "fold.prune": ("prune",),
    "fold.result": (
        "shrink",
        "save_folded",
        "load_folded",
    ),
    "fold.swaps": ("swap_barrier",),
    "fold.variances": ("repair_variances",),
    "graph.builder": ("GraphBuilder",),
    "inspect.concepts": ("read_broden",),
    "inspect.rotation_penalty": ("rotation_penalty",),
    "inspect.rotation_scan": ("rotation_scan",),
    "inspect.top_images": (
        "top_images",
        "draw_units",
    ),
    "lab.measure_benchmark.benchmark": (
        "benchmark_measure",
        "MeasureBenchmark",
    ),
    "lab.papers.feature_duality": ("feature_classes", "self_transformations"),
    "lab.papers.naturality": ("naturality",),
    "measure.measure": (
        "Measure",
        "register",
        "degenerate",
    ),
    "stitch.interpolation": (
        "interpolate",
        "along",
    ),
    "stitch.stitch": ("cross_validate",),
    "symmetry.intertwiner": (
        "homogeneity_defect",
        "intertwines",
        "phi",
        "random_member",
        "nearest_member",
    ),
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

    >>> further("graph")
    [('intertwine.graph.builder', 'GraphBuilder')]
    """
    return [(f"intertwine.{home}", name) for home, names in FURTHER.items() if _room(home) == room for name in names]


def reference(room: str) -> str:
    """What Sphinx is asked to write for a room: its names, what they return, then the names with a longer path."""
    place = _package(room) if room in OPEN_ROOMS else "intertwine"
    near, far = [(place, name) for name in rooms().get(room, [])], further(room)
    listed = [getattr(import_module(module), name) for module, name in [*near, *far]]
    parts = [_described(near, room, listed)] if near else []
    parts += ["## Imported from their own module"] if near and far else []
    for module, name in far:
        parts += [f"`from {module} import {name}`", _described([(module, name)], room, listed)]
    return "\n\n".join(parts)


def _room(home: str) -> str:
    return home.removeprefix("lab.").partition(".")[0]


def _package(room: str) -> str:
    return f"intertwine.lab.{room}" if room in LAB else f"intertwine.{room}"


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
    module = import_module(_package(room))
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
        if cls.__module__.startswith(f"{_package(room)}."):
            yield cls


def _classes(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)
