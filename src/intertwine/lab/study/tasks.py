"""Tasks: a plan expanded into units of work with machine-independent keys, and the function that runs one of them."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from intertwine.errors import InputError, did_you_mean
from intertwine.lab.study.plan import Part, Plan
from intertwine.lab.study.records import FinishedTask
from intertwine.lab.study.verb import Verb, VerbContext, defaults
from intertwine.lab.study.verbs import VERBS
from intertwine.lab.study.zoos import KnownZoo, NetworkCache
from intertwine.version import VERSION

# ----------------------------------------------------------------------------------------------------
# Tasks: a plan taken apart into pieces of work, each with a key that is the same on any machine.


#: Tasks of one part on one zoo: all are held in memory, and a slip in a grid soon asks for more than anybody waits for.
MAX_TASKS = 1_000_000


@dataclass(frozen=True)
class StudyTask:
    """One verb on one network or one pair, perhaps at one layer, with one set of options.

    `a`, `b`: seeds. `identity`: of these networks. Options hold only what the plan says; the verb has the rest.
    """

    verb: str
    zoo: str
    identity: str
    a: int
    b: int | None = None
    layer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    repeat: int = 0

    @property
    def key(self) -> str:
        """A name for what is to be done: of the content alone, without paths and names of zoos."""
        content = [self.verb, self.identity, self.a, self.b, self.layer, dict(self.options), self.repeat]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """As results name it."""
        networks = {"a": f"{self.zoo}:{self.a}", "b": None if self.b is None else f"{self.zoo}:{self.b}"}
        about = {"verb": self.verb, "zoo": self.zoo, "layer": self.layer, "repeat": self.repeat}
        return about | networks | {"options": dict(self.options)}


def expand(plan: Plan, zoos: Mapping[str, KnownZoo]) -> list[StudyTask]:
    """All tasks of a plan, checked: verbs, options, layers and seeds exist. Doubles are left out.

    Raises:
        InputError: something there is not, with the line of the part.
    """
    found: dict[str, StudyTask] = {}
    for number, part in enumerate(plan.parts):
        checked = _Checked(plan, number, part)
        for name in part.zoos:
            for task in checked.tasks(zoos[name]):
                found.setdefault(task.key, task)
    return list(found.values())


class _Checked:
    """A part whose verb and options are known."""

    def __init__(self, plan: Plan, number: int, part: Part) -> None:
        line = plan.lines.get(number)
        self.where = f"Part {number + 1}" + (f" (line {line})" if line else "")
        self.part = part
        if part.verb not in VERBS:
            self.refuse(f"there is no verb {part.verb!r}. {did_you_mean(part.verb, VERBS)}Verbs: {', '.join(VERBS)}")
        self.verb: Verb = VERBS[part.verb]
        options = [name for name in self.verb.options if name != "layers"]  # which have a place of their own
        for option in (*part.options, *part.grid):
            if option not in options:
                said = did_you_mean(option, options)
                known = ", ".join(options) or "none"
                self.refuse(f"{part.verb} has no option {option!r}. {said}Its options: {known}")
        given = [*part.options.items(), *((name, value) for name, values in part.grid.items() for value in values)]
        for option, value in given:
            if wrong := self.verb.options[option].fault(value):
                self.refuse(f"{option} = {value!r} {wrong}")
        if self.verb.layered and not part.layers:
            self.refuse(f'{part.verb} needs layers, such as layers = ["2"]')
        if part.layers and not (self.verb.layered or self.verb.takes_layers):
            self.refuse(f"{part.verb} looks at whole networks; leave layers out")

    def refuse(self, why: str) -> NoReturn:
        raise InputError(f"{self.where}: {why}.")

    def tasks(self, zoo: KnownZoo) -> Iterator[StudyTask]:
        part = self.part
        for layer in part.layers:
            if layer not in zoo.layers:
                near = did_you_mean(layer, zoo.layers)
                some = ", ".join(zoo.layers[:12]) + (" …" if len(zoo.layers) > 12 else "")
                self.refuse(f"networks of {zoo.name!r} have no layer {layer!r}. {near}They have {some}")
        chosen = part.paired(zoo.seeds) if self.verb.networks == 2 else [(a, None) for a in part.chosen(zoo.seeds)]
        for seed in {seed for pair in chosen for seed in pair if seed is not None}:
            if seed not in zoo.seeds:
                self.refuse(f"zoo {zoo.name!r} has no network of seed {seed}; it has {', '.join(map(str, zoo.seeds))}")
        if not chosen:
            self.refuse(f"zoo {zoo.name!r} has no pair of networks: it has {len(zoo.seeds)}")
        layers: tuple[str | None, ...] = part.layers if self.verb.layered else (None,)
        count = len(chosen) * len(layers) * prod(map(len, part.grid.values())) * part.repeats
        if count > MAX_TASKS:
            self.refuse(
                f"it asks for {count:,} tasks, and at most {MAX_TASKS:,} are allowed. Give fewer values or repeats"
            )
        ends = {(a, b): zoo.identity(*(seed for seed in (a, b) if seed is not None)) for a, b in chosen}
        extra = {"layers": list(part.layers)} if part.layers and not self.verb.layered else {}
        for (a, b), layer, values in product(chosen, layers, product(*part.grid.values())):
            options = {**part.options, **extra, **dict(zip(part.grid, values, strict=True))}
            for repeat in range(part.repeats):
                yield StudyTask(part.verb, zoo.name, ends[a, b], a, b, layer, options, repeat)


# ----------------------------------------------------------------------------------------------------
# Working: one task done, wherever it runs, with what it cost and what made it.


def run_task(task: StudyTask, shared: Mapping[str, Any]) -> FinishedTask:
    """Do a task.

    Args:
        shared: "folders" of the zoos, "data" of them where it need not be read, "made" of this study, "device".
    """
    bench = NetworkCache(shared["folders"], shared.get("data"), shared.get("device", "cpu"))
    verb = VERBS[task.verb]
    a, b = (None if seed is None else bench.network(task.zoo, seed) for seed in (task.a, task.b))
    assert a is not None  # every task has a first network
    options = {**defaults(verb.options), **task.options}
    start = time.perf_counter()
    with torch.random.fork_rng():  # tasks may run in the user's own process, whose random numbers are not ours
        torch.manual_seed(task.repeat)
        rows = tuple(verb.run(VerbContext(bench, task.zoo, a, b, task.layer, options, task.repeat)))
    seconds = time.perf_counter() - start
    return FinishedTask(task.key, task.to_dict(), rows, seconds, peak_mib(), provenance(shared["made"], task))


def provenance(common: Mapping[str, str | None], task: StudyTask) -> dict[str, str | None]:
    """Who made a result: versions, and the command that makes it again."""
    again = f"{common.get('command') or 'intertwine study run PLAN'} --only {task.key[:12]}"
    return {**common, "command": again, "made_at": datetime.now(UTC).isoformat(timespec="seconds")}


def versions() -> dict[str, str | None]:
    """Of intertwine, torch and Python, and the commit of intertwine where it runs from a checkout."""
    return {
        "version": VERSION, "torch": torch.__version__, "python": platform.python_version(), "git": _commit(),
    }  # fmt: skip


def _commit() -> str | None:
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):  # no git
        return None
    return told.stdout.strip() or None


def peak_mib() -> float | None:
    """The most memory that this process has held so far, in MiB; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10
