"""Arguments that several commands share, how their values are read, and which of them exclude each other."""

from __future__ import annotations

import argparse
import ast
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from intertwine.errors import InputError, did_you_mean

MODEL = (
    "path/to/file.py:factory, timm:NAME, torchvision:NAME, hf:CONFIG (a transformers model type or a config.json), or "
    "zoo:NAME (such as zoo:myrtle)"
)
ZOO = " A network is also named by the folder of a zoo and a seed: zoos/myrtle:3."
#: The meaning of the exit code 1 for commands that certify a symmetry, and for all others.
CERTIFICATE = "the certificate fails"
FAULT = "a fault in intertwine itself, shown with a traceback: please report it"


# -- Groups of arguments -----------------------------------------------------------------------------------------------


def add_model(command: ArgumentParser) -> None:
    """The arguments for one model."""
    command.add_argument("model", metavar="MODEL", help=MODEL)
    command.add_argument("--weights", metavar="FILE", help="a checkpoint: safetensors, or a torch.save file of tensors")
    add_input(command)


def add_pair(command: ArgumentParser) -> None:
    """The arguments for two models."""
    command.add_argument("first", metavar="A", help=MODEL)
    command.add_argument("second", metavar="B", help="likewise")
    command.add_argument("--weights", metavar="FILE", help="a checkpoint of A")
    command.add_argument("--weights-b", metavar="FILE", help="a checkpoint of B")


def add_input(command: ArgumentParser) -> None:
    """The example inputs of a model."""
    command.add_argument(
        "--input", metavar="SHAPE", action="append", default=[],
        help="an example input such as 1x3x224x224, int:1x16 for integer ids, NAME=SHAPE by keyword; repeat it for "
        "several inputs. Found automatically for timm, torchvision, hf and zoo, and through a function "
        "example_inputs() in your file",
    )  # fmt: skip


def add_data(command: ArgumentParser, samples: str, default: str | None = None, needed: bool = False) -> None:
    """A data set of images; `samples` describes the images whose number --samples limits."""
    words = "a data set: digits, mnist, fashion-mnist, cifar10 or folder:PATH"
    words += f" (default: {default})" if default else ""
    command.add_argument("--data", metavar="NAME", default=default, required=needed, help=words)
    command.add_argument("--data-folder", metavar="DIR", help="the folder of the data set (default: INTERTWINE_DATA)")
    command.add_argument("--samples", metavar="N", type=positive, default=1000, help=f"{samples} (default 1000)")
    command.add_argument("--batch", metavar="N", type=positive, default=250, help="images per batch (default 250)")


def add_device(command: ArgumentParser) -> None:
    """The device to compute on."""
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")


def add_json(command: ArgumentParser) -> None:
    """JSON instead of text."""
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def add_exit_codes(command: ArgumentParser, one: str = FAULT) -> None:
    """The last line of a command's help; `one` is the meaning of its exit code 1."""
    command.epilog = (
        f"Exit code: 0 done; 1 {one}; 2 not carried out, standard error says why and what to do; 130 stopped by hand."
    )


def add_method(command: ArgumentParser, methods: str) -> None:
    """The alignment method and its options."""
    command.add_argument("--method", metavar="NAME", default="weights", help=methods)
    command.add_argument(
        "--option", metavar="NAME=VALUE", action="append", default=[], help="an option of the method; repeatable"
    )
    command.add_argument("--seed", metavar="N", type=whole, default=0, help="the seed of the search (default 0)")


# -- Reading values ----------------------------------------------------------------------------------------------------


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


def number_list(flag: str, text: str, example: str) -> list[float]:
    """Numbers with commas between them.

    >>> number_list("--rotation", "0,0.5,1", "0,1")
    [0.0, 0.5, 1.0]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"{flag} {text!r} is not a list of numbers. Write them with commas between, such as {example}."
        ) from error


def parse_option(text: str) -> tuple[str, Any]:
    """`width=64`, `norm=False`, `widths=[8,16]`, `activation=tanh`.

    >>> parse_option("width=64"), parse_option("activation=tanh")
    (('width', 64), ('activation', 'tanh'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--option {text!r} is not of the form NAME=VALUE. Write it such as width=64.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def method_options(method: str, texts: Sequence[str]) -> dict[str, Any]:
    """The options of an alignment method by name; those that the method does not accept are refused.

    >>> method_options("weights", ["relative=True"])
    {'relative': True}
    """
    from intertwine.align.align import SOLVERS

    given = dict(map(parse_option, texts))
    if method in SOLVERS:
        SOLVERS[method].settings(method, given)
    return given


# -- Refusing combinations ---------------------------------------------------------------------------------------------


def unknown_value(flag: str, value: object, known: Iterable[str]) -> str:
    """The message for a value that is none of the choices.

    >>> unknown_value("--fit", "tusk", ["direct", "task"])
    "Unknown value 'tusk' for --fit. Did you mean 'task'? Choose one of: direct, task."
    """
    known = list(known)
    return f"Unknown value {value!r} for {flag}. {did_you_mean(str(value), known)}Choose one of: {', '.join(known)}."


def given_flags(options: Namespace, names: Iterable[str]) -> list[str]:
    """Those of some options that were given, as flags.

    >>> given_flags(Namespace(max_ratio=0.5, beta=None, bias=False), ["max_ratio", "beta", "bias"])
    ['--max-ratio', '--no-bias']
    """
    named = [name for name in names if getattr(options, name) not in (None, [])]
    return [f"--{'no-' if getattr(options, name) is False else ''}{name.replace('_', '-')}" for name in named]


def refuse_together(options: Namespace, *names: str, reason: str = "") -> None:
    """Refuse options of which only one can be given; `reason` ends the first sentence."""
    flags = given_flags(options, names)
    if len(flags) > 1:
        raise InputError(f"{flags[0]} and {flags[1]} cannot be given together{reason}. Leave one of them out.")


def require_data(options: Namespace, what: str) -> None:
    """Refuse a request that needs images where there are none; `what` begins the message."""
    if options.data is None:
        raise InputError(f"{what}, and no data is given. Add --data NAME, such as --data digits.")


def require_method_data(options: Namespace) -> None:
    """Refuse an alignment method that needs images where there are none."""
    from intertwine.align.align import SOLVERS

    if options.method in SOLVERS and SOLVERS[options.method].needs_data:
        require_data(options, f"The method {options.method!r} compares activations on data")
