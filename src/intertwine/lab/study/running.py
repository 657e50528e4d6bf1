"""`study.run`: runs a plan, keeps every finished task at once, and continues where an earlier run stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intertwine.errors import InputError
from intertwine.lab.study.executors import executor as find_executor
from intertwine.lab.study.plan import Plan, plan_of, read_plan
from intertwine.lab.study.records import FinishedTask
from intertwine.lab.study.store import Store
from intertwine.lab.study.tasks import StudyTask, expand, provenance, run_task, versions
from intertwine.lab.study.zoos import KnownZoo, known_zoos, missing_trainings
from intertwine.lab.zoo.folder import load
from intertwine.lab.zoo.precision import find_device


@dataclass(frozen=True)
class StudyProgress:
    """The progress of a study. `left`: estimated seconds; None before the first task."""

    doing: str
    done: int
    total: int
    failed: int
    left: float | None


@dataclass(frozen=True)
class Study:
    """A study after a run.

    Attributes:
        tasks: the number of tasks in the plan.
        run: the number of tasks of this run.
        errors: key of a failed task → its error.
    """

    folder: Path
    plan: Plan
    tasks: int
    run: int
    errors: Mapping[str, str]

    def frame(self) -> Any:
        """The results as a polars data frame, one row per number; see docs/results-table.md."""
        return Store.existing(self.folder).frame()

    def __repr__(self) -> str:
        failed = f", {len(self.errors)} failed" if self.errors else ""
        return f"Study({self.plan.name}: {self.tasks} tasks, {self.run} run now{failed}; results in {self.folder})"


StudyProgressCallback = Callable[[StudyProgress], None]


def run(
    plan: Plan | Mapping[str, Any] | str | Path,
    executor: str = "serial",
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    gpus: int = 0,
    address: str | None = None,
    device: str | None = None,
    only: Sequence[str] = (),
    progress: StudyProgressCallback | None = None,
) -> Study:
    """Run a plan.

    Args:
        plan: a TOML file, a `Plan`, or plain data; see `intertwine.lab.study.plan`.
        executor: "serial", "processes" or "ray".
        out: the folder of the study, "studies/NAME" by default; missing networks are trained into it.
        workers: how many tasks run at once, one per core by default.
        gpus: how many GPUs the workers share.
        address: of a running Ray cluster.
        device: of the computation; by default "cuda" if there are `gpus`, else "cpu".
        only: prefixes of task keys; these tasks run even if they are done, but their first result is kept.
        progress: called with a `StudyProgress` after every task.

    Raises:
        InputError: the plan is invalid (checked before anything runs), or the folder holds another study.

    Example:
        >>> import tempfile
        >>> from intertwine.lab.study.running import run
        >>> zoo = {"architecture": "mlp", "data": "digits", "seeds": "0:2", "epochs": 2}
        >>> plan = {"name": "small", "zoos": {"z": zoo}, "parts": [{"verb": "accuracy"}]}
        >>> study = run(plan, out=tempfile.mkdtemp())
        >>> study.tasks, study.frame()["quantity"].to_list()
        (2, ['accuracy', 'accuracy'])
    """
    source = None if isinstance(plan, Plan | Mapping) else plan
    if not isinstance(plan, Plan):
        plan = plan_of(plan) if isinstance(plan, Mapping) else read_plan(plan)
    folder = Path(out) if out is not None else Path("studies") / (re.sub(r"\W+", "-", plan.name).strip("-") or "study")
    zoos = known_zoos(plan, folder)
    tasks = expand(plan, zoos)
    chosen = _select(tasks, only)
    runner = find_executor(executor, workers=workers, gpus=gpus, address=address)
    if device is not None:
        find_device(device, here=executor != "ray")
    trainings = missing_trainings(plan, zoos)
    report = progress or (lambda _: None)
    with Store(folder, plan.name, plan.to_dict()) as store:
        done, total = store.done(), len(tasks)
        if obsolete := done - {task.key for task in tasks}:
            raise InputError(
                f"{folder} holds the results of {len(obsolete)} tasks that are no longer in this plan: networks of a "
                "zoo were trained again, or are gone. Use another folder (out, --out), or move this one away."
            )
        todo = [task for task in chosen if only or task.key not in done]
        for training in trainings if todo else ():
            training.run(lambda p: report(StudyProgress(f"training, {p.done:.0%}", total - len(todo), total, 0, None)))
        shared = _shared_data(zoos, todo, source, out) | {"device": device or ("cuda" if gpus else "cpu")}
        errors = _run_tasks(runner, todo, shared, store, report, total)
        if todo:
            store.compact(others=True)
    return Study(folder, plan, total, len(todo), errors)


def _select(tasks: list[StudyTask], only: Sequence[str]) -> list[StudyTask]:
    for prefix in only:
        if not any(task.key.startswith(prefix) for task in tasks):
            raise InputError(
                f"None of the {len(tasks)} tasks of this plan has a key that starts with {prefix!r}. The keys are in "
                "the column `key` of the results."
            )
    return [task for task in tasks if not only or task.key.startswith(tuple(only))]


def _shared_data(
    zoos: Mapping[str, KnownZoo], tasks: Sequence[StudyTask], source: str | Path | None, out: str | Path | None
) -> dict[str, Any]:
    """What all tasks need, loaded once here instead of once per worker."""
    place = f" --out {out}" if out is not None else ""
    return {
        "folders": {name: str(zoo.folder.resolve()) for name, zoo in zoos.items()},  # workers have another folder
        "data": {name: load(zoos[name].folder).dataset() for name in sorted({task.zoo for task in tasks})},
        "made": versions() | {"command": f"intertwine study run {source}{place}" if source is not None else None},
    }


def _run_tasks(
    runner: Any,
    tasks: Sequence[StudyTask],
    shared: Mapping[str, Any],
    store: Store,
    report: StudyProgressCallback,
    total: int,
) -> dict[str, str]:
    """Run tasks and store them; the errors by key."""
    errors: dict[str, str] = {}
    start, before = time.monotonic(), total - len(tasks)
    for i, outcome in enumerate(runner.run(tasks, run_task, shared), 1):
        task = outcome.task
        if outcome.error is not None:
            errors[task.key] = outcome.error
            made = provenance(shared["made"], task)
            store.add(FinishedTask(task.key, task.to_dict(), (), 0.0, made=made, error=outcome.error))
        else:
            store.add(outcome.result)
        left = (time.monotonic() - start) / i * (len(tasks) - i)
        report(StudyProgress(f"{task.verb} of {task.zoo}", before + i, total, len(errors), left))
    return errors
