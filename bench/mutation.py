"""Mutation testing: single changes to the source of one room, and how many of them the tests of the room detect.

A change that no test detects has survived. The sample is drawn with a fixed seed. Each change runs the tests that call
the changed function (bench/mutation_tests.py), fastest first, until one fails or the time budget is used up. A change
that makes the tests run three times as long counts as detected.

    python bench/mutation.py align --sample 25      # draw and test: the "before" of bench/results/mutation.json
    python bench/mutation.py align --again          # test the survivors again with the current tests: "after"
    python bench/mutation.py --page                 # update the table of docs/testing.md
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from machine import write_results

sys.path.insert(0, str(Path(__file__).parent))

from mutants import Mutant, mutants, sample
from mutation_tests import ROOMS, ROOT, TracedTest, chosen, copy_of_the_repository, in_child, naming, run_pytest, traced

RESULTS = ROOT / "bench" / "results" / "mutation.json"
PAGE = ROOT / "docs" / "testing.md"
MARKS = ("<!-- mutation: begin -->", "<!-- mutation: end -->")

LOADED = "scipy.optimize scipy.stats torch.export torch._dynamo sklearn.datasets hypothesis jaxtyping beartype.claw"
LEFT = "What is left, line by line:"


class Trial:
    """Tests mutants of one room in one copy of the repository."""

    def __init__(self, copy: Path, room: str, budget: float, progress: Callable[[str], None]) -> None:
        self.copy, self.room, self.budget, self.progress = copy, room, budget, progress
        self.tests: list[TracedTest] = traced(copy, room, progress)
        self.clock = int(time.time())

    def names(self, mutant: Mutant) -> list[str]:
        """The tests to run for a mutant: those that call its function, or else the files that name its module."""
        module = mutant.file.removeprefix(f"src/intertwine/{self.room}/")
        return chosen(self.tests, module, mutant.function, self.budget) or naming(self.copy, self.room, mutant.file)

    def status(self, names: list[str], seconds: float) -> int | None:
        """The exit status of pytest on these tests; None if they took too long."""
        return in_child(lambda: run_pytest(self.copy, names, [], "-x"), seconds)

    def with_source(self, file: str, source: str, names: list[str]) -> int | None:
        """The same with other contents in one file, which are restored afterwards."""
        path = self.copy / file
        before, self.clock = path.read_text(encoding="utf-8"), self.clock + 1
        try:
            path.write_text(source, encoding="utf-8")
            os.utime(path, (self.clock, self.clock))  # a new second: compiled files are compared by it
            return self.status(names, 20 + 3 * self.budget)
        finally:
            path.write_text(before, encoding="utf-8")

    def check(self, mutant: Mutant) -> None:
        """Check that the tests pass without a change, and fail with a broken module: the copy is what they import."""
        if self.status(self.names(mutant), 20 + 3 * self.budget) != 0:
            raise SystemExit(f"The tests of {mutant.file} fail without a change: {self.names(mutant)}")
        if self.with_source(mutant.file, "raise RuntimeError('a broken copy')", self.names(mutant)) in (0, None):
            raise SystemExit(f"The tests pass although {mutant.file} of the copy is broken: they import other source.")

    def verdict(self, mutant: Mutant) -> str:
        """One of: killed, slow (the tests do not end), survived, no test."""
        names = self.names(mutant)
        if not names:
            return "no test"
        source = (self.copy / mutant.file).read_text(encoding="utf-8")
        status = self.with_source(mutant.file, mutant.applied(source), names)
        if status is None and self.status(names, 20 + 3 * self.budget) is None:
            return "survived"  # the tests are too slow even without the change, which proves nothing
        return {None: "slow", 0: "survived"}.get(status, "killed")


def found_again(survivor: dict[str, Any]) -> Mutant | None:
    """A recorded survivor in the current source: the nearest line with the same change; None if there is none."""
    old = Mutant(**{name: survivor[name] for name in Mutant.__dataclass_fields__})
    if not (ROOT / old.file).exists():
        return None
    current = mutants((ROOT / old.file).read_text(encoding="utf-8"), old.file)
    same = [mutant for mutant in current if old.same_change(mutant)]
    return min(same, key=lambda mutant: abs(mutant.line - old.line), default=None)


def tried(trial: Trial, chosen_mutants: list[Mutant]) -> list[dict[str, Any]]:
    """Each mutant with its verdict; progress is printed."""
    rows = []
    for number, mutant in enumerate(chosen_mutants, 1):
        start = time.monotonic()
        row = {**asdict(mutant), "verdict": trial.verdict(mutant)}
        change = f"{mutant.file}:{mutant.line} {mutant.before} → {mutant.after}"
        trial.progress(f"{number}/{len(chosen_mutants)} {row['verdict']} in {time.monotonic() - start:.0f} s: {change}")
        rows.append(row)
    return rows


def lives(row: dict[str, Any]) -> bool:
    """Whether no test detected the change."""
    return row["verdict"] in ("survived", "no test")


def keep(room: str, entry: dict[str, Any]) -> None:
    """Write the result of one room into the result file, under a lock: other rooms may be measured in parallel."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        held[room] = {**held.get(room, {}), **entry}
        ordered = {name: held[name] for name in [*ROOMS, *held] if name in held}
        write_results(RESULTS, ordered)
    RESULTS.with_suffix(".lock").unlink(missing_ok=True)


