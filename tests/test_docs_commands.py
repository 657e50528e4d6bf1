"""Every command that README, CONTRIBUTING and the pages show can be given: sub-command, arguments and options exist.

Nothing is run here; the pages for newcomers are run by test_site_pages.py. Python blocks must compile.
"""

from __future__ import annotations

import argparse
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from pages import DOCS

from intertwine.cli import parser

ROOT = DOCS.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
#: In the text: `intertwine align A B --data digits`; with "…" or a bare `intertwine demo` it is prose about commands.
INLINE = re.compile(r"`(intertwine [a-z][^`…|]*)`")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
program = cache(parser)  # built once; parsing leaves it as it is


def commands(text: str) -> list[str]:
    """Every line that begins with `intertwine`, in a block or indented, and what stands in backticks in a sentence.

    >>> commands("Run `intertwine zoo list`:\\n```\\nintertwine inspect a.py:net  # why\\n```\\n")
    ['intertwine inspect a.py:net', 'intertwine zoo list']
    """
    blocks = [block for kind, block in FENCED.findall(text) if not kind]
    prose = FENCED.sub("", text)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line for line in prose.splitlines() if line.startswith("    ")]
    shown = [re.sub(r"\s+#.*", "", line.strip()) for line in lines]
    return [line for line in shown if line.startswith("intertwine ")] + INLINE.findall(prose.replace("\n", " "))


def problem(command: str) -> str | None:
    """What the real parser says against a command; None where it takes it, or where the rest is left to the reader."""
    try:
        program().parse_args(shlex.split(command)[1:])
    except (argparse.ArgumentError, SystemExit) as error:
        return str(error)
    return None


def wrong_words(command: str) -> list[str]:
    """Sub-commands and options of a command in prose that do not exist; it may leave arguments out."""
    found, current = [], program()
    for word in shlex.split(command)[1:]:
        groups = [action for action in current._actions if isinstance(action, argparse._SubParsersAction)]
        if word.startswith("--"):
            flag = word.partition("=")[0]
            if not any(flag in action.option_strings for action in current._actions):
                found.append(flag)
        elif groups:
            if word not in groups[0].choices:
                return [*found, word]
            current = groups[0].choices[word]
    return found


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """The parser prints its usage; only its verdict counts."""


@each_page
def test_every_command_is_one_that_the_program_takes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    inline = set(INLINE.findall(FENCED.sub("", text).replace("\n", " ")))
    for command in commands(text):
        assert not wrong_words(command), (page.name, command, wrong_words(command))
        if command not in inline:
            assert problem(command) is None, (page.name, command)


@each_page
def test_every_python_block_compiles(page: Path) -> None:
    for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            compile(block, str(page), "exec")


def test_there_are_many_to_check() -> None:
    found = [command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))]
    assert len(found) > 80
    assert {command.split()[1] for command in found} >= {"inspect", "align", "zoo", "study", "reproduce", "demo"}


@pytest.mark.parametrize(
    "wrong",
    [
        "intertwine alin a b",
        "intertwine align a b --dat digits",
        "intertwine zoo trian mlp",
        "intertwine inspect a --nw",
    ],
)
def test_a_wrong_command_is_seen(wrong: str) -> None:
    assert wrong_words(wrong)
    assert commands(f"```\n{wrong}\n```\n") == commands(f"say `{wrong}` there") == [wrong]


def test_a_missing_argument_is_seen() -> None:
    assert not wrong_words("intertwine align a")
    assert problem("intertwine align a") is not None
    assert problem("intertwine align a b") is None


@each_page
def test_scripts_and_targets_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for script in re.findall(r"(?:^|`|    )python ((?:bench|docs|examples|experiments)/\S+?\.py)", text, re.M):
        assert (ROOT / script).is_file(), script
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    shown = "\n".join([block for kind, block in FENCED.findall(text) if not kind])
    named = re.findall(r"^make ([a-z-]+)", shown, re.M) + re.findall(r"`make ([a-z-]+)", text)
    assert set(named) <= known, "a target that the Makefile lacks"
