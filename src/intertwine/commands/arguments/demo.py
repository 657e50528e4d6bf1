"""Arguments of `intertwine demo`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import add_exit_codes, add_json


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
