"""The site's pages: every command and public name is on one, what is filled in is what the code says, links lead on.

The site itself is built by `make site`, which fails on warnings; that takes too long for every test run.
"""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pages import DOCS, script

import intertwine
from intertwine.cli import parser

SITE = DOCS / "site"
VERBS = "inspect canonicalize align merge barrier compare stitch fold dissect zoo study report".split()
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of docs/site find each other, as they do when Sphinx runs."""
    monkeypatch.syspath_prepend(str(SITE))


def part(name: str) -> ModuleType:
    return script(name, SITE)


@pytest.mark.parametrize("name", sorted(file.stem for file in SITE.glob("*.py")))
def test_the_examples_of_the_parts_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = part(name)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tried = doctest.testmod(module)
    assert tried.failed == 0
    assert tried.attempted > 0


# -- commands ----------------------------------------------------------------------------------------------------------


def test_every_command_has_a_page_that_asks_for_its_options() -> None:
    commands = set(part("command_options").commands_of(parser())) - {"demo"}
    assert set(VERBS) <= commands
    written = {file.stem for file in (DOCS / "verbs").glob("*.md")}
    assert commands | {"index"} == written, "a command without a page, or a page without a command"
    for name in commands:
        page = (DOCS / "verbs" / f"{name}.md").read_text(encoding="utf-8")
        for word in (f"<!-- fill options: {name} -->", "Exit code", "--json", "```\nintertwine "):
            assert word in page, (name, word)
        assert f"[{name}]({name}.md)" in (DOCS / "verbs" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_its_python_and_its_meaning(name: str) -> None:
    page = (DOCS / "verbs" / f"{name}.md").read_text(encoding="utf-8")
    for word in ("```python\n", "## What it says", "## Options that matter"):
        assert word in page, word


def test_every_command_takes_json() -> None:
    options = part("command_options")
    for name, command in options.commands_of(parser()).items():
        for own in options.commands_of(command).values() or [command]:
            assert "--json" in own.format_help(), f"docs/verbs/index.md says that every command does: {name}"


@pytest.mark.parametrize("name", [*VERBS, "zoo train", "study run"])
def test_every_option_is_in_the_table(name: str) -> None:
    options = part("command_options")
    table = options.option_tables(name)
    found = [options.find(name), *options.commands_of(options.find(name)).values()]
    flags = {flag for command in found for action in command._actions for flag in action.option_strings}
    assert len(flags) > 2
    for flag in flags - {"-h", "--help"}:
        assert re.search(rf"`[^`]*{flag}\b", table), flag
    assert all(line.count(" | ") == 1 for line in table.splitlines() if line.startswith("| `"))


def test_options_named_on_a_page_exist() -> None:
    options = part("command_options")
    for file in (DOCS / "verbs").glob("*.md"):
        if file.stem == "index":
            continue
        known = options.option_tables(file.stem)
        for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", file.read_text(encoding="utf-8"))):
            assert re.search(rf"{flag}\b", known), f"{file.name} names {flag}, which the command does not have"


# -- the reference -----------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference_once() -> None:
    names = part("public_names")
    asked = [re.findall(r"^<!-- fill reference: (\w+) -->$", page.read_text("utf-8"), re.M) for page in PAGES]
    rooms = [room for found in asked for room in found]
    assert sorted(rooms) == sorted({*names.rooms(), *(home.partition(".")[0] for home in names.FURTHER)})
    written = "\n".join(names.reference(room) for room in rooms)
    for name in intertwine._HOMES:
        assert len(re.findall(rf"^\.\. auto\w+:: intertwine::{name}$", written, re.M)) == 1, name
    shown = ["zoo::train", "study::run", "report::write", "testing::check_measure", "align.alignment::Alignment"]
    for name in [*shown, *(f"{home}::{name}" for home, found in names.FURTHER.items() for name in found)]:
        assert f":: intertwine.{name}\n" in written, name
    every = re.findall(r"^\.\. auto\w+:: (\S+)$", written, re.M)
    assert len(every) == len(set(every))


# -- what is filled in -------------------------------------------------------------------------------------------------


def test_pages_ask_only_for_what_there_is() -> None:
    fill = part("fill_pages").fill
    for page in PAGES:
        assert "<!-- fill" not in fill(page.read_text(encoding="utf-8")), page.name
    with pytest.raises(ValueError, match="there is no 'option', only options, reference, notebook"):
        fill("<!-- fill option: align -->")


def test_a_script_becomes_text_and_code() -> None:
    made = part("percent_script").as_markdown("merge_models")
    text = re.sub(r"```python\n.*?```", "", made, flags=re.S)
    code = "\n".join(re.findall(r"```python\n(.*?)```", made, re.S))
    assert "## The plain mean fails" in text
    assert not re.search("^# ?%%", made, re.M)
    assert "it.merge([a, b], x, data=train)" in code
    source = (DOCS.parent / "examples" / "merge_models.py").read_text(encoding="utf-8")
    cells = source[source.index("\n# %%") :]
    expected = [line for line in cells.splitlines() if line and not line.startswith("#")]
    assert expected == [line for line in code.splitlines() if line], "every line of code is there, in its order"


def test_docstrings_are_made_readable() -> None:
    pytest.importorskip("sphinx")
    lines = ["Args:", "    x, y: what", "    goes on.", "    *args, **kwargs: inputs.", ""]
    lines += ["Example:", "    >>> f(*args)", "    `*args` is code"]
    lines += ["Raises:", "    InputError: no. MismatchError: it does", "    not fit."]
    script("conf").readable(None, "", "", None, None, lines)
    assert lines[:4] == ["Args:", "    x, y: what", "        goes on.", r"    \*args, \*\*kwargs: inputs."]
    assert lines[6:8] == ["    >>> f(*args)", "    `*args` is code"]
    assert lines[-1] == "        not fit."


# -- without a network -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://cdn.example/a.js"></script>',
        "<link rel=stylesheet href=//fonts.example/f.css>",
        "<img alt='' src='http://pictures.example/p.png'>",
        "@font-face { src: url(https://fonts.example/f.woff2) }",
        '@import "https://styles.example/s.css";',
    ],
)
def test_what_comes_from_elsewhere_is_seen(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(text)
    assert list(part("offline").outside(tmp_path)) == ["index.html"]


def test_links_for_the_reader_may_lead_out(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="https://example.com">x</a><script src="_static/a.js"></script>')
    assert part("offline").outside(tmp_path) == {}
    with pytest.raises(SystemExit, match="Build the site first"):
        part("offline").outside(tmp_path / "nothing")


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (page.parent / target).exists(), target
