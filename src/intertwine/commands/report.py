"""`intertwine report FOLDER`: the results of a study as one HTML file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from intertwine.commands.document import print_json
from intertwine.commands.show import terminal
from intertwine.report.writing import write


def run(options: Namespace) -> int:
    """Carry out the command."""
    path = write(options.folder, options.out or Path(options.folder) / "report.html")
    if options.json:
        print_json({"report": str(path), "bytes": path.stat().st_size})
    else:
        terminal().print(f"the report is {path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0
