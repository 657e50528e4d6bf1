"""`intertwine study run PLAN`: a plan carried out, with progress, and where its results are."""

from __future__ import annotations

from argparse import Namespace

from rich.table import Table
from rich.text import Text

from intertwine.commands.document import print_json
from intertwine.commands.progress import progress
from intertwine.commands.show import duration, terminal
from intertwine.study.running import Progress, Study
from intertwine.study.running import run as run_study

SHOWN = 5  # failed tasks that are told one by one


def run(options: Namespace) -> int:
    """Carry out the command: 0 where every task worked, 1 where some failed."""
    with progress("reading the plan") as tell:

        def told(now: Progress) -> None:
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
    for key, error in list(found.errors.items())[:SHOWN]:
        console.print(Text(f"failed: {key[:12]}: {error.strip().splitlines()[-1]}", style="yellow"))
    if len(found.errors) > SHOWN:
        console.print(Text(f"and {len(found.errors) - SHOWN} others; run the same command to try them again", "yellow"))
    console.print(Text(f"results in {found.folder}"))