def first(trial: Trial, room: str, size: int, seed: int) -> dict[str, Any]:
    """The first measurement of a room."""
    drawn = sample(trial.copy, room, size, seed)
    trial.check(next(mutant for mutant in drawn if "::" in "".join(trial.names(mutant))))  # one with traced tests
    rows = tried(trial, drawn)
    survivors = [row for row in rows if lives(row)]
    return {"seed": seed, "mutants": len(rows), "before": len(survivors), "survivors": survivors}


def again(trial: Trial, room: str) -> dict[str, Any]:
    """The survivors of the first measurement with the current tests; the judgements about them are kept."""
    entry = json.loads(RESULTS.read_text(encoding="utf-8"))[room]
    survivors = []
    for old in entry["survivors"]:
        mutant = found_again(old)
        [row] = tried(trial, [mutant]) if mutant else [{**old, "verdict": "gone"}]
        survivors.append({**old, **row})
    return {**entry, "after": sum(map(lives, survivors)), "survivors": survivors}


def table(held: dict[str, Any]) -> str:
    """The survivors per room as Markdown.

    >>> row = {"verdict": "survived", "judged": "equivalent: both sides are equal there"}
    >>> print(table({"align": {"mutants": 20, "before": 5, "after": 1, "survivors": [row]}}))
    | room | mutants | survived before | survived after | of these change no result |
    |---|---|---|---|---|
    | align | 20 | 5 (25 %) | 1 (5 %) | 1 |
    """
    lines = [
        "| room | mutants | survived before | survived after | of these change no result |",
        "|---|---|---|---|---|",
    ]
    lines += [line(name, entry) for name, entry in held.items()]
    if len(held) > 1:
        measured = [entry for entry in held.values() if "after" in entry]
        total = {key: sum(entry[key] for entry in measured) for key in ("mutants", "before", "after") if measured}
        survivors = [row for entry in measured for row in entry["survivors"]]
        lines += [line("all with an after", {**total, "survivors": survivors})] if measured else []
    return "\n".join(lines)


def line(name: str, entry: dict[str, Any]) -> str:
    """One row of the table."""
    many = entry["mutants"]
    before = f"{entry['before']} ({entry['before'] / many:.0%})".replace("%", " %")
    after = f"{entry['after']} ({entry['after'] / many:.0%})".replace("%", " %") if "after" in entry else "not tried"
    same = sum(lives(row) and row.get("judged", "").startswith("equivalent") for row in entry["survivors"])
    return f"| {name} | {many} | {before} | {after} | {same} |"


def left(held: dict[str, Any]) -> str:
    """The survivors that no test detects yet, with the judgement about each.

    >>> row = {"verdict": "survived", "file": "src/intertwine/a.py", "line": 3, "before": "x < 0", "after": "x <= 0"}
    >>> print(left({"a": {"survivors": [{**row, "judged": "equivalent: x is never 0"}]}}))
    - `a.py:3` `x < 0` → `x <= 0`: equivalent: x is never 0
    """
    rows = [row for entry in held.values() for row in entry["survivors"] if lives(row)]
    return "\n".join(
        f"- `{row['file'].removeprefix('src/intertwine/')}:{row['line']}` `{short(row['before'])}` → "
        f"`{short(row['after'])}`: {row.get('judged', 'not judged yet')}"
        for row in rows
    )


def short(code: str) -> str:
    """Code on one line, shortened where it is long."""
    line = " ".join(code.split())
    return line if len(line) <= 70 else line[:67] + "..."


def written(page: str, held: dict[str, Any]) -> str:
    """The page with the table of these results between its marks."""
    head, _, rest = page.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    return f"{head}{MARKS[0]}\n{table(held)}\n\n{LEFT}\n\n{left(held)}\n{MARKS[1]}{tail}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("room", nargs="?", choices=ROOMS, help="a folder of src/intertwine")
    found.add_argument("--sample", type=int, default=20, help="number of mutants (default: %(default)s)")
    found.add_argument("--seed", type=int, default=0, help="seed of the sample (default: %(default)s)")
    found.add_argument("--budget", type=float, default=10.0, help="seconds of tests per mutant (default: %(default)s)")
    found.add_argument("--again", action="store_true", help="test only the recorded survivors")
    found.add_argument("--page", action="store_true", help="update the table of docs/testing.md")
    return found


def load_once() -> None:
    """Import the packages that most tests need before any child is forked; intertwine itself must not be loaded."""
    for name in LOADED.split():
        import_module(name)
    import_module("torch").set_num_threads(1)


def main() -> None:
    """Test mutants, store the results, write the page."""
    options = parser().parse_args()
    if options.room:
        load_once()
        folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        try:
            copy = copy_of_the_repository(folder)
            room = options.room
            trial = Trial(copy, room, options.budget, lambda text: print(f"{room} {text}", flush=True))
            keep(room, again(trial, room) if options.again else first(trial, room, options.sample, options.seed))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if options.page:
        held = json.loads(RESULTS.read_text(encoding="utf-8"))
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), held), encoding="utf-8")


if __name__ == "__main__":
    main()
