"""`intertwine study run PLAN`: runs the plan of a study and summarises its results."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from intertwine.cli.arguments import add_exit_codes, add_json, positive, whole
from intertwine.cli.output import duration, print_json, progress, terminal

if TYPE_CHECKING:
    from intertwine.lab.study.running import Study, StudyProgress

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine study`.


EXECUTORS = ("serial", "processes", "ray")
FAILED = "some tasks failed (the same command tries them again)"


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Carry out a plan: networks × pairs × layers × verbs × options, into one table of results."
    add_exit_codes(command, FAILED)
    verbs = command.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    run = verbs.add_parser("run", help="carry out a plan, or go on with it")
    run.description = (
        "Carry out a plan. What is finished is kept at once; the same command goes on where a run was stopped."
    )
    add_exit_codes(run, FAILED)
    run.add_argument("plan", metavar="PLAN", help="a TOML file")
    run.add_argument("--out", metavar="FOLDER", help="of the results (default studies/NAME)")
    run.add_argument("--executor", choices=EXECUTORS, default="serial", help="where tasks run (default serial)")
    run.add_argument("--workers", metavar="N", type=positive, help="how many at once (default: all cores)")
    run.add_argument("--gpus", metavar="N", type=whole, default=0, help="GPUs that the workers share (default 0)")
    run.add_argument("--device", metavar="D", help="where tasks compute (default: cuda with --gpus, else cpu)")
    run.add_argument("--address", metavar="HOST:PORT", help="a Ray cluster that is running")
    run.add_argument("--only", metavar="KEY", action="append", default=[], help="tasks whose key begins so, done again")
    add_json(run)


# ----------------------------------------------------------------------------------------------------
# `intertwine study run PLAN`: a plan carried out, with progress, and where its results are.


MAX_ERRORS_SHOWN = 5  # failed tasks that are told one by one


def run(options: Namespace) -> int:
    """Carry out the command: 0 where every task worked, 1 where some failed."""
    from intertwine.lab.study.running import run as run_study

    with progress("reading the plan") as tell:

        def told(now: StudyProgress) -> None:
            left = "" if now.left is None else f", {duration(now.left)} left"
            failed = f", {now.failed} failed" if now.failed else ""
            doing = f"{now.done} of {now.total} tasks: {now.doing}{failed}{left}"
            tell(doing, now.done / max(now.total, 1))

        found = run_study(
            options.plan, options.executor, out=options.out, workers=options.workers, gpus=options.gpus,
            address=options.address, device=options.device, only=options.only, progress=told,
        )  # fmt: skip
    if options.json:
        _show_json(found)
    else:
        _show(found)
    return 1 if found.errors else 0


def _show_json(found: Study) -> None:
    told = {
        "folder": str(found.folder), "tasks": found.tasks, "run": found.run, "failed": len(found.errors),
        "errors": dict(found.errors),
    }  # fmt: skip
    print_json(told)


def _show(found: Study) -> None:
    from rich.table import Table
    from rich.text import Text

    frame = found.frame()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("verb", "tasks", "numbers", "seconds"):
        table.add_column(head, justify="left" if head == "verb" else "right")
    seconds = {row["key"]: (row["verb"], row["seconds"]) for row in frame.to_dicts()}
    for verb in dict.fromkeys(part.verb for part in found.plan.parts):
        own = [spent for of, spent in seconds.values() if of == verb]
        if own:
            table.add_row(verb, str(len(own)), f"{(frame['verb'] == verb).sum():,}", f"{sum(own):.1f}")
    console = terminal()
    console.print(Text(f"{found.plan.name}: {found.tasks} tasks, {found.run} of them run now", style="bold"))
    console.print(table)
    for key, error in list(found.errors.items())[:MAX_ERRORS_SHOWN]:
        console.print(Text(f"failed: {key[:12]}: {error.strip().splitlines()[-1]}", style="yellow"))
    if len(found.errors) > MAX_ERRORS_SHOWN:
        console.print(
            Text(f"and {len(found.errors) - MAX_ERRORS_SHOWN} others; run the same command to try them again", "yellow")
        )
    console.print(Text(f"results in {found.folder}"))
