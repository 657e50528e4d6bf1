"""`intertwine demo`: runs the plan demo.toml on handwritten digits, writes its report and summarises the findings."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from intertwine.cli.arguments import add_exit_codes, add_json
from intertwine.cli.inspect import certificate_verdict, symmetry_header, wire_tree
from intertwine.cli.output import ReportProgress, duration, print_json, progress, spaced, subprogress, terminal

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from intertwine.lab.study.running import Study
    from intertwine.symmetry.symmetry import Certificate

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine demo`.


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Train three small networks on 1,797 real handwritten digits, find and prove their symmetry, align, average, "
        "compare, stitch, fold and dissect them, and write a report that opens from disk. The plan is left beside the "
        "report. A second run into the same folder does only what is missing and writes the report again; delete "
        "the folder to begin anew."
    )
    add_exit_codes(command, "a certificate or a task fails")
    command.add_argument("--out", metavar="DIR", default="out", help="where the report goes (default: out)")
    add_json(command)


# ----------------------------------------------------------------------------------------------------
# What the demo says in short: the numbers of its study that tell the story, picked out of the table of results.


@dataclass(frozen=True)
class DemoFinding:
    """One number and what it is. `share`: it is a fraction, to be written in percent."""

    name: str
    value: float
    share: bool = True

    def __str__(self) -> str:
        return f"{self.value:.1%}" if self.share else f"{self.value:.3f}"


@dataclass(frozen=True)
class DemoFindings:
    """The results of a study as records; the pair of networks that the story is about is the first of them."""

    records: list[dict[str, Any]]

    @cached_property
    def networks(self) -> list[str]:
        """All networks that were tested, such as "digits:0"."""
        return list(dict.fromkeys(r["a"] for r in self.records if r["verb"] == "accuracy"))

    def chosen(self, verb: str, quantity: str, **options: Any) -> list[dict[str, Any]]:
        """The rows of a quantity for the first network, or for the first two, under some options."""
        first, second = self.networks[:2]
        return [
            r
            for r in self.records
            if (r["verb"], r["quantity"], r["a"]) == (verb, quantity, first)
            and r["b"] in (None, second)
            and r["value"] is not None
            and options.items() <= json.loads(r["options"]).items()
        ]

    def certified(self) -> bool:
        """Whether every certificate held."""
        errors = [r for r in self.records if r["quantity"] == "certificate_error"]
        return bool(errors) and all(r["value"] is not None and r["note"] is None for r in errors)

    def told(self) -> list[DemoFinding]:
        """The story in numbers."""
        return [*self._accuracies(), *self._averages(), *self._features(), *self._smaller()]

    def _accuracies(self) -> Iterable[DemoFinding]:
        for r in self.records:
            if r["verb"] == "accuracy":
                yield DemoFinding(f"accuracy of network {network_letter(self.networks.index(r['a']))}", r["value"])

    def _averages(self) -> Iterable[DemoFinding]:
        """Half-way between two networks: as they are, moved onto each other, and with their statistics mended."""
        ways: Mapping[str, tuple[str, bool]] = {
            "average of A and B": ("none", False),
            "average of A and B, aligned": ("activations", False),
            "average of A and B, aligned and BatchNorm's statistics taken again": ("activations", True),
        }
        for name, (method, reset) in ways.items():
            line = self.chosen("barrier", "error", method=method, reset=reset)
            yield from (DemoFinding(name, 1 - r["value"]) for r in line if r["index"] == 0.5)
        for name, quantity in (("moved", "average_accuracy"), ("moved, brought back", "average_accuracy_back")):
            found = self.chosen("canonical", quantity)
            yield from (DemoFinding(f"average of A and A {name}", r["value"]) for r in found)

    def _features(self) -> Iterable[DemoFinding]:
        """What the networks have in common, layer by layer."""
        for name, method in (("the average", "none"), ("the aligned average", "activations")):
            far = [r["value"] for r in self.chosen("connectivity", "llfc", method=method)]
            if far:
                yield DemoFinding(f"features of {name} off the average of features (LLFC)", sum(far) / len(far), False)
        alike = max(self.chosen("compare", "linear_cka"), key=lambda r: r["value"], default=None)
        if alike:
            yield DemoFinding(f"most alike: {alike['layer']} and {alike['other_layer']} (CKA)", alike["value"], False)
        for name, family in (("as they are", "identity"), ("by order and scale", "relu"), ("linearly", "linear")):
            lost = [r["value"] for r in self.chosen("stitch", "penalty", family=family)]
            if lost:
                yield DemoFinding(f"accuracy lost by stitching A to B {name}, at the worst layer", max(lost))

    def _smaller(self) -> Iterable[DemoFinding]:
        """The smallest folded network that is at most one percent worse."""
        curve = self.chosen("fold", "accuracy", method="fold_to")
        whole = max((r["value"] for r in curve if r["index"] == 1.0), default=0.0)
        good = [r for r in curve if r["value"] >= whole - 0.01]
        if good:
            least = min(good, key=lambda r: r["index"])
            yield DemoFinding(f"accuracy of A folded to {least['index']:.0%} of its parameters", least["value"])


def network_letter(number: int) -> str:
    """The name of a network in the story.

    >>> network_letter(0), network_letter(2)
    ('A', 'C')
    """
    return chr(ord("A") + number)


# ----------------------------------------------------------------------------------------------------
# `intertwine demo`: the plan demo.toml, run on real handwritten digits; its report, and in short what it found.


PLAN = Path(__file__).with_name("demo.toml")
NAME = "one of the networks"
TRAINED, WORKED = 0.25, 0.95  # of the whole time, about: when the networks are there, and when the tasks are done
PROSE = 100  # letters in a line of running text
WHY = (
    "Each network alone is good, and the network half-way between the weights of two is not. The same happens between "
    "a network and its own moved copy, which compute one function: what looks like distance between weights can be a "
    "difference in order, scale and sign alone. Aligning takes that part away; what BatchNorm knows of the "
    "features has to be measured again for the network between."
)


def run(options: Namespace) -> int:
    """Carry out the command; 1 when a certificate or a task fails."""
    from rich.text import Text

    from intertwine.lab.report.page import write as write_report
    from intertwine.lab.study.executors.resources import torch_threads

    start, out = time.monotonic(), Path(options.out)
    # Networks this small run fastest on one core, and many times slower when several threads wait for a busy one.
    with torch_threads(1), progress("reading the plan") as bar:
        tell = with_time_left(bar)
        study = run_demo_study(out, tell)
        tell("writing the report", WORKED)
        shown, held = _symmetry(study, out / "symmetry.svg")
        report = write_report(study, out / "report.html")
    findings = DemoFindings(study.frame().to_dicts())
    seconds = time.monotonic() - start
    if options.json:
        _print_json(study, findings, report, seconds)
    else:
        terminal().print(spaced(*shown, Text(_done(study, seconds)), _table(findings), *_words(study)))
        terminal().print(Text(f"\nthe report is {report}: open it in a browser", style="bold"))
    return 0 if held.ok and findings.certified() and not study.errors else 1


def run_demo_study(out: Path, tell: ReportProgress) -> Study:
    """Train the networks and run the plan, or what is missing of both; a copy of the plan is left for the reader."""
    from intertwine.files import write_text
    from intertwine.lab.study.plan import read_plan
    from intertwine.lab.study.running import run as run_study
    from intertwine.lab.study.store import Store
    from intertwine.lab.study.zoos import known_zoos, missing_trainings

    plan, folder, copy = read_plan(PLAN), out / "study", out / PLAN.name
    with Store(folder, plan.name, plan.to_dict()):  # a folder of another plan is refused before anything is written
        write_text(copy, PLAN.read_text(encoding="utf-8"))
        training, working = subprogress(tell, 0.0, TRAINED), subprogress(tell, TRAINED, WORKED)
        for zoo in missing_trainings(plan, known_zoos(plan, folder)):
            zoo.run(lambda p: training("training the networks", p.done))
    return run_study(
        copy, out=folder, progress=lambda p: working(f"{p.done} of {p.total} tasks: {p.doing}", p.done / p.total)
    )


def with_time_left(tell: ReportProgress) -> ReportProgress:
    """The same, with the time left beside what is being done, as the time so far suggests."""
    start = time.monotonic()

    def told(doing: str, part: float) -> None:
        left = f", {duration((time.monotonic() - start) * (1 - part) / part)} left" if part else ""
        tell(doing + left, part)

    return told


def _symmetry(study: Study, drawing: Path) -> tuple[list[Text | Group], Certificate]:
    """The symmetry of the first network as the terminal shows it, its certificate, and its picture in a file."""
    from intertwine.files import write_text
    from intertwine.lab.report.wire_graph import wire_graph
    from intertwine.lab.study.zoos import NetworkCache, known_zoos
    from intertwine.symmetry.symmetry import symmetry

    (name, zoo) = next(iter(known_zoos(study.plan, study.folder).items()))
    bench = NetworkCache({name: str(zoo.folder)})
    model = bench.network(name, zoo.seeds[0])
    x = bench.example(name, model)
    held = symmetry(model, x).certify(model, x)
    write_text(drawing, wire_graph(held.symmetry, model, NAME))
    return [symmetry_header(NAME, held.symmetry, model), wire_tree(held.symmetry), certificate_verdict(held)], held


def _done(study: Study, seconds: float) -> str:
    if not study.run:
        return f"all {study.tasks} tasks were done before; delete {study.folder.parent} to begin anew"
    return f"{study.plan.name}: {study.run} of {study.tasks} tasks in {seconds:.0f} s"


def _table(findings: DemoFindings) -> Table:
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column()
    rows.add_column(justify="right")
    for finding in findings.told():
        rows.add_row(finding.name, Text(str(finding), style="bold"))
    return rows


def _words(study: Study) -> list[Text]:
    from rich.text import Text

    failed = [Text(f"failed: {error.strip().splitlines()[-1]}", style="red") for error in study.errors.values()]
    return [Text("\n".join(wrap(WHY, PROSE))), *failed]


def _print_json(study: Study, findings: DemoFindings, report: Path, seconds: float) -> None:
    told = {
        "report": str(report), "picture": str(report.with_name("symmetry.svg")), "study": str(study.folder),
        "tasks": study.tasks, "run": study.run, "failed": len(study.errors), "certified": findings.certified(),
        "seconds": round(seconds, 1), "found": {finding.name: finding.value for finding in findings.told()},
    }  # fmt: skip
    print_json(told)
