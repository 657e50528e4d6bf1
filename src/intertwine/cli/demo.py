"""`intertwine demo`: runs the plan demo.toml on handwritten digits, writes its report and summarises the findings."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output
from intertwine.cli.inspect import certificate_verdict, symmetry_header, wire_tree

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from intertwine.lab.study.running import Study
    from intertwine.symmetry.symmetry import Certificate

PLAN = Path(__file__).with_name("demo.toml")
NAME = "one of the networks"
TRAINED, FINISHED = 0.25, 0.95  # the approximate share of the time after training, and after all tasks
LINE_WIDTH = 100  # of running text
WHY = (
    "Each network alone is good, and the network half-way between the weights of two is not. The same happens between "
    "a network and its own moved copy, which compute one function: what looks like distance between weights can be a "
    "difference in order, scale and sign alone. Aligning takes that part away; the statistics of BatchNorm have to be "
    "re-estimated for the network between."
)


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Train three small networks on 1,797 real handwritten digits, find and certify their symmetry, align, average, "
        "compare, stitch, fold and dissect them, and write a report that opens from disk. The plan is copied beside "
        "the report. A second run into the same folder does only what is missing and writes the report again; delete "
        "the folder to start anew."
    )
    arguments.add_exit_codes(command, "a certificate or a task fails")
    command.add_argument("--out", metavar="DIR", default="out", help="the folder of the report (default: out)")
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command; 1 when a certificate or a task fails."""
    from intertwine.lab.report.page import write as write_report
    from intertwine.lab.study.executors.resources import torch_threads

    start, out = time.monotonic(), Path(options.out)
    # Networks this small run fastest on one core, and many times slower when several threads wait for a busy one.
    with torch_threads(1), output.progress("reading the plan") as bar:
        step = with_time_left(bar)
        study = run_demo_study(out, step)
        step("writing the report", FINISHED)
        shown, certificate = _symmetry(study, out / "symmetry.svg")
        report = write_report(study, out / "report.html")
    findings = DemoFindings(study.frame().to_dicts())
    seconds = time.monotonic() - start
    if options.json:
        output.print_json({
            "report": str(report), "picture": str(report.with_name("symmetry.svg")), "study": str(study.folder),
            "tasks": study.tasks, "run": study.run, "failed": len(study.errors), "certified": findings.certified(),
            "seconds": round(seconds, 1), "found": {finding.name: finding.value for finding in findings.all()},
        })  # fmt: skip
    else:
        done = f"{study.plan.name}: {study.run} of {study.tasks} tasks in {seconds:.0f} s"
        if not study.run:
            done = f"all {study.tasks} tasks were done before; delete {study.folder.parent} to start anew"
        rows = output.table("", "", left=(), header=False)
        rows.columns[0].justify = "left"
        for finding in findings.all():
            rows.add_row(finding.name, output.text(str(finding), style="bold"))
        failed = (f"failed: {error.strip().splitlines()[-1]}" for error in study.errors.values())
        output.show(
            *shown, output.text(done), rows, output.text("\n".join(wrap(WHY, LINE_WIDTH))), output.lines(failed, "red")
        )
        output.terminal().print(output.text(f"\nthe report is {report}: open it in a browser", style="bold"))
    return 0 if certificate.ok and findings.certified() and not study.errors else 1


def run_demo_study(out: Path, progress: output.ProgressCallback) -> Study:
    """Train the networks and run the plan, or what is missing of both; leave a copy of the plan for the reader."""
    from intertwine.files import write_text
    from intertwine.lab.study.plan import read_plan
    from intertwine.lab.study.running import run as run_study
    from intertwine.lab.study.store import Store
    from intertwine.lab.study.zoos import known_zoos, missing_trainings

    plan, folder, copy = read_plan(PLAN), out / "study", out / PLAN.name
    with Store(folder, plan.name, plan.to_dict()):  # the folder of another plan is refused before anything is written
        write_text(copy, PLAN.read_text(encoding="utf-8"))
        training, tasks = output.subprogress(progress, 0.0, TRAINED), output.subprogress(progress, TRAINED, FINISHED)
        for zoo in missing_trainings(plan, known_zoos(plan, folder)):
            zoo.run(lambda p: training("training the networks", p.done))
    return run_study(
        copy, out=folder, progress=lambda p: tasks(f"{p.done} of {p.total} tasks: {p.doing}", p.done / p.total)
    )


