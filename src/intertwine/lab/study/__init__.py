"""Studies: a plan of zoos, pairs, layers and verbs, run as tasks anywhere, its results in one table.

    study.run("plan.toml", executor="processes").frame()

The names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from intertwine.lazy import lazy_names

if TYPE_CHECKING:
    from intertwine.lab.study.plan import Part as Part
    from intertwine.lab.study.plan import Plan as Plan
    from intertwine.lab.study.plan import ZooPlan as ZooPlan
    from intertwine.lab.study.plan import read_plan as read_plan
    from intertwine.lab.study.running import Study as Study
    from intertwine.lab.study.running import run as run
    from intertwine.lab.study.store import Store as Store

_HOMES = dict.fromkeys(("Part", "Plan", "ZooPlan", "read_plan"), "plan") | {
    "Study": "running", "run": "running", "Store": "store",
}  # fmt: skip
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
