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

from intertwine.errors import InputError, did_you_mean, unknown_name
from intertwine.lab.study.plan import Part, Plan
from intertwine.lab.study.records import FinishedTask
from intertwine.lab.study.verb import VerbContext
from intertwine.lab.study.verbs import VERBS
from intertwine.lab.study.zoos import KnownZoo, NetworkCache
from intertwine.version import VERSION

#: Tasks of one part on one zoo, all of which are held in memory; more are refused as a mistake in a grid.
MAX_TASKS = 1_000_000
LAYERS_SHOWN = 12  # in an error message


@dataclass(frozen=True)
class StudyTask:
    """One verb on one or two networks, at one layer if the verb is layered, with one set of options.

    Attributes:
        identity: the hash of the networks.
        a, b: their seeds.
        options: those in the plan, without defaults.
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
        """The hash of the task's content: no paths, no names of zoos."""
        content = [self.verb, self.identity, self.a, self.b, self.layer, dict(self.options), self.repeat]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The columns of the result table that describe the task."""
        b = None if self.b is None else f"{self.zoo}:{self.b}"
        return {
            "verb": self.verb, "zoo": self.zoo, "layer": self.layer, "repeat": self.repeat, "a": f"{self.zoo}:{self.a}",
            "b": b, "options": dict(self.options),
        }  # fmt: skip


def expand(plan: Plan, zoos: Mapping[str, KnownZoo]) -> list[StudyTask]:
    """All tasks of a plan, each once.

    Raises:
        InputError: an unknown verb, option, layer or seed, or an invalid value; the message names the line of the part.
    """
    tasks: dict[str, StudyTask] = {}
    for number, part in enumerate(plan.parts):
        expander = _PartExpander(plan, number, part)
        for name in part.zoos:
            for task in expander.tasks(zoos[name]):
                tasks.setdefault(task.key, task)
    return list(tasks.values())


class _PartExpander:
    """Checks the verb and the options of a part, then expands it zoo by zoo."""

    def __init__(self, plan: Plan, number: int, part: Part) -> None:
        line = plan.lines.get(number)
        self.where = f"Part {number + 1}" + (f" (line {line})" if line else "")
        self.part = part
        if part.verb not in VERBS:
            self.refuse(unknown_name("verb", part.verb, VERBS))
        self.verb = VERBS[part.verb]
        known = [name for name in self.verb.options if name != "layers"]  # a key of the part, not an option
        for option in (*part.options, *part.grid):
            if option not in known:
                self.refuse(unknown_name(f"{part.verb} option", option, known))
        values = [*part.options.items(), *((name, value) for name, values in part.grid.items() for value in values)]
        for option, value in values:
            if problem := self.verb.options[option].check(option, value):
                self.refuse(problem)
        if self.verb.layered and not part.layers:
            self.refuse(f'{part.verb} needs layers, such as layers = ["2"].')
        if part.layers and not (self.verb.layered or self.verb.takes_layers):
            self.refuse(f"{part.verb} takes no layers. Remove them.")

    def refuse(self, problem: str) -> NoReturn:
        raise InputError(f"{self.where}: {problem}")

    def tasks(self, zoo: KnownZoo) -> Iterator[StudyTask]:
        part, paired = self.part, self.verb.networks == 2
        for layer in part.layers:
            if layer not in zoo.layers:
                shown = ", ".join(zoo.layers[:LAYERS_SHOWN]) + (" …" if len(zoo.layers) > LAYERS_SHOWN else "")
                near = did_you_mean(layer, zoo.layers)
                self.refuse(f"Networks of {zoo.name!r} have no layer {layer!r}. {near}Their layers: {shown}.")
        networks = part.select_pairs(zoo.seeds) if paired else [(a, None) for a in part.select_networks(zoo.seeds)]
        for seed in {seed for pair in networks for seed in pair if seed is not None}:
            if seed not in zoo.seeds:
                seeds = ", ".join(map(str, zoo.seeds))
                self.refuse(f"Zoo {zoo.name!r} has no network with seed {seed}. Its seeds: {seeds}.")
        if not networks:
            self.refuse(f"{part.verb} needs a pair of networks, but zoo {zoo.name!r} has {len(zoo.seeds)}.")
        layers: tuple[str | None, ...] = part.layers if self.verb.layered else (None,)
        count = len(networks) * len(layers) * prod(map(len, part.grid.values())) * part.repeats
        if count > MAX_TASKS:
            self.refuse(
                f"There are {count:,} tasks, but at most {MAX_TASKS:,} are allowed. Use fewer values or repeats."
            )
        fixed = {**part.options, **({"layers": list(part.layers)} if part.layers and not self.verb.layered else {})}
        identities = {(a, b): zoo.identity(*(s for s in (a, b) if s is not None)) for a, b in networks}
        for (a, b), layer, values in product(networks, layers, product(*part.grid.values())):
            options = {**fixed, **dict(zip(part.grid, values, strict=True))}
            for repeat in range(part.repeats):
                yield StudyTask(part.verb, zoo.name, identities[a, b], a, b, layer, options, repeat)


def run_task(task: StudyTask, shared: Mapping[str, Any]) -> FinishedTask:
    """Run one task.

    Args:
        task: which verb on which networks.
        shared: "folders" of the zoos, "data" of those in memory, "made" (the provenance of the study), "device".
    """
    cache = NetworkCache(shared["folders"], shared.get("data"), shared.get("device", "cpu"))
    verb = VERBS[task.verb]
    a = cache.network(task.zoo, task.a)
    b = None if task.b is None else cache.network(task.zoo, task.b)
    options = {name: option.default for name, option in verb.options.items()} | dict(task.options)
    start = time.perf_counter()
    with torch.random.fork_rng():  # the serial executor runs in the user's process
        torch.manual_seed(task.repeat)
        rows = tuple(verb.run(VerbContext(cache, task.zoo, a, b, task.layer, options, task.repeat)))
    seconds = time.perf_counter() - start
    return FinishedTask(task.key, task.to_dict(), rows, seconds, peak_mib(), provenance(shared["made"], task))


def provenance(study: Mapping[str, str | None], task: StudyTask) -> dict[str, str | None]:
    """The provenance of one result: that of the study, with the command that repeats the task."""
    command = f"{study.get('command') or 'intertwine study run PLAN'} --only {task.key[:12]}"
    return {**study, "command": command, "made_at": datetime.now(UTC).isoformat(timespec="seconds")}


def versions() -> dict[str, str | None]:
    """The versions of intertwine, torch and Python, and the git commit of intertwine in a checkout."""
    return {
        "version": VERSION, "torch": torch.__version__, "python": platform.python_version(), "git": _commit(),
    }  # fmt: skip


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):  # git is missing or hangs
        return None
    return done.stdout.strip() or None


def peak_mib() -> float | None:
    """The peak memory of this process in MiB, if the system measures it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
