"""Arguments of `intertwine report`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import add_json


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Write the results of a study as one HTML file that opens from disk."
    command.add_argument("folder", metavar="FOLDER", help="of the study, as `intertwine study run` names it")
    command.add_argument("--out", metavar="FILE", help="the HTML file (default report.html in the folder)")
    add_json(command)
