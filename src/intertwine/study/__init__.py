"""Studies: a plan of zoos, pairs, layers and verbs, run as tasks anywhere, its results in one table.

    study.run("plan.toml", executor="processes").frame()

The names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intertwine.study.plan import Part as Part
    from intertwine.study.plan import Plan as Plan
    from intertwine.study.plan import ZooPlan as ZooPlan
    from intertwine.study.plan import read_plan as read_plan
    from intertwine.study.running import Study as Study
    from intertwine.study.running import run as run
    from intertwine.study.store import Store as Store

_HOMES = {
    "Part": "plan",
    "Plan": "plan",
    "ZooPlan": "plan",
    "read_plan": "plan",
    "Study": "running",
    "run": "running",
    "Store": "store",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"intertwine.study.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'intertwine.study' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOMES)
