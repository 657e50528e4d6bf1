"""Would the tests notice a mistake? Single changes are made in a copy of a package, and its tests are run on each.

A change that no test notices survived. The sample is drawn with a fixed seed; each change runs the tests that call the
changed function (bench/mutation_tests.py), fastest first, until one fails or the budget of seconds is used up. A change
that makes the tests run three times as long counts as noticed.

    python bench/mutation.py align --sample 25      # draw and try: the "before" of bench/results/mutation.json
    python bench/mutation.py align --again          # try the survivors once more, with the tests of today: "after"
    python bench/mutation.py --page                 # write the table of docs/testing.md again
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

sys.path.insert(0, str(Path(__file__).parent))

from mutants import Mutant, mutants, sample
from mutation_tests import FILES, ROOT, TracedTest, chosen, copy_of_the_repository, in_child, naming, run_pytest, traced

RESULTS = ROOT / "bench" / "results" / "mutation.json"
PAGE = ROOT / "docs" / "testing.md"
MARKS = ("<!-- mutation: begin -->", "<!-- mutation: end -->")

LOADED = "scipy.optimize scipy.stats torch.export torch._dynamo sklearn.datasets hypothesis jaxtyping beartype.claw"
LEFT = "What is left, line by line:"


class Trial:
    """Tries mutants of one package in one copy of the repository."""

    def __init__(self, copy: Path, package: str, budget: float, tell: Callable[[str], None]) -> None:
        self.copy, self.package, self.budget, self.tell = copy, package, budget, tell
        self.tests: list[TracedTest] = traced(copy, package, tell)
        self.clock = int(time.time())

    def names(self, mutant: Mutant) -> list[str]:
        """The tests to run for a mutant: those seen to call it, or else the files that name its module."""
        module = mutant.file.removeprefix(f"src/intertwine/{self.package}/")
        return chosen(self.tests, module, mutant.function, self.budget) or naming(self.copy, self.package, mutant.file)

    def status(self, names: list[str], seconds: float) -> int | None:
        """What pytest says to these tests; None when they took too long."""
        return in_child(lambda: run_pytest(self.copy, names, [], "-x"), seconds)

    def with_source(self, file: str, source: str, names: list[str]) -> int | None:
        """The same, with another text in one file; the text is put back afterwards."""
        path = self.copy / file
        before, self.clock = path.read_text(encoding="utf-8"), self.clock + 1
        try:
            path.write_text(source, encoding="utf-8")
            os.utime(path, (self.clock, self.clock))  # a new second each time: compiled files are told apart by it
            return self.status(names, 20 + 3 * self.budget)
        finally:
            path.write_text(before, encoding="utf-8")

    def check(self, mutant: Mutant) -> None:
        """The tests pass as things are, and the copy is what is tested: a module that cannot be imported must fail."""
        if self.status(self.names(mutant), 20 + 3 * self.budget) != 0:
            raise SystemExit(f"The tests of {mutant.file} fail without any change: {self.names(mutant)}")
        if self.with_source(mutant.file, "raise RuntimeError('a broken copy')", self.names(mutant)) in (0, None):
            raise SystemExit(f"{mutant.file} of the copy was broken and the tests passed: another source is tested.")

    def verdict(self, mutant: Mutant) -> str:
        """killed, slow (the tests do not end), survived, or no test."""
        names = self.names(mutant)
        if not names:
            return "no test"
        source = (self.copy / mutant.file).read_text(encoding="utf-8")
        status = self.with_source(mutant.file, mutant.applied(source), names)
        if status is None and self.status(names, 20 + 3 * self.budget) is None:
            return "survived"  # the tests are too slow even without the change: nothing is shown
        return {None: "slow", 0: "survived"}.get(status, "killed")


def found_again(survivor: dict[str, Any]) -> Mutant | None:
    """A recorded survivor in the source of today: the nearest line with the same change; None if it is gone."""
    old = Mutant(**{name: survivor[name] for name in Mutant.__dataclass_fields__})
    if not (ROOT / old.file).exists():
        return None
    today = mutants((ROOT / old.file).read_text(encoding="utf-8"), old.file)
    same = [mutant for mutant in today if old.same_change(mutant)]
    return min(same, key=lambda mutant: abs(mutant.line - old.line), default=None)


def tried(trial: Trial, chosen_mutants: list[Mutant]) -> list[dict[str, Any]]:
    """Each mutant with its verdict, told as it comes."""
    rows = []
    for number, mutant in enumerate(chosen_mutants, 1):
        start = time.monotonic()
        row = {**asdict(mutant), "verdict": trial.verdict(mutant)}
        change = f"{mutant.file}:{mutant.line} {mutant.before} → {mutant.after}"
        trial.tell(f"{number}/{len(chosen_mutants)} {row['verdict']} in {time.monotonic() - start:.0f} s: {change}")
        rows.append(row)
    return rows


def lives(row: dict[str, Any]) -> bool:
    """Whether no test noticed."""
    return row["verdict"] in ("survived", "no test")


def keep(package: str, entry: dict[str, Any]) -> None:
    """Add what was found for one package to the results, while other packages may be measured beside it."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        held[package] = {**held.get(package, {}), **entry}
        ordered = {name: held[name] for name in FILES if name in held}
        RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".lock").unlink(missing_ok=True)


