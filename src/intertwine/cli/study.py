"""`intertwine study run PLAN`: runs the plan of a study and summarises its results."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from intertwine.cli import arguments, output

if TYPE_CHECKING:
    from intertwine.lab.study.running import Study, StudyProgress

EXECUTORS = ("serial", "processes", "ray")
FAILED = "some tasks failed (the same command runs them again)"
MAX_ERRORS_SHOWN = 5  # failed tasks that are shown one by one


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Run a plan: networks × pairs × layers × verbs × options, into one table of results."
    arguments.add_exit_codes(command, FAILED)
    verbs = command.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    run = verbs.add_parser("run", help="run a plan, or resume it")
    run.description = "Run a plan. Finished tasks are stored at once; the same command resumes a run that was stopped."
    arguments.add_exit_codes(run, FAILED)
    run.add_argument("plan", metavar="PLAN", help="a TOML file")
    run.add_argument("--out", metavar="FOLDER", help="the folder of the results (default studies/NAME)")
    run.add_argument("--executor", choices=EXECUTORS, default="serial", help="where tasks run (default serial)")
    run.add_argument("--workers", metavar="N", type=arguments.positive, help="number of workers (default: all cores)")
    run.add_argument(
        "--gpus", metavar="N", type=arguments.whole, default=0, help="GPUs that the workers share (default 0)"
    )
    run.add_argument("--device", metavar="D", help="where tasks compute (default: cuda with --gpus, else cpu)")
    run.add_argument("--address", metavar="HOST:PORT", help="a running Ray cluster")
    run.add_argument(
        "--only", metavar="KEY", action="append", default=[], help="run the tasks whose key begins with this again"
    )
    arguments.add_json(run)


def run(options: Namespace) -> int:
    """Carry out the command: 0 where every task worked, 1 where some failed."""
    from intertwine.lab.study.running import run as run_study

    with output.progress("reading the plan") as step:

        def update(now: StudyProgress) -> None:
            left = "" if now.left is None else f", {output.duration(now.left)} left"
            failed = f", {now.failed} failed" if now.failed else ""
            step(f"{now.done} of {now.total} tasks: {now.doing}{failed}{left}", now.done / max(now.total, 1))

        found = run_study(
            options.plan, options.executor, out=options.out, workers=options.workers, gpus=options.gpus,
            address=options.address, device=options.device, only=options.only, progress=update,
        )  # fmt: skip
    if options.json:
        output.print_json({
            "folder": str(found.folder), "tasks": found.tasks, "run": found.run, "failed": len(found.errors),
            "errors": dict(found.errors),
        })  # fmt: skip
    else:
        _show(found)
    return 1 if found.errors else 0


def _show(found: Study) -> None:
    frame = found.frame()
    rows = output.table("verb", "tasks", "numbers", "seconds", left=("verb",))
    seconds = {row["key"]: (row["verb"], row["seconds"]) for row in frame.to_dicts()}
    for verb in dict.fromkeys(part.verb for part in found.plan.parts):
        own = [spent for of, spent in seconds.values() if of == verb]
        if own:
            rows.add_row(verb, str(len(own)), f"{(frame['verb'] == verb).sum():,}", f"{sum(own):.1f}")
    console = output.terminal()
    console.print(output.text(f"{found.plan.name}: {found.tasks} tasks, {found.run} of them run now", style="bold"))
    console.print(rows)
    failed = [f"failed: {key[:12]}: {error.strip().splitlines()[-1]}" for key, error in found.errors.items()]
    if (more := len(failed) - MAX_ERRORS_SHOWN) > 0:
        failed[MAX_ERRORS_SHOWN:] = [f"and {more} others; run the same command to try them again"]
    if failed:
        console.print(output.lines(failed, "yellow"))
    console.print(output.text(f"results in {found.folder}"))
