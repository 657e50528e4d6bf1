"""`intertwine report FOLDER`: the results of a study as one HTML file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from intertwine.cli import arguments, output


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Write the results of a study as one HTML file that opens from disk."
    command.add_argument("folder", metavar="FOLDER", help="the folder of the study, as `intertwine study run` names it")
    command.add_argument("--out", metavar="FILE", help="the HTML file (default report.html in the folder)")
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    from intertwine.lab.report.page import write

    path = write(options.folder, options.out or Path(options.folder) / "report.html")
    if options.json:
        output.print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        output.terminal().print(f"the report is {path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0
