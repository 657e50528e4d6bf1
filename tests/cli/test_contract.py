"""What holds for every command: `--json` prints one JSON document, the exit codes mean what --help says, help is fast.

The commands are read off the parser, so that a new one is tested, or missed by name, without a change of these tests.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest

import intertwine as it
from intertwine import cli
from intertwine.cli import main, parser
from intertwine.lab.zoo.datasets.downloads import SOURCES, DownloadFile
from intertwine.symmetry.symmetry import Symmetry

pytest.importorskip("polars")
pytestmark = pytest.mark.usefixtures("one_thread")

SRC = Path(__file__).parents[2] / "src"
NET = """
import torch
from torch import nn

class net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.head = nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.relu(self.conv(x)).mean((2, 3)))

def example_inputs():
    return torch.zeros(1, 3, 32, 32)
"""
PLAN = """
name = "p"
[zoos.z]
folder = "{zoo}"
[[parts]]
verb = "{verb}"
"""
#: A call of every command that works, and is quick; --json is added. `demo` has tests of its own, it takes longer.
WORKS = {
    "inspect": "{net}",
    "canonicalize": "{net}",
    "compare": "{zoo}:0 {zoo}:1 --layer 1 --samples 50",
    "align": "{zoo}:0 {zoo}:1 --starts 1 --data digits --samples 50",
    "barrier": "{zoo}:0 {zoo}:1 --points 3 --data digits --samples 50",
    "merge": "{zoo}:0 {zoo}:1 --data digits --samples 50",
    "stitch": "{zoo}:0 {zoo}:1 --at 2 --family linear --fit direct --data digits --samples 50",
    "fold": "{zoo}:0 --beta 0.5",
    "dissect": "{net} --at relu --samples 20 --rotation 0 --device cpu",
    "zoo train": "mlp --seeds 0 --epochs 1 --option widths=[64,8,10] --device cpu --out {new}",
    "zoo list": "{zoo}",
    "zoo evaluate": "{zoo} --device cpu",
    "zoo download": "mnist --folder {data}",
    "study run": "{plan} --out {new}",
    "reproduce": "--list",
    "report": "{study} --out {new}/report.html",
}
#: A call of every command that is refused: exit code 2.
REFUSED = {
    "inspect": "keras:net",
    "canonicalize": "keras:net",
    "compare": "{zoo}:0 {zoo}:99",
    "align": "{zoo}:0 {zoo}:99",
    "barrier": "{zoo}:0 {zoo}:99 --data digits",
    "merge": "{zoo}:0",
    "stitch": "{zoo}:0 {zoo}:99 --at 2 --data digits",
    "fold": "{zoo}:99",
    "dissect": "{net} --at nowhere",
    "zoo train": "nothing --out {new}",
    "zoo list": "{new}",
    "zoo evaluate": "{new}",
    "zoo download": "digits",
    "study run": "{new}",
    "reproduce": "nothing --out {new}",
    "report": "{new}",
}
#: Calls whose answer is no: exit code 1, where a command's help names such a case.
FAILS = {"inspect": "{net}", "canonicalize": "{net}", "study run": "{failing} --out {new}"}


def walk(command: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, bool]]:
    """Every parser below one, by the words that call it, and whether it is a command rather than a group of them."""
    groups = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    yield " ".join(words), not groups
    for group in groups:
        for name, child in group.choices.items():
            yield from walk(child, (*words, name))


HELPED = [words for words, _ in walk(parser())]
COMMANDS = [words for words, leaf in walk(parser()) if leaf]
TESTED = [words for words in COMMANDS if words != "demo"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the calls above name in braces: a network, a zoo, plans, a finished study, a data set that is there."""
    top = tmp_path_factory.mktemp("contract")
    (top / "net.py").write_text(NET)
    zoo = it.zoo.train("mlp", seeds=[0, 1], data="digits", out=top / "zoo", options={"widths": (64, 8, 10)}, epochs=1)
    plan, failing = top / "plan.toml", top / "failing.toml"
    plan.write_text(PLAN.format(zoo=zoo.folder, verb="accuracy"))
    failing.write_text(PLAN.format(zoo=zoo.folder, verb="fold") + "options = { at = [1e-9] }\n")
    it.study.run(plan, out=top / "study")
    (top / "file.bin").write_bytes(b"contents")
    named = {"zoo": zoo.folder, "plan": plan, "failing": failing, "study": top / "study", "data": top}
    return {name: str(path) for name, path in named.items()} | {"net": f"{top / 'net.py'}:net"}


