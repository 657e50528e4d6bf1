"""Arguments of `intertwine reproduce`."""

from __future__ import annotations

from argparse import ArgumentParser

from intertwine.commands.arguments.shared import add_device, add_json

SCALES = ("paper", "gpu", "cpu")


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Carry out experiments of the papers and show their numbers beside the printed ones. Networks and what was "
        "found are kept in the folder; a run that was stopped goes on when the same command is given again."
    )
    command.add_argument(
        "names", metavar="NAME", nargs="*", help="of experiments, see --list; or all, or a plan's file"
    )
    command.add_argument(
        "--scale", choices=SCALES, default="paper",
        help="as printed (default), minutes on one GPU, or seconds on digits to see that it works",
    )  # fmt: skip
    command.add_argument("--list", action="store_true", help="show all experiments, what they need and what they cost")
    command.add_argument(
        "--out", metavar="DIR", default="out/reproduce", help="of networks, results and figures (default out/reproduce)"
    )
    command.add_argument("--results", metavar="PATH", help="a folder for result files, or the file of one experiment")
    command.add_argument("--data-folder", metavar="DIR", help="where data sets are (default: INTERTWINE_DATA)")
    add_device(command)
    command.add_argument("--plot", metavar="FILE", help="the figure of one experiment, .svg or .png")
    command.add_argument("--draw", metavar="RESULT", help="run nothing: show and draw a result that was written before")
    add_json(command)
