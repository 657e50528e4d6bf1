"""`intertwine report FOLDER`: the results of a study as one HTML file."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

from intertwine.commands.show import terminal
from intertwine.report.writing import write


def run(options: Namespace) -> int:
    """Carry out the command."""
    path = write(options.folder, options.out or Path(options.folder) / "report.html")
    if options.json:
        sys.stdout.write(json.dumps({"report": str(path), "bytes": path.stat().st_size}) + "\n")
    else:
        terminal().print(f"the report is {path}, {path.stat().st_size / 1e6:.1f} MB: open it in a browser")
    return 0
