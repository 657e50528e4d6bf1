"""The command line, `intertwine COMMAND …`: parses the arguments, runs one command and returns its exit code.

Only the file of the command that was named is imported, and torch only when the command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from intertwine.cli.arguments import add_exit_codes, unknown_value
from intertwine.errors import IntertwineError, did_you_mean
from intertwine.version import VERSION

#: Packages that commands need beyond the core, and the extra of intertwine that installs each.
EXTRAS = {"rich": "cli", "sklearn": "data", "PIL": "data", "matplotlib": "plot", "polars": "frames"}
#: Every command and its purpose; `cli/NAME.py` defines `add(parser)` and `run(options)`.
COMMANDS = {
    "inspect": "find the symmetry of a network and certify it",
    "canonicalize": "bring a network to its canonical form; find duplicate checkpoints",
    "compare": "measure how similar the layers of two networks are on real data",
    "align": "move one network onto another by a symmetry of both",
    "barrier": "measure loss and error on the line between two networks",
    "merge": "merge several networks into one: align, average, repair",
    "stitch": "join the front of one network to the back of another",
    "fold": "merge nearly equal features into a smaller network",
    "dissect": "find the concepts that units respond to, in several bases",
    "zoo": "train networks from many seeds at once; list and evaluate them",
    "study": "run many networks, pairs, layers and verbs from one plan into one table",
    "reproduce": "run experiments of the papers and compare with the printed numbers",
    "report": "write the results of a study as one HTML page",
    "demo": "run everything on real handwritten digits, in under two minutes",
}
#: Commands that resume where they were stopped.
RESUMABLE = ("demo", "reproduce", "study run", "zoo train")


# -- Standard output ---------------------------------------------------------------------------------------------------


class OutputLost(Exception):
    """Standard output cannot be written, for the reason in `args[0]`. Not an OSError, which other code handles."""


class GuardedStream:
    """A stream that raises `OutputLost` where a write fails, and otherwise behaves as the stream itself."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            raise OutputLost(error) from error

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            raise OutputLost(error) from error


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Makes standard output and error exist and accept any text; a character they cannot encode becomes `?`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, null_stream())
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    before = sys.stdout
    guarded: Any = GuardedStream(before)
    sys.stdout = guarded
    try:
        yield
    finally:
        if sys.stdout is guarded:
            sys.stdout = before


def null_stream() -> TextIOWrapper:
    """A stream that discards everything, until the program ends."""
    return open(os.devnull, "w", encoding="utf-8")


# -- Parser ------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose help ends with the exit codes and whose errors suggest what was meant; also for sub-commands.

    The parsed options hold as `.parser` the parser of the last sub-command, whose usage an error shows.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        add_exit_codes(self)
        self.set_defaults(parser=self)

    @property
    def groups(self) -> bool:
        """Whether it only leads to other commands."""
        return any(isinstance(action, argparse._SubParsersAction) for action in self._actions)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As usual, but unknown arguments are reported with the usage of the command that they were given to."""
        options, left = self.parse_known_args(args, namespace)
        if left:
            flags = [flag for action in options.parser._actions for flag in action.option_strings]
            near = "".join(did_you_mean(word, flags) for word in left if word.startswith("--"))
            options.parser.error(f"Unknown argument {' '.join(left)}. {near}".rstrip())
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            flag = action.option_strings[0] if action.option_strings else action.metavar
            raise argparse.ArgumentError(None, unknown_value(str(flag), value, map(str, action.choices)))


def add_arguments(name: str, command: ArgumentParser) -> None:
    """Give the parser of a command its arguments.

    >>> parser = ArgumentParser()
    >>> add_arguments("report", parser)
    >>> parser.parse_args(["studies/mine"]).folder
    'studies/mine'
    """
    import_module(f"{__name__}.{name}").add(command)


def parser(named: Iterable[str] = COMMANDS) -> Parser:
    """The parser of all commands, with the arguments of those that are named."""
    top = Parser("intertwine", description="Find, prove and use the symmetries of any PyTorch network.")
    add_exit_codes(top, "the answer is no, or some of the work failed: see the help of the command")
    top.add_argument("--version", action="version", version=f"intertwine {VERSION}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        if name in named:
            add_arguments(name, command)
    return top


# -- Running a command -------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; without a command, show the help."""
    words = sys.argv[1:] if argv is None else argv
    with guarded_streams():
        try:
            code = _run(parser([word for word in words if word in COMMANDS][:1]).parse_args(words))
            sys.stdout.flush()
            return code
        except OutputLost as lost:
            sys.stdout = null_stream()  # the rest would fail again
            reason = lost.args[0]
            if isinstance(reason, BrokenPipeError):  # the reader of a pipe has closed it
                return 0
            return _fail(f"The answer cannot be written to standard output: {reason.strerror}.")


def _run(options: argparse.Namespace) -> int:
    if options.parser.groups:
        options.parser.print_help()
        return 0
    try:
        return import_module(f"{__name__}.{options.command}").run(options)
    except IntertwineError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _fail(f"This command needs the package {error.name}: pip install 'intertwine[{EXTRAS[error.name]}]'.")
    except KeyboardInterrupt:
        resumable = options.parser.prog.removeprefix("intertwine ") in RESUMABLE
        print(f"intertwine: stopped{'; the same command resumes from here' if resumable else ''}", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(f"intertwine: {message}", file=sys.stderr)
    return 2
