"""What each command is told: one file per command, named after it, and what several share. None of them loads torch."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib import import_module


def add_arguments(name: str, command: ArgumentParser) -> None:
    """Give the parser of a command its arguments.

    >>> parser = ArgumentParser()
    >>> add_arguments("report", parser)
    >>> parser.parse_args(["studies/mine"]).folder
    'studies/mine'
    """
    import_module(f"{__name__}.{name}").add(command)