@pytest.fixture(autouse=True)
def data_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set that is checked and not fetched."""
    sums = md5(b"contents", usedforsecurity=False).hexdigest()
    monkeypatch.setitem(SOURCES, "mnist", (DownloadFile("file.bin", sums, 8, ("http://nowhere.invalid/",)),))


def call(words: str, arguments: str, places: dict[str, str], new: Path) -> list[str]:
    return [*words.split(), *arguments.format(**places, new=new / "new").split(), "--json"]


def documents(text: str) -> list[Any]:
    """All JSON documents of a text; anything else in it is an error."""
    found, decoder = [], json.JSONDecoder(parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    while text.strip():
        value, end = decoder.raw_decode(text.lstrip())
        found.append(value)
        text = text.lstrip()[end:]
    return found


# -- one JSON document -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_json(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("words", TESTED)
def test_json_is_one_document_and_the_exit_code_0(
    words: str, places: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in WORKS, f"`intertwine {words}` is new: add a call of it that works to WORKS"
    code = main(call(words, WORKS[words], places, tmp_path))
    said = capfd.readouterr()
    assert code == 0, said.err
    assert [type(document) for document in documents(said.out)] == [dict]


def test_a_second_document_and_words_around_it_are_seen() -> None:
    assert documents('{"a": 1}\n[2]\n') == [{"a": 1}, [2]]
    with pytest.raises(json.JSONDecodeError):
        documents('reading the data\n{"a": 1}')


# -- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", HELPED)
def test_the_help_ends_with_the_exit_codes(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*words.split(), "--help"])
    assert caught.value.code == 0
    last = " ".join(capsys.readouterr().out.split("Exit code:")[-1].split())
    for part in ("0 done; 1 ", "; 2 not carried out", "; 130 stopped by hand."):
        assert part in last
    if words in FAILS:
        assert "1 a fault in intertwine itself" not in last, "its help should say what 1 means for this command"


@pytest.mark.parametrize("words", TESTED)
def test_what_is_refused_has_exit_code_2(
    words: str, places: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in REFUSED, f"`intertwine {words}` is new: add a call of it that is refused to REFUSED"
    code = main(call(words, REFUSED[words], places, tmp_path))
    said = capfd.readouterr()
    assert (code, said.out) == (2, "")
    assert "intertwine: " in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("words", ["inspect", "canonicalize", "study run"])
def test_a_no_has_exit_code_1_and_is_json_too(
    words: str,
    places: dict[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Symmetry.certify
    monkeypatch.setattr(Symmetry, "certify", lambda *args, **options: replace(honest(*args, **options), ok=False))
    assert main(call(words, FAILS[words], places, tmp_path)) == 1
    assert [type(document) for document in documents(capfd.readouterr().out)] == [dict]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_stopped_by_hand_has_exit_code_130(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"intertwine.cli.{words.split()[0]}.run", stopped)
    arguments = WORKS.get(words, "").format_map(dict.fromkeys(("net", "zoo", "plan", "study", "data", "new"), "x"))
    assert main([*words.split(), *arguments.split()]) == 130
    resumes = "; the same command resumes from here" if words in cli.RESUMABLE else ""
    assert capsys.readouterr() == ("", f"intertwine: stopped{resumes}\n")


def test_commands_that_go_on_are_commands() -> None:
    assert set(cli.RESUMABLE) <= set(COMMANDS)


# -- where the answer goes ---------------------------------------------------------------------------------------------


def started(shell: str, places: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell runs it, with `intertwine` for the program."""
    line = shell.format_map(places).replace("intertwine", f"{sys.executable} -m intertwine.cli")
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False, errors="replace",
        env={**os.environ, "PYTHONPATH": str(SRC), **environment},
    )  # fmt: skip


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_an_encoding_does_not_hold_is_a_question_mark(encoding: str, places: dict[str, str]) -> None:
    for words in ("intertwine inspect {net}", "intertwine dissect --help"):
        done = started(words, places, PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert "?" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_fault(places: dict[str, str]) -> None:
    for words, at_once in (("inspect {net} --json", ""), ("inspect {net}", "1"), ("zoo list", "")):
        done = started(f"intertwine {words} | true", places, PYTHONUNBUFFERED=at_once)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(12, "Cannot allocate memory")])
def test_another_pipe_that_breaks_is_a_fault(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one to a worker does: only standard output that takes nothing more is no fault of the program."""

    def broken(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("intertwine.cli.demo.run", broken)
    with pytest.raises(type(error)):
        main(["demo"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_an_answer_that_cannot_be_written_is_told(places: dict[str, str]) -> None:
    said = "intertwine: The answer cannot be written to standard output: No space left on device.\n"
    for at_once in ("", "1"):  # Python keeps what it is given, or writes it at once
        done = started("intertwine inspect {net} --json > /dev/full", places, PYTHONUNBUFFERED=at_once)
        assert (done.returncode, done.stderr) == (2, said)


def test_without_any_standard_output(places: dict[str, str]) -> None:
    done = started("intertwine zoo list >&-", places)
    assert (done.returncode, done.stderr) == (0, "")


# -- help is fast ------------------------------------------------------------------------------------------------------


def seconds(*arguments: str) -> float:
    """What a new interpreter works, in seconds of a processor: other programs on the machine do not add to them."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    started = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    assert started.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def bar() -> float:
    """An interpreter that does nothing, and a quarter of a second; importing torch alone takes several times that."""
    return sorted(seconds("-c", "pass") for _ in range(3))[1] + 0.25


@pytest.mark.parametrize("words", HELPED)
def test_help_takes_no_time(words: str, bar: float) -> None:
    def helped(arguments: Sequence[str]) -> float:
        return seconds("-m", "intertwine.cli", *arguments, "--help")

    assert any(helped(words.split()) < bar for _ in range(3))  # the first that is quick enough will do
