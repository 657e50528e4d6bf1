"""`study.run`: a plan carried out. What is finished is kept at once; a run that was killed goes on where it stopped."""

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
from intertwine.lab.zoo.training import TrainingProgress as Training


@dataclass(frozen=True)
class StudyProgress:
    """How far a study is. `left`: seconds, as the tasks so far suggest; None before the first."""

    doing: str
    done: int
    total: int
    failed: int
    left: float | None


@dataclass(frozen=True)
class Study:
    """A study that has run. `tasks`: all of its plan. `run`: those done now. `errors`: task → what went wrong."""

    folder: Path
    plan: Plan
    tasks: int
    run: int
    errors: Mapping[str, str]

    def frame(self) -> Any:
        """The results as one polars data frame, a row per number; see docs/results-table.md."""
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
    """Carry out a plan.

    Args:
        plan: a TOML file, or the same as dataclasses or plain data; see `intertwine.lab.study.plan`.
        executor: "serial", "processes" or "ray". workers: how many; all cores where not given. gpus: shared among them.
        address: of a Ray cluster that runs already.
        device: where tasks compute; "cuda" where GPUs are shared out (a worker sees its own), else "cpu".
        out: the folder of the study, "studies/NAME" where not given; networks to be trained are put there too.
        only: the beginnings of the keys of tasks to do, all where none is given. They run even if they are done; the
            result that was stored first stays.
        progress: called with a `StudyProgress` as tasks finish.

    Raises:
        InputError: a plan that cannot be carried out, told before anything runs; a folder that holds another study.

    Example:
        >>> import tempfile
        >>> from intertwine.lab.study.running import run
        >>> zoo = {"architecture": "mlp", "data": "digits", "seeds": "0:2", "epochs": 2}
        >>> plan = {"name": "small", "zoos": {"z": zoo}, "parts": [{"verb": "accuracy"}]}
        >>> study = run(plan, out=tempfile.mkdtemp())
        >>> study.tasks, study.frame()["quantity"].to_list()
        (2, ['accuracy', 'accuracy'])
    """
    asked, source = _read(plan)
    folder = Path(out) if out is not None else Path("studies") / (re.sub(r"\W+", "-", asked.name).strip("-") or "study")
    zoos = known_zoos(asked, folder)
    tasks = expand(asked, zoos)
    chosen = _chosen(tasks, only)
    runner = find_executor(executor, workers=workers, gpus=gpus, address=address)
    if device is not None:
        find_device(device, here=executor != "ray")
    trainings = missing_trainings(asked, zoos)
    tell = progress or (lambda told: None)
    with Store(folder, asked.name, asked.to_dict()) as store:
        done = store.done()
        _check_same(folder, done - {task.key for task in tasks})
        left = [task for task in chosen if only or task.key not in done]
        for training in trainings if left else ():
            training.run(lambda p: tell(_training(p, len(tasks) - len(left), len(tasks))))
        shared = _shared(zoos, left, _command(source, out)) | {"device": device or ("cuda" if gpus else "cpu")}
        errors = _work(runner, left, shared, store, tell, len(tasks))
        if left:
            store.compact(others=True)  # also what killed runs have left
    return Study(folder, asked, len(tasks), len(left), errors)


def _read(plan: Plan | Mapping[str, Any] | str | Path) -> tuple[Plan, str | None]:
    if isinstance(plan, Plan):
        return plan, None
    if isinstance(plan, Mapping):
        return plan_of(plan), None
    return read_plan(plan), str(plan)


def _check_same(folder: Path, others: set[str]) -> None:
    """Refuse to put results of networks beside those of others that had their names."""
    if others:
        raise InputError(
            f"{folder} holds the results of {len(others)} tasks that this plan no longer has: the networks of a zoo "
            "were trained again, or are gone. They would be taken for results of the networks of today. Give another "
            "folder (out, --out), or move this one away."
        )


def _chosen(tasks: list[StudyTask], only: Sequence[str]) -> list[StudyTask]:
    for start in only:
        if not any(task.key.startswith(start) for task in tasks):
            raise InputError(
                f"The task {start} was asked for, but none of the {len(tasks)} tasks of this plan has a key that begins"
                " so. The keys are in the column `key` of its results."
            )
    return [task for task in tasks if not only or any(task.key.startswith(start) for start in only)]


def _command(source: str | None, out: str | Path | None) -> str | None:
    """What to type to have the study again."""
    return f"intertwine study run {source}" + (f" --out {out}" if out is not None else "") if source else None


def _shared(zoos: Mapping[str, KnownZoo], tasks: Sequence[StudyTask], command: str | None) -> dict[str, Any]:
    """What all tasks look at: read once here, and not by every worker again."""
    used = {task.zoo for task in tasks}
    about = versions() | {"command": command}
    folders = {name: str(zoo.folder.resolve()) for name, zoo in zoos.items()}  # workers stand elsewhere
    return {
        "folders": folders,
        "data": {name: load(zoos[name].folder).dataset() for name in sorted(used)},
        "made": about,
    }


def _work(
    runner: Any,
    tasks: Sequence[StudyTask],
    shared: Mapping[str, Any],
    store: Store,
    tell: StudyProgressCallback,
    total: int,
) -> dict[str, str]:
    errors: dict[str, str] = {}
    start, before = time.monotonic(), total - len(tasks)
    for i, outcome in enumerate(runner.run(tasks, run_task, shared), 1):
        task = outcome.task
        if outcome.error is not None:
            errors[task.key] = outcome.error
            told = provenance(shared["made"], task)
            store.add(FinishedTask(task.key, task.to_dict(), (), 0.0, made=told, error=outcome.error))
        else:
            store.add(outcome.result)
        left = (time.monotonic() - start) / i * (len(tasks) - i)
        tell(StudyProgress(f"{task.verb} of {task.zoo}", before + i, total, len(errors), left))
    return errors


def _training(told: Training, done: int, total: int) -> StudyProgress:
    return StudyProgress(f"training, {told.done:.0%}", done, total, 0, None)
