"""`intertwine demo`: the plan demo.toml, run on real handwritten digits; its report, and in short what it found."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from textwrap import wrap

from rich.console import Group
from rich.table import Table
from rich.text import Text

from intertwine.commands import show
from intertwine.commands.demo_findings import Findings
from intertwine.commands.document import print_json
from intertwine.commands.progress import Tell, progress, within
from intertwine.files import write_text
from intertwine.report.wire_graph import wire_graph
from intertwine.report.writing import write as write_report
from intertwine.study.executors.pinning import torch_threads
from intertwine.study.plan import read_plan
from intertwine.study.running import Study
from intertwine.study.running import run as run_study
from intertwine.study.store import Store
from intertwine.study.workbench import Workbench
from intertwine.study.zoos import known_zoos, missing
from intertwine.symmetry.certificate import Certificate
from intertwine.symmetry.symmetry import symmetry

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
    start, out = time.monotonic(), Path(options.out)
    # Networks this small run fastest on one core, and many times slower when several threads wait for a busy one.
    with torch_threads(1), progress("reading the plan") as bar:
        tell = with_time_left(bar)
        study = carry_out(out, tell)
        tell("writing the report", WORKED)
        shown, held = _symmetry(study, out / "symmetry.svg")
        report = write_report(study, out / "report.html")
    findings = Findings(study.frame().to_dicts())
    seconds = time.monotonic() - start
    if options.json:
        _print_json(study, findings, report, seconds)
    else:
        show.terminal().print(show.spaced(*shown, Text(_done(study, seconds)), _table(findings), *_words(study)))
        show.terminal().print(Text(f"\nthe report is {report}: open it in a browser", style="bold"))
    return 0 if held.ok and findings.certified() and not study.errors else 1


def carry_out(out: Path, tell: Tell) -> Study:
    """Train the networks and run the plan, or what is missing of both; a copy of the plan is left for the reader."""
    plan, folder, copy = read_plan(PLAN), out / "study", out / PLAN.name
    with Store(folder, plan.name, plan.to_dict()):  # a folder of another plan is refused before anything is written
        write_text(copy, PLAN.read_text(encoding="utf-8"))
        training, working = within(tell, 0.0, TRAINED), within(tell, TRAINED, WORKED)
        for zoo in missing(plan, known_zoos(plan, folder)):
            zoo.run(lambda p: training("training the networks", p.done))
    return run_study(
        copy, out=folder, progress=lambda p: working(f"{p.done} of {p.total} tasks: {p.doing}", p.done / p.total)
    )


def with_time_left(tell: Tell) -> Tell:
    """The same, with the time left beside what is being done, as the time so far suggests."""
    start = time.monotonic()

    def told(doing: str, part: float) -> None:
        left = f", {show.duration((time.monotonic() - start) * (1 - part) / part)} left" if part else ""
        tell(doing + left, part)

    return told


def _symmetry(study: Study, drawing: Path) -> tuple[list[Text | Group], Certificate]:
    """The symmetry of the first network as the terminal shows it, its certificate, and its picture in a file."""
    (name, zoo) = next(iter(known_zoos(study.plan, study.folder).items()))
    bench = Workbench({name: str(zoo.folder)})
    model = bench.network(name, zoo.seeds[0])
    x = bench.example(name, model)
    held = symmetry(model, x).certify(model, x)
    write_text(drawing, wire_graph(held.symmetry, model, NAME))
    return [show.header(NAME, held.symmetry, model), show.tree(held.symmetry), show.certificate(held)], held


def _done(study: Study, seconds: float) -> str:
    if not study.run:
        return f"all {study.tasks} tasks were done before; delete {study.folder.parent} to begin anew"
    return f"{study.plan.name}: {study.run} of {study.tasks} tasks in {seconds:.0f} s"


def _table(findings: Findings) -> Table:
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column()
    rows.add_column(justify="right")
    for finding in findings.told():
        rows.add_row(finding.name, Text(str(finding), style="bold"))
    return rows


def _words(study: Study) -> list[Text]:
    failed = [Text(f"failed: {error.strip().splitlines()[-1]}", style="red") for error in study.errors.values()]
    return [Text("\n".join(wrap(WHY, PROSE))), *failed]


def _print_json(study: Study, findings: Findings, report: Path, seconds: float) -> None:
    told = {
        "report": str(report), "picture": str(report.with_name("symmetry.svg")), "study": str(study.folder),
        "tasks": study.tasks, "run": study.run, "failed": len(study.errors), "certified": findings.certified(),
        "seconds": round(seconds, 1), "found": {finding.name: finding.value for finding in findings.told()},
    }  # fmt: skip
    print_json(told)
