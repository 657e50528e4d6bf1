"""The study of the benchmarks: real verbs on four small networks of the digits, with a given number of tasks."""

from __future__ import annotations

import json
from pathlib import Path

#: Tasks of one repeat of all parts below.
EACH = 20
#: A task takes 3 to 200 ms on one thread; `stitch` draws random numbers.
PLAN = """
name = "bench"
zoos.digits.folder = {zoo}

[[parts]]
verb = "barrier"
repeats = {repeats}

[[parts]]
verb = "symmetry"
networks = [0, 1]
repeats = {repeats}

[[parts]]
verb = "compare"
pairs = [[0, 1]]
grid.measure = ["cca", "orthogonal_procrustes"]
repeats = {repeats}

[[parts]]
verb = "stitch"
pairs = "neighbours"
layers = ["2"]
options.fit = "task"
options.epochs = 2
grid.family = ["linear", "relu"]
repeats = {repeats}

[[parts]]
verb = "complexity"
networks = [2, 3]
repeats = {repeats}

[[parts]]
verb = "accuracy"
repeats = {repeats}
"""


def prepared(folder: Path, tasks: int) -> Path:
    """Write a plan with a number of tasks, a multiple of 20, and train its missing networks beside it.

    >>> import tempfile
    >>> prepared(Path(tempfile.mkdtemp()), 40).name
    'plan-40.toml'
    """
    from intertwine.lab.zoo.training import train  # not at the top: workers without torch import this file too

    zoo = folder.resolve() / "zoo"
    train("mlp", seeds=range(4), data="digits", out=zoo, options={"widths": (64, 64, 64, 10)}, epochs=4)
    plan = folder / f"plan-{tasks}.toml"
    plan.write_text(PLAN.format(zoo=json.dumps(str(zoo)), repeats=tasks // EACH), encoding="utf-8")
    return plan
