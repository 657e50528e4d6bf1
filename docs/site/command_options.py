"""The options of a command as a table for its page, read off the parser of the command line."""

from __future__ import annotations

import argparse

from intertwine.cli import parser

Command = argparse.ArgumentParser


def option_tables(name: str) -> str:
    """Tables for a command; where it has commands of its own (`zoo`), one for each, under a heading.

    >>> option_tables("report").splitlines()[2]
    '| `FOLDER` | the folder of the study, as `intertwine study run` names it |'
    """
    command = find(name)
    inner = commands_of(command)
    if not inner:
        return table(command)
    return "\n\n".join(f"### {name} {verb}\n\n{_about(own)}{table(own)}" for verb, own in inner.items())


def find(name: str) -> Command:
    """The parser of a command, such as `align` or `zoo train`."""
    found = parser()
    for word in name.split():
        found = commands_of(found)[word]
    return found


def commands_of(command: Command) -> dict[str, Command]:
    """The commands of a command, by name; empty for most."""
    groups = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(groups[0].choices) if groups else {}


def table(command: Command) -> str:
    """One row per argument, in the order of the parser; `--help` itself is left out."""
    rows = ["| argument | meaning |", "|---|---|"]
    for action in command._actions:
        if not isinstance(action, argparse._HelpAction):
            rows.append(f"| `{_spelling(action)}` | {_cell(action.help or '')} |")
    return "\n".join(rows)


def _spelling(action: argparse.Action) -> str:
    """`--samples N`, `--fit direct,task,both`, `--certify, --no-certify`, `MODEL`."""
    choices = ",".join(map(str, action.choices)) if action.choices else ""
    value = str(action.metavar or (f"{{{choices}}}" if choices else action.dest.upper()))
    if not action.option_strings:
        return value
    flags = ", ".join(action.option_strings)
    return _cell(flags if action.nargs == 0 else f"{flags} {value}")


def _about(command: Command) -> str:
    return f"{command.description}\n\n" if command.description else ""


def _cell(text: str) -> str:
    """Text that may stand in a table: argparse writes %% for %, and a bar would end the cell."""
    return " ".join(text.replace("%%", "%").replace("|", "\\|").split())
