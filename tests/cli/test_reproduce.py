"""`intertwine reproduce`: tables, files, the list, JSON, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from intertwine.cli import main
from intertwine.lab.papers.experiments import names, read_result

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MEASURED = EXPERIMENTS / "results" / "sorensen-table1.paper.json"
FIGURES = ["godfrey-fig3", "godfrey-fig19"]


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What standard error says of a call that is not carried out."""
    assert main(["reproduce", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


# -- runs --------------------------------------------------------------------------------------------------------------


def test_names_are_run_and_written_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two experiments; then one of them again, from what is in the folder, with its files elsewhere."""
    out, words = tmp_path / "[out]", ["--scale", "cpu", "--device", "cpu", "--out", str(tmp_path / "[out]")]
    assert main(["reproduce", *FIGURES, *words]) == 0
    for name in FIGURES:
        result = read_result(out / f"{name}.cpu.json")
        assert result.manifest["command"] == f"intertwine reproduce {name} --scale cpu"
        assert (out / f"{name}.cpu.svg").read_text(encoding="utf-8").startswith("<?xml")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Godfrey et al. 2022, figure 3: units in rotated bases, drawn concepts · scale cpu"
    where = f"result in {out}/godfrey-fig19.cpu.json, figure in {out}/godfrey-fig19.cpu.svg"
    assert said[-1] == f"godfrey-fig19: {where}"
    shown = next(line for line in said if line.startswith("without") and "α = 1" in line)
    first = read_result(out / "godfrey-fig3.cpu.json")
    assert float(shown.split()[-2]) == pytest.approx(first.numbers["without"]["α = 1"][0], rel=1e-3)

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert before
    file, figure = tmp_path / "kept" / "three.json", tmp_path / "kept" / "three.svg"
    assert main(["reproduce", FIGURES[0], *words, "--results", str(file), "--plot", str(figure)]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before, "trained again"
    assert read_result(file).rows == first.rows
    assert figure.is_file()
    assert main(["reproduce", FIGURES[0], *words, "--results", str(tmp_path / "folder")]) == 0
    assert (tmp_path / "folder" / "godfrey-fig3.cpu.json").is_file()


# -- results of before -------------------------------------------------------------------------------------------------


def test_a_result_is_drawn_and_shown_beside_the_printed_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "table1.png"
    assert main(["reproduce", "--draw", str(MEASURED), "--plot", str(figure)]) == 0
    said = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    (line,) = (line for line in said.splitlines() if line.startswith("sorted, p = 10 ") and "W₂ mean" in line)
    assert line.split()[-4:] == ["0.15", "+0.00383", "499500", "agrees"]
    assert "✓ Among 1000 trained networks, none were found to have distance 0" in said
    assert "✗ And a meaningful one it is" in said
    assert said.count("The thesis gives neither p nor the training") == 1, "each explanation once"


def test_json_holds_lines_and_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--draw", str(MEASURED), "--plot", str(tmp_path / "a.svg"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["experiments"]
    assert (found["name"], found["scale"], found["seconds"]) == ("sorensen-table1", "paper", 143.3)
    (line,) = (line for line in found["lines"] if (line["series"], line["label"]) == ("unsorted", "W₁ mean"))
    assert (line["printed"], line["verdict"], line["count"]) == (82.89585, "agrees", 499_500)
    assert line["mean"] == pytest.approx(82.72235826, rel=1e-5)
    assert len(found["claims"]) == 7


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_list_has_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["experiments"]}
    assert list(entries) == names()
    one = entries["sorensen-table1"]
    assert one["needs"] == {"paper": ["mnist", "a GPU"], "gpu": ["mnist", "a GPU"], "cpu": ["digits"]}
    assert "002-S17" in one["rows"]
    assert "paper" in one["results"]
    assert one["cost"]["paper"] == "1,000 networks: two and a half minutes on one H200"
    assert main(["reproduce", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in entries)
    assert next(line for line in said.splitlines() if line.startswith("sorensen-table1")).rstrip().endswith("yes")


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; from intertwine.cli import main\n"
        "try: main(['reproduce', '--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--scale" in said
    assert said.splitlines()[-1] == "False"


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_bad_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, "sorensen-table2", "--out", tmp_path)
    assert "There is no experiment 'sorensen-table2'" in said
    assert "Did you mean 'sorensen-table1" in said
    assert "See --list" in said
    assert "No experiment is named. Give names, or all; --list shows what there is." in refused(capsys)
    said = refused(capsys, "godfrey-fig3", "--draw", MEASURED)
    assert "--draw runs nothing, but godfrey-fig3 is named. Leave one of them out." in said


def test_bad_scales(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "godfrey-fig3", "--scale", "tpu"])
    assert caught.value.code == 2
    assert "Unknown value 'tpu' for --scale." in capsys.readouterr().err


def test_missing_data(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(capsys, "sorensen-table1", "--data-folder", tmp_path / "none", "--out", tmp_path / "out")
    assert f"--data-folder {tmp_path / 'none'} is not a folder." in said
    assert not (tmp_path / "out").exists(), "refused before any work"
    said = refused(capsys, "sorensen-table1", "--data-folder", tmp_path, "--out", tmp_path / "out", "--device", "cpu")
    assert "mnist" in said
    assert str(tmp_path) in said


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"rows": []}', '{"manifest": {"plan": {}}, "rows": []}'])
def test_damaged_results(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(text)
    said = refused(capsys, "--draw", file)
    assert f"{file} is not the result of an experiment. Run the experiment again." in said


def test_results_with_rows_of_another_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(MEASURED.read_text().replace('"seed"', '"seeds"').replace('"accuracy', '"accurate'))
    said = refused(capsys, "--draw", file, "--plot", tmp_path / "figure.svg")
    assert f"{file} cannot be drawn: its rows are not those of its experiment" in said
    assert "Copy it again if it was damaged, or run `intertwine reproduce" in said
    assert list(tmp_path.iterdir()) == [file]


def test_missing_results_and_bad_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, "--draw", tmp_path / "none.json")
    assert f"The result {tmp_path / 'none.json'} does not exist." in said
    assert (
        "in a checkout of the project under experiments/results, or `intertwine reproduce none --scale paper`" in said
    )
    said = refused(capsys, "--draw", MEASURED, "--plot", tmp_path / "figure.txt")
    assert "Choose a name that ends in .svg or .png" in said


def test_one_file_for_two_experiments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, *FIGURES, "--plot", tmp_path / "one.svg")
    assert "--plot names one file for 2 experiments. Give a folder, or one experiment." in said
    said = refused(capsys, *FIGURES, "--results", tmp_path / "one.json")
    assert "--results names one file for 2 experiments." in said
