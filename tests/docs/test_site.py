"""The site: pages are filled from the sources, commands and blocks on them run."""

from __future__ import annotations

import argparse
import doctest
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import DOCS, script

import intertwine
from intertwine.cli import main, parser
from intertwine.graph import builder
from intertwine.measure import measure as measures

# -- The site's pages --


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
    for word in ("```python\n", "## Output", "## Main options"):
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
    homes = {home.removeprefix("lab.").partition(".")[0] for home in names.FURTHER}
    assert sorted(rooms) == sorted(homes.union(names.rooms()))
    written = "\n".join(names.reference(room) for room in rooms)
    for name in intertwine._HOMES:
        assert len(re.findall(rf"^\.\. auto\w+:: intertwine::{name}$", written, re.M)) == 1, name
    shown = ["lab.zoo::train", "lab.study::run", "lab.report::write"]
    shown += ["testing::check_measure", "align.align::Alignment"]
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
    assert "## The average of the weights fails" in text
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


# -- Every command that README, CONTRIBUTING and the pages show can be given --


ROOT = DOCS.parent
PAGES_DOCS_COMMANDS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
#: In the text: `intertwine align A B --data digits`; with "…" or a bare `intertwine demo` it is prose about commands.
INLINE = re.compile(r"`(intertwine [a-z][^`…|]*)`")
each_page = pytest.mark.parametrize("page", PAGES_DOCS_COMMANDS, ids=lambda page: page.relative_to(ROOT).as_posix())
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
    found = [command for page in PAGES_DOCS_COMMANDS for command in commands(page.read_text(encoding="utf-8"))]
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
    for named in re.findall(r"(?:^|`|    )python ((?:bench|docs|examples|experiments)/\S+?\.py)", text, re.M):
        assert (ROOT / named).is_file(), named
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    shown = "\n".join([block for kind, block in FENCED.findall(text) if not kind])
    named = re.findall(r"^make ([a-z-]+)", shown, re.M) + re.findall(r"`make ([a-z-]+)", text)
    assert set(named) <= known, "a target that the Makefile lacks"


# -- Every Python block and every command of the new pages runs, in the order in which a reader meets --


BLOCK = re.compile(r"^```(python|)\n(.*?)^```$", re.M | re.S)
NAMED = re.compile(r'"""(\w+\.py)"""\n')
VERBS_SITE_PAGES = (
    "inspect canonicalize align merge barrier compare stitch fold dissect zoo reproduce"  # study and report: together
)
PAGES_SITE_PAGES = [
    *(
        f"verbs/{name}.md"
        for name in "inspect canonicalize align merge barrier compare stitch fold dissect zoo".split()
    ),
    "quickstart.md",
    "bring-your-own-measure.md",
    "cluster.md",
]
#: Page → what it says, and whether the names that it leaves behind bear it out.
CLAIMS: dict[str, dict[str, Callable[[dict[str, Any]], Any]]] = {
    "verbs/inspect.md": {"the symmetry is certified": lambda n: n["certificate"].ok},
    "verbs/canonicalize.md": {"one network, and another": lambda n: n["same"] is not None and n["other"] is None},
    "verbs/align.md": {"nearer than before": lambda n: n["found"].after < n["found"].before},
    "verbs/merge.md": {
        "better than the plain mean": lambda n: n["merged"].scores[0].error < n["merged"].scores[1].error
    },
    "verbs/barrier.md": {"lower after alignment": lambda n: n["after"].error_barrier < n["before"].error_barrier},
    "verbs/stitch.md": {"a small penalty": lambda n: n["one"].penalty < 0.1},
    "verbs/fold.md": {"a quarter": lambda n: 0.2 < n["small"].parameters.share <= 0.25},
    "quickstart.md": {"the twin is the model": lambda n: n["it"].equivalent(n["model"], n["twin"], n["x"]) is not None},
}


def blocks(page: str) -> list[tuple[str, str]]:
    """Kind and text of what can be run on a page."""
    return [(kind or "commands", text) for kind, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))]


def words(command: str) -> list[str]:
    return re.sub(r"\s+#.*", "", command).split()[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages say they are read: with examples/, and the networks that the first page of commands trains."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(DOCS.parent / "examples", place / "examples")
    plan = place / "examples" / "digits-study.toml"
    parts = plan.read_text(encoding="utf-8").split("[[parts]]")
    plan.write_text("[[parts]]".join(parts[:4]), encoding="utf-8")  # three verbs show that it runs; all take too long
    ((_, command),) = blocks("verbs/index.md")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(words(command)) == 0
    return place


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader in that folder; what the pages register and import is forgotten afterwards."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield
    measures._MAKERS.pop("dimension_ratio", None)
    builder._RULES.pop("mylib.soft_clip", None)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("examples", "my_measure")]:
        del sys.modules[name]


def read(page: str) -> dict[str, Any]:
    """Run a page from top to bottom; gives the names that its Python leaves."""
    names: dict[str, Any] = {}
    for kind, text in blocks(page):
        if kind == "python":
            named = NAMED.match(text)
            if named:
                Path(named[1]).write_text(text, encoding="utf-8")
            exec(compile(text, named[1] if named else page, "exec"), names)
        else:
            for line in text.splitlines():
                assert line.startswith("intertwine "), line
                assert main(words(line)) == 0, line
    return names


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES_SITE_PAGES)
def test_everything_on_the_page_runs(page: str, reader: None) -> None:
    assert len(blocks(page)) > 0
    names = read(page)
    for claim, holds in CLAIMS.get(page, {}).items():
        assert holds(names), claim


@pytest.mark.usefixtures("one_thread")
def test_a_study_and_its_report(reader: None, folder: Path) -> None:
    study = read("verbs/study.md")["study"]
    assert (study.run, study.errors) == (0, {}), "the Python call goes on where the command was"
    read("verbs/report.md")
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("one_thread")
def test_the_frozen_layer_of_your_own_model_is_told(reader: None, capsys: pytest.CaptureFixture[str]) -> None:
    read("bring-your-own-model.md")
    shown = capsys.readouterr().out
    assert re.search(r"second\.weight axis 0: .*cumsum", shown)


@pytest.mark.usefixtures("one_thread")
def test_a_page_that_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DOCS", tmp_path)
    (tmp_path / "wrong.md").write_text("```python\nimport intertwine as it\n\nit.alignn\n```\n")
    with pytest.raises(AttributeError, match="alignn"):
        read("wrong.md")
    (tmp_path / "wrong.md").write_text("```\nintertwine inspect nothing.py:net\n```\n")
    with pytest.raises(AssertionError, match=r"nothing\.py"):
        read("wrong.md")
