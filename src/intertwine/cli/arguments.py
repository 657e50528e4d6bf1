"""Arguments that several commands share, and the parsing of NAME=VALUE options."""

from __future__ import annotations

import argparse
import ast
from argparse import ArgumentParser
from collections.abc import Sequence
from math import isfinite
from typing import Any

from intertwine.errors import InputError

# ----------------------------------------------------------------------------------------------------
# Arguments that several commands share.


MODEL = (
    "path/to/file.py:factory, timm:NAME, torchvision:NAME, hf:CONFIG (a transformers model type or a config.json), or "
    "zoo:NAME (such as zoo:myrtle)"
)
#: When a command that proves a symmetry has the exit code 1.
CERTIFICATE = "the certificate fails"
#: When any other has it.
FAULT = "a fault in intertwine itself, told with a traceback: please report it"
ZOO = " A network is also named by a zoo's folder and a seed: zoos/myrtle:3."


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write one such as 3") from error


def positive(text: str) -> int:
    """A whole number from 1."""
    found = whole(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return found


def number(text: str) -> float:
    """A finite number."""
    try:
        found = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write one such as 0.5") from error
    if not isfinite(found):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number; write one such as 0.5")
    return found


def add_model(command: ArgumentParser) -> None:
    """How a command is given one model."""
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument("--weights", metavar="FILE", help="a checkpoint: safetensors, or a torch.save file of tensors")
    add_input(command)


def add_pair(command: ArgumentParser) -> None:
    """How a command is given two."""
    command.add_argument("first", metavar="A", help=MODEL)
    command.add_argument("second", metavar="B", help="likewise")
    command.add_argument("--weights", metavar="FILE", help="a checkpoint of A")
    command.add_argument("--weights-b", metavar="FILE", help="a checkpoint of B")


def add_input(command: ArgumentParser) -> None:
    """How a command is told what a model is called with."""
    command.add_argument(
        "--input",
        metavar="SHAPE",
        action="append",
        default=[],
        help="an example input such as 1x3x224x224, int:1x16 for integer ids, NAME=SHAPE by keyword; repeat it for "
        "several inputs. Found automatically for timm, torchvision, hf and zoo, and through a function "
        "example_inputs() in your file",
    )


def add_data(command: ArgumentParser, samples: str, default: str | None = None, needed: bool = False) -> None:
    """How a command is given images; `samples` says what they are for, which a number limits."""
    words = "a data set: digits, mnist, fashion-mnist, cifar10 or folder:PATH"
    words += f" (default: {default})" if default else ""
    command.add_argument("--data", metavar="NAME", default=default, required=needed, help=words)
    command.add_argument("--data-folder", metavar="DIR", help="where it is (default: INTERTWINE_DATA)")
    command.add_argument("--samples", metavar="N", type=positive, default=1000, help=f"{samples} (default 1000)")
    command.add_argument("--batch", metavar="N", type=positive, default=250, help="images at once (default 250)")


def add_device(command: ArgumentParser) -> None:
    """How a command is told where to compute."""
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")


def add_json(command: ArgumentParser) -> None:
    """How a command is asked for JSON."""
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def add_exit_codes(command: ArgumentParser, one: str = FAULT) -> None:
    """What a command's help ends with; `one` says when its exit code is 1."""
    command.epilog = (
        f"Exit code: 0 done; 1 {one}; 2 not carried out, standard error says why and what to do; 130 stopped by hand."
    )


def add_method(command: ArgumentParser, methods: str) -> None:
    """How a command is told by which method to align."""
    command.add_argument("--method", metavar="NAME", default="weights", help=methods)
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="of the method; repeat it for several"
    )
    command.add_argument("--seed", metavar="N", type=whole, default=0, help="of the search (default 0)")


# ----------------------------------------------------------------------------------------------------
# What a user writes on the command line, read: options.


def parse_option(text: str) -> tuple[str, Any]:
    """`width=64`, `norm=False`, `widths=[8,16]`, `activation=tanh`.

    >>> parse_option("width=64"), parse_option("activation=tanh")
    (('width', 64), ('activation', 'tanh'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"The option {text!r} was given. Write NAME=VALUE, such as width=64.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# ----------------------------------------------------------------------------------------------------
# Options of an alignment method, as written on the command line.


def method_options(method: str, texts: Sequence[str]) -> dict[str, Any]:
    """The options by name, refused at once where the method would refuse them.

    >>> method_options("weights", ["relative=True"])
    {'relative': True}
    """
    from intertwine.align.align import SOLVERS

    given = dict(map(parse_option, texts))
    if method in SOLVERS:
        SOLVERS[method].settings(method, given)
    return given
