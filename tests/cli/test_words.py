"""Names and paths of the user are shown as they are: nothing in them is read as the markup or the emoji of rich."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from intertwine.cli import main
from intertwine.cli.output import progress, status, terminal

STRANGE = "nets[red][/old]:heart:"
NETS = """
import torch
def net(): return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
def example_inputs(): return torch.ones(1, 3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / STRANGE
    place.mkdir(parents=True)
    (place / "m.py").write_text(NETS)
    return place


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars and spinners are drawn, a spinner with its last words at least, and lines are long enough for a path."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")


@pytest.mark.parametrize("command", ["inspect", "canonicalize", "fold"])
@pytest.mark.usefixtures("on_a_terminal")
def test_commands_show_names_as_they_are(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{folder}/m.py:net"
    code = main([command, name, *(["--beta", "0.1"] if command == "fold" else [])])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert name in said.out


def test_dissection_of_a_strange_name_is_refused_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dissect", f"{folder}/m.py:net", "--at", "0", "--concepts", "synthetic"]) == 2
    assert f"{folder}/m.py:net is called with float32 1×3" in capsys.readouterr().err


@pytest.mark.usefixtures("on_a_terminal")
def test_bars_and_spinners_show_what_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(f"first {STRANGE}") as tell:
        tell(f"then {STRANGE}", 0.5)
    with status(f"a spinner {STRANGE}"):
        pass
    with status("another one") as say:
        say(f"last {STRANGE}")
    said = capsys.readouterr().err
    for word in ("first", "then", "a spinner", "last"):
        assert f"{word} {STRANGE}" in said


def test_tables_show_files_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"0.weight": torch.randn(4, 3), "0.bias": torch.randn(4), "2.weight": torch.randn(2, 4)}
    (folder / "c[").mkdir()
    for name in ("a[b].safetensors", "c[/d].safetensors"):
        save_file(state | {"2.bias": torch.zeros(2)}, folder / name)
    assert main(["canonicalize", f"{folder}/m.py:net", "--dedupe", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "a[b].safetensors" in said
    assert "c[/d].safetensors" in said


def test_what_is_printed_plainly_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    terminal().print(f"a path: {STRANGE}")
    assert capsys.readouterr().out == f"a path: {STRANGE}\n"
