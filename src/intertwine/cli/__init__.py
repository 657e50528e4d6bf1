"""The command line, `intertwine COMMAND …`: parses the arguments, runs one command and returns its exit code.

Only the file of the command that was named is loaded, and torch only by its work.
"""

from __future__ import annotations

import argparse
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from intertwine.cli.arguments import add_exit_codes
from intertwine.errors import IntertwineError, did_you_mean
from intertwine.version import VERSION

# ----------------------------------------------------------------------------------------------------
# Standard output of the program: it takes any text, and its failures are told from those of other files and pipes.


class OutputLost(Exception):
    """Standard output takes nothing more, for the reason in `args[0]`. No OSError, which others handle."""


class GuardedStream:
    """A stream whose writes raise `OutputLost` where they fail; in all else the stream itself."""

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
    """Within it, standard output and error are there and take any text; what they cannot show is a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the program
            setattr(sys, name, null_stream())
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    before = sys.stdout
    watched: Any = GuardedStream(before)
    sys.stdout = watched
    try:
        yield
    finally:
        if sys.stdout is watched:
            sys.stdout = before


def null_stream() -> TextIOWrapper:
    """A stream that takes everything, until the program ends."""
    return open(os.devnull, "w", encoding="utf-8")


def add_arguments(name: str, command: ArgumentParser) -> None:
    """Give the parser of a command its arguments.

    >>> parser = ArgumentParser()
    >>> add_arguments("report", parser)
    >>> parser.parse_args(["studies/mine"]).folder
    'studies/mine'
    """
    import_module(f"{__name__}.{name}").add(command)


# ----------------------------------------------------------------------------------------------------
# The command line: `intertwine COMMAND …`. Arguments are read first; torch is loaded by the command that needs it.


#: Packages that commands need beyond the core, and the extra of intertwine that installs each.
EXTRAS = {"rich": "cli", "sklearn": "data", "PIL": "data", "matplotlib": "plot", "polars": "frames"}
#: Every command and what it is for: `cli/NAME.py` holds its arguments and its work.
COMMANDS = {
    "inspect": "what is the symmetry of this network, and does it hold?",
    "canonicalize": "its canonical form; which checkpoints are the same?",
    "compare": "how similar are the layers of two networks, on real data?",
    "align": "move one network onto another by a symmetry of both",
    "barrier": "how much worse are the networks between two networks?",
    "merge": "one network out of several: aligned, averaged, mended",
    "stitch": "join the front of one network to the back of another",
    "fold": "merge features that are nearly the same: a smaller network",
    "dissect": "which concepts do single units stand for, in which basis?",
    "zoo": "train networks from many seeds at once; list and test them",
    "study": "many networks, pairs, layers and verbs: one plan, one table",
    "reproduce": "tables and figures of the papers, beside the printed ones",
    "report": "the results of a study as one HTML page",
    "demo": "the whole story on real handwritten digits, in under two minutes",
}

#: Commands that keep what they have done.
RESUMABLE = ("demo", "reproduce", "study run", "zoo train")


class Parser(argparse.ArgumentParser):
    """Help that ends with the exit codes, and refusals in our words. Sub-commands are of the same class.

    What was parsed says by `.parser` which sub-command was reached last: its usage is shown, or its help where it is a
    group of commands and none of these was named.
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
        """As usual, but what is not understood is told with the usage of the command it was given to."""
        options, left = self.parse_known_args(args, namespace)
        if left:
            flags = [flag for action in options.parser._actions for flag in action.option_strings]
            near = "".join(did_you_mean(word, flags) for word in left if word.startswith("--")).rstrip()
            options.parser.error(f"not understood: {' '.join(left)}. {near}".rstrip())
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A word that is none of the choices."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            said = f"there is no {value!r}. {did_you_mean(str(value), known)}Choose one of {', '.join(known)}"
            raise argparse.ArgumentError(action, said)


def parser() -> Parser:
    """All commands and their options."""
    top = Parser("intertwine", description="Find, prove and use the symmetries of any PyTorch network.")
    add_exit_codes(top, "the answer is no, or some of the work failed: see the help of the command")
    top.add_argument("--version", action="version", version=f"intertwine {VERSION}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, purpose in COMMANDS.items():
        add_arguments(name, commands.add_parser(name, help=purpose))
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Without one, the commands that there are."""
    with guarded_streams():
        try:
            code = _run(parser().parse_args(argv))
            sys.stdout.flush()
            return code
        except OutputLost as lost:
            sys.stdout = null_stream()  # what is left would fail again
            reason = lost.args[0]
            if isinstance(reason, BrokenPipeError):  # the reader of a pipe has seen enough
                return 0
            return _fail(f"The answer could not be written to standard output: {reason.strerror}.")


def _run(options: argparse.Namespace) -> int:
    if options.parser.groups:
        options.parser.print_help()
        return 0
    try:
        return import_module(f"intertwine.cli.{options.command}").run(options)
    except IntertwineError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _fail(f"This command needs the package {error.name}: pip install 'intertwine[{EXTRAS[error.name]}]'.")
    except KeyboardInterrupt:
        goes_on = options.parser.prog.removeprefix("intertwine ") in RESUMABLE
        print(f"intertwine: stopped{'; the same command goes on from here' if goes_on else ''}", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(f"intertwine: {message}", file=sys.stderr)
    return 2
