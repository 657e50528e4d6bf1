"""Arguments of `intertwine study`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import add_exit_codes, add_json, positive, whole

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