def with_time_left(progress: output.ProgressCallback) -> output.ProgressCallback:
    """The same callback with an estimate of the time left beside the current step."""
    start = time.monotonic()

    def update(doing: str, part: float) -> None:
        left = f", {output.duration((time.monotonic() - start) * (1 - part) / part)} left" if part else ""
        progress(doing + left, part)

    return update


def _symmetry(study: Study, drawing: Path) -> tuple[list[Text | Group], Certificate]:
    """The symmetry of the first network for the terminal, its certificate, and its picture in a file."""
    from intertwine.files import write_text
    from intertwine.lab.report.wire_graph import wire_graph
    from intertwine.lab.study.zoos import NetworkCache, known_zoos
    from intertwine.symmetry.symmetry import symmetry

    (name, zoo) = next(iter(known_zoos(study.plan, study.folder).items()))
    cache = NetworkCache({name: str(zoo.folder)})
    model = cache.network(name, zoo.seeds[0])
    x = cache.example(name, model)
    certificate = symmetry(model, x).certify(model, x)
    found = certificate.symmetry
    write_text(drawing, wire_graph(found, model, NAME))
    return [symmetry_header(NAME, found, model), wire_tree(found), certificate_verdict(certificate)], certificate


# -- The findings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoFinding:
    """A number with its name. `share`: it is a fraction, shown in percent."""

    name: str
    value: float
    share: bool = True

    def __str__(self) -> str:
        return f"{self.value:.1%}" if self.share else f"{self.value:.3f}"


@dataclass(frozen=True)
class DemoFindings:
    """The numbers of the demo's study that summarise it; pairs of networks are those of the first two."""

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

    def all(self) -> list[DemoFinding]:
        """All findings, in the order in which they are shown."""
        return [*self._accuracies(), *self._averages(), *self._features(), *self._smaller()]

    def _accuracies(self) -> Iterator[DemoFinding]:
        for r in self.records:
            if r["verb"] == "accuracy":
                yield DemoFinding(f"accuracy of network {network_letter(self.networks.index(r['a']))}", r["value"])

    def _averages(self) -> Iterator[DemoFinding]:
        """Half-way between two networks: as they are, aligned, and with BatchNorm statistics re-estimated."""
        ways: Mapping[str, tuple[str, bool]] = {
            "average of A and B": ("none", False),
            "average of A and B, aligned": ("activations", False),
            "average of A and B, aligned, BatchNorm statistics re-estimated": ("activations", True),
        }
        for name, (method, reset) in ways.items():
            line = self.chosen("barrier", "error", method=method, reset=reset)
            yield from (DemoFinding(name, 1 - r["value"]) for r in line if r["index"] == 0.5)
        for name, quantity in (("moved", "average_accuracy"), ("moved, brought back", "average_accuracy_back")):
            found = self.chosen("canonical", quantity)
            yield from (DemoFinding(f"average of A and A {name}", r["value"]) for r in found)

    def _features(self) -> Iterator[DemoFinding]:
        """Similarity of the networks, layer by layer."""
        for name, method in (("average", "none"), ("aligned average", "activations")):
            far = [r["value"] for r in self.chosen("connectivity", "llfc", method=method)]
            if far:
                yield DemoFinding(f"LLFC error of the {name}, mean over layers", sum(far) / len(far), False)
        alike = max(self.chosen("compare", "linear_cka"), key=lambda r: r["value"], default=None)
        if alike:
            name = f"most similar layers: {alike['layer']} and {alike['other_layer']} (CKA)"
            yield DemoFinding(name, alike["value"], False)
        for name, family in (("as they are", "identity"), ("by order and scale", "relu"), ("linearly", "linear")):
            lost = [r["value"] for r in self.chosen("stitch", "penalty", family=family)]
            if lost:
                yield DemoFinding(f"accuracy lost by stitching A to B {name}, at the worst layer", max(lost))

    def _smaller(self) -> Iterator[DemoFinding]:
        """The smallest folded network that is at most one percent worse."""
        curve = self.chosen("fold", "accuracy", method="fold_to")
        whole = max((r["value"] for r in curve if r["index"] == 1.0), default=0.0)
        good = [r for r in curve if r["value"] >= whole - 0.01]
        if good:
            least = min(good, key=lambda r: r["index"])
            yield DemoFinding(f"accuracy of A folded to {least['index']:.0%} of its parameters", least["value"])


def network_letter(number: int) -> str:
    """The name of a network in the findings.

    >>> network_letter(0), network_letter(2)
    ('A', 'C')
    """
    return chr(ord("A") + number)