def first(trial: Trial, package: str, size: int, seed: int) -> dict[str, Any]:
    """The first measurement of a package."""
    drawn = sample(trial.copy, package, size, seed)
    trial.check(
        next(mutant for mutant in drawn if "::" in "".join(trial.names(mutant)))
    )  # with tests that were seen to pass
    rows = tried(trial, drawn)
    survivors = [row for row in rows if lives(row)]
    return {"seed": seed, "mutants": len(rows), "before": len(survivors), "survivors": survivors}


def again(trial: Trial, package: str) -> dict[str, Any]:
    """The survivors of the first measurement with the tests of today; what is judged about them is kept."""
    entry = json.loads(RESULTS.read_text(encoding="utf-8"))[package]
    survivors = []
    for old in entry["survivors"]:
        mutant = found_again(old)
        [row] = tried(trial, [mutant]) if mutant else [{**old, "verdict": "gone"}]
        survivors.append({**old, **row})
    return {**entry, "after": sum(map(lives, survivors)), "survivors": survivors}


def table(held: dict[str, Any]) -> str:
    """The survivors per package as Markdown.

    >>> row = {"verdict": "survived", "judged": "equivalent: both sides are equal there"}
    >>> print(table({"align": {"mutants": 20, "before": 5, "after": 1, "survivors": [row]}}))
    | package | mutants | survived before | survived after | of these change no result |
    |---|---|---|---|---|
    | align | 20 | 5 (25 %) | 1 (5 %) | 1 |
    """
    lines = [
        "| package | mutants | survived before | survived after | of these change no result |",
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
    """The survivors that no test notices yet, with what was judged about each.

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
    """Code on one line, cut where it is long."""
    line = " ".join(code.split())
    return line if len(line) <= 70 else line[:67] + "..."


def written(page: str, held: dict[str, Any]) -> str:
    """The page with the table of these results between its marks."""
    head, _, rest = page.partition(MARKS[0])
    _, _, tail = rest.partition(MARKS[1])
    return f"{head}{MARKS[0]}\n{table(held)}\n\n{LEFT}\n\n{left(held)}\n{MARKS[1]}{tail}"


def parser() -> argparse.ArgumentParser:
    """What can be asked."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("package", nargs="?", choices=[*FILES], help="a folder of src/intertwine")
    asked.add_argument("--sample", type=int, default=20, help="how many mutants (default: %(default)s)")
    asked.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    asked.add_argument(
        "--budget",
        type=float,
        default=10.0,
        help="seconds of tests per mutant (default: %(default)s)",
    )
    asked.add_argument("--again", action="store_true", help="only the survivors of the results at hand")
    asked.add_argument("--page", action="store_true", help="write the table of docs/testing.md")
    return asked


def load_once() -> None:
    """Import here, before any child is made, what most tests import anyway; intertwine itself must not be loaded."""
    for name in LOADED.split():
        import_module(name)
    import_module("torch").set_num_threads(1)


def main() -> None:
    """Try mutants, keep what was found, write the page."""
    asked = parser().parse_args()
    if asked.package:
        load_once()
        folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        try:
            copy = copy_of_the_repository(folder)
            trial = Trial(copy, asked.package, asked.budget, lambda text: print(f"{asked.package} {text}", flush=True))
            found = (
                again(trial, asked.package) if asked.again else first(trial, asked.package, asked.sample, asked.seed)
            )
            keep(asked.package, found)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if asked.page:
        held = json.loads(RESULTS.read_text(encoding="utf-8"))
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), held), encoding="utf-8")


if __name__ == "__main__":
    main()
