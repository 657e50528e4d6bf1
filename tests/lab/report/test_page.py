"""Tests of the report page: its sections, numbers, colours and texts; it needs no network and has a limited size."""

import base64
import hashlib
import json
import re
import statistics
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars
import pytest
import study_records
import torch
from finished_tasks import records_of
from torch import nn

import intertwine as it
from intertwine.errors import InputError
from intertwine.lab.report import page as page_module
from intertwine.lab.report.charts import (
    HEIGHT,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Axes,
    Dot,
    gather,
    line_chart,
    plot_area,
)
from intertwine.lab.report.entries import TaskRecord, read
from intertwine.lab.report.naming import Commands, Names, duration
from intertwine.lab.report.outline import frozen_reasons
from intertwine.lab.report.page import study_page, write_study
from intertwine.lab.report.sections import describe_cells
from intertwine.lab.report.svg import Scale, around, ticks
from intertwine.lab.report.tables import failure_title
from intertwine.lab.study.records import COLUMNS, ResultRow
from intertwine.symmetry.wire import Frozen

ALONE = {"meta", "input", "br"}  # HTML elements without an end tag


class Tree(HTMLParser):
    """Parses a page strictly: every element must be closed. Keeps attributes, and texts by element."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def attributes(self, name: str) -> list[str]:
        return [found for _, attributes in self.tags if (found := attributes.get(name)) is not None]


def made(records: Any, **options: Any) -> str:
    return study_page(read(records), options.get("plan", {}), options.get("networks", {}), options.get("failures", []))


@pytest.fixture(scope="module")
def text() -> str:
    return made(study_records.records(), plan=study_records.PLAN, networks={"cnn": "<p>wires</p>"})


@pytest.fixture(scope="module")
def tree(text: str) -> Tree:
    return Tree(text)


def held(tree: Tree) -> list[dict[str, Any]]:
    """The rows that the page contains for its script, decoded without the script."""
    found = json.loads(next(t for t in tree.texts["script"] if t.startswith("{")))
    commands = tree.texts["code"]
    rows = []
    for i, task in enumerate(found["rows"]["task"]):
        row = {name: column[i] for name, column in found["rows"].items() if name != "task"}
        row |= {name: column[task] for name, column in found["tasks"].items()}
        numbers = {"repeat", "seconds", "peak_mib", "index", "value", "low", "high", "command"}
        plain = {k: v if v is None or k in numbers else found["texts"][v] for k, v in row.items()}
        plain["command"] = None if row["command"] is None else commands[row["command"]]
        rows.append(plain)
    assert found["columns"] == list(COLUMNS)
    return rows


# -- The whole page ----------------------------------------------------------------------------------------------------


def test_the_order_of_the_sections(tree: Tree) -> None:
    anchors = [a["id"] for tag, a in tree.tags if tag == "section"]
    verbs = ["similarity", "barrier", "connectivity", "stitch", "fold", "complexity", "dissect"]
    assert anchors == ["overview", "networks", *verbs, "tables", "plan", "commands"]


def test_a_section_needs_its_verb() -> None:
    rows = [r for r in study_records.records() if r["verb"] in ("fold", "barrier")]
    anchors = [a["id"] for tag, a in Tree(made(rows)).tags if tag == "section"]
    assert anchors == ["overview", "barrier", "fold", "tables", "plan", "commands"]


def test_ids_are_unique_and_links_have_targets(tree: Tree) -> None:
    ids = tree.attributes("id")
    assert len(ids) == len(set(ids))
    links = tree.attributes("href")
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert {f"c{n}" for several in tree.attributes("data-c") for n in several.split()} <= set(ids)


def test_the_page_makes_no_requests(text: str, tree: Tree) -> None:
    assert all(link.startswith("#") for link in tree.attributes("href"))
    assert not {tag for tag, _ in tree.tags} & {"link", "img", "iframe", "object", "base"}
    assert tree.attributes("src") == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|WebSocket", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_the_policy_allows_only_our_script(tree: Tree) -> None:
    script = files("intertwine.lab.report").joinpath("study.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for tag, a in tree.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy
    assert script in tree.texts["script"]


def test_names_cannot_break_the_page() -> None:
    bad = '</script><script>alert("x")</script>\'"&'
    rows = study_records.records()
    for row in rows:
        row |= {name: bad + row[name] for name in ("a", "b", "layer", "quantity", "note", "command") if row[name]}
        row |= {"study": bad, "options": json.dumps({bad: bad})}
    tree = Tree(made(rows, plan={bad: bad}, failures=[study_records.failure()]))
    assert [a.get("type") for tag, a in tree.tags if tag == "script"] == ["application/json", None]
    assert held(tree)[0]["a"].startswith(bad)


def test_overview_counts_tasks_time_and_failures() -> None:
    rows = study_records.records()
    failed = study_records.failure() | {"seconds": 9.0}
    text = made(rows, failures=[failed])
    tasks, empty = len({r["key"] for r in rows}), sum(r["value"] is None for r in rows)
    assert f"{tasks} tasks gave {len(rows):,} rows in 2 min 6 s of computing. 1 task failed." in text
    assert f"{empty} rows have no value" in text
    assert "stitch cnn cnn-0 cnn-9 fc: MismatchError: 64 units meet 10" in text
    for verb, failed_tasks in (("stitch", 1), ("fold", 0)):
        own = [r for r in rows if r["verb"] == verb]
        counts = (len({r["key"] for r in own}), failed_tasks, len(own), sum(r["value"] is None for r in own))
        cells = "".join(f'<td class="number">{n}</td>' for n in counts)
        time = duration(1.5 * counts[0] + failed_tasks * failed["seconds"])
        cells += f'<td class="number">{time}</td>'
        assert f'<th scope="row"><a href="#{verb}">{verb}</a></th>{cells}' in text


def test_plan_and_versions(text: str) -> None:
    assert "&quot;name&quot;: &quot;digits&quot;" in text
    assert "<td>0.1.0</td><td>2.13.0</td><td>3.12.3</td><td>006d543</td>" in text
    assert "<td>2026-01-01T10:00:00</td><td>2026-01-03T10:00:00</td>" in text


def test_an_empty_study_is_a_page() -> None:
    assert "Nothing has run." in made([])


# -- Numbers -----------------------------------------------------------------------------------------------------------


def test_the_page_contains_every_row_with_all_digits(tree: Tree) -> None:
    wanted = study_records.records()
    for row, found in zip(wanted, held(tree), strict=True):
        assert found == row


def test_a_frame_gives_the_same_page(text: str) -> None:
    frame = polars.DataFrame(study_records.records(), infer_schema_length=None)
    assert made(frame, plan=study_records.PLAN, networks={"cnn": "<p>wires</p>"}) == text


def test_every_number_of_a_table_links_to_its_command(tree: Tree, text: str) -> None:
    commands = dict(
        zip((i for i in tree.attributes("id") if re.fullmatch(r"c\d+", i)), tree.texts["code"], strict=True)
    )
    assert set(commands.values()) == {r["command"] for r in study_records.records()}
    rows = re.search(r'data-verb="fold".*?<tbody>(.*?)</tbody>', text, re.S)
    assert rows is not None
    links = re.findall(r'<a href="#(c\d+)">', rows[1])
    wanted = [r["command"] for r in study_records.records() if r["verb"] == "fold"]
    assert [commands[link] for link in links] == wanted


def test_repeats_become_their_mean_and_spread() -> None:
    rows = [
        study_records.task("barrier", [ResultRow("error", v, index=0.5)], "a", "b", i)
        for i, v in enumerate([0.1, 0.2, 0.6])
    ]
    found = read([r for one in rows for r in records_of(one, "s")])
    commands = Commands()
    (series,) = gather(found.entries, lambda e: "", lambda e: e.index or 0.0, commands)
    (dot,) = series.dots
    assert dot.value == pytest.approx(statistics.mean([0.1, 0.2, 0.6]))
    assert (dot.low, dot.high, dot.count, dot.commands) == (0.1, 0.6, 3, (0, 1, 2))
    assert "Means of up to 3 repeats; the interval is from the smallest to the largest." in made(
        [r for one in rows for r in records_of(one, "s")]
    )


def test_different_options_are_never_averaged() -> None:
    rows = [study_records.task("fold", [ResultRow("accuracy", v, index=0.5)], "a", method=m, norm=n)
            for v, m, n in ((0.1, "x", "p"), (0.2, "x", "q"), (0.4, "y", "p"))]  # fmt: skip
    text = made([r for one in rows for r in records_of(one, "s")])
    assert "repeats" not in text.split("<script>")[0]
    for name in ("x, norm=p", "x, norm=q", "y, norm=p"):
        assert f'<th scope="col">{name}</th>' in text


def test_amounts_of_folding_are_points_of_one_curve() -> None:
    rows = [
        study_records.task("fold", [ResultRow("accuracy", 1 - b, index=1 - b)], "a", beta=b) for b in (0.1, 0.2, 0.3)
    ]
    figure = made([r for one in rows for r in records_of(one, "s")])
    assert figure.count("<polyline") == 1


def test_measures_share_a_switch_and_numeric_names_get_their_zoo() -> None:
    tasks = [
        study_records.task("compare", [ResultRow(m, 0.5, layer="x", other_layer="y")], "0", "1", measure=m)
        for m in ("rv", "cca")
    ]
    text = made([r for one in tasks for r in records_of(one, "s")])
    assert "rv between the layers of cnn 0 × cnn 1. Highest" in text
    assert text.count("<select>") == 3
    assert text.count("<label hidden>") == 2


def test_classes_without_options_have_their_name(tmp_path: Path) -> None:
    row = {"study": "s", "verb": "complexity", "a": "net", "layer": "1", "options": "{}", "repeat": 0}
    records = [row | {"key": "k", "quantity": quantity, "value": 8.0} for quantity in ("classes", "width")]
    page = write_study(records, tmp_path / "r.html").read_text(encoding="utf-8")
    figure = re.search(r'id="complexity".*?</figure>', page, re.S)
    assert figure is not None
    legend = re.search(r'<ul class="legend">(.*?)</ul>', figure[0], re.S)
    assert legend is not None
    assert re.findall(r"</svg>\s*(?:<[^>]+>)*([a-z]+)", legend[1]) == ["classes", "width"]


def test_the_width_is_drawn_once_beside_the_classes_of_every_beta(text: str) -> None:
    figure = re.search(r'id="complexity".*?</figure>', text, re.S)
    assert figure is not None
    heads = re.findall(r'<th scope="col">([^<]*)</th>', figure[0])
    assert heads == ["layer", "beta=0.05", "width", "beta=0.1"]
    assert "repeats" not in figure[0]


def test_positions_of_points() -> None:
    one = study_records.task(
        "fold", [ResultRow("accuracy", y, index=x) for x, y in ((0.0, 0.2), (0.5, 1.0), (1.0, 0.5))]
    )
    (series,) = gather(read(records_of(one, "s")).entries, lambda e: "", lambda e: e.index or 0.0, Commands())
    drawn = line_chart(Axes("t", "x", "y"), [series])
    points = re.search(r'<polyline points="([^"]*)"', drawn)
    assert points is not None
    found = [tuple(map(float, point.split(","))) for point in points[1].split()]
    wanted = [
        (LEFT + x * (WIDTH - RIGHT - LEFT), HEIGHT - y * (HEIGHT - TOP)) for x, y in ((0, 0.2), (0.5, 1), (1, 0.5))
    ]
    assert [c for point in found for c in point] == pytest.approx([c for point in wanted for c in point], abs=0.06)


@pytest.mark.parametrize("size", [1.1e-16, 2.1e-15, -3e-13, 5e-324])
def test_values_as_small_as_rounding_are_drawn(size: float, tmp_path: Path) -> None:
    """For example between a network and its moved copy, whose features differ only by rounding."""
    rows = [ResultRow("llfc", n * size, layer=f"l{n}", index=0.5) for n in (1, 2, 3)]
    same = [ResultRow("distance", n * size, layer=f"l{n}", other_layer="x") for n in (1, 2, 3)]
    made = [study_records.task("connectivity", rows, "0", "1"), study_records.task("compare", same, "0", "1")]
    page = write_study([r for one in made for r in records_of(one, "s")], tmp_path / "r.html").read_text("utf-8")
    assert '<section id="connectivity"' in page
    (series,) = gather(
        read(records_of(made[0], "s")).entries, lambda e: "", lambda e: float((e.layer or "")[1]), Commands()
    )
    up = plot_area(Axes("t", "x", "y"), [series]).up
    places = [up(value) for _, value in series.known]
    if abs(size) > 1e-300:  # a smaller one is drawn on the axis
        assert max(places) - min(places) > (HEIGHT - TOP) / 2  # the curve fills the picture
        assert len(set(ticks(up.low, up.high))) > 2


@pytest.mark.parametrize("values", [[0.3, 0.1 + 0.2], [1e20], [1e-320], [7e5, 7e5 + 1e-11], [2e-16, 3e-16]])
def test_an_axis_shows_its_values(values: list[float]) -> None:
    low, high = around(values, zero=False)
    places = [Scale(low, high, 0.0, 1.0)(value) for value in values]
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)


@pytest.mark.parametrize("most", [98765.0, 23456789.0, -7.5e19])
@pytest.mark.parametrize("names", [(), ("conv1", "fc"), tuple(f"layer{i}.0.relu" for i in range(12))])
def test_text_of_a_chart_is_inside_the_picture(names: tuple[str, ...], most: float) -> None:
    one = study_records.task("fold", [ResultRow("accuracy", y, index=x) for x, y in ((0.0, -1234.0), (1.0, most))])
    (series,) = gather(read(records_of(one, "s")).entries, lambda e: "", lambda e: e.index or 0.0, Commands())
    drawn = line_chart(Axes("t", "fraction of features", "accuracy of the network", names), [series])
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawn)[0])
    words = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)"( transform="rotate[^"]*")? class="([\w ]+)">([^<]+)', drawn)
    assert {"fraction of features", "accuracy of the network", *names} <= {said for *_, said in words}
    for x, y, turned, kind, said in words:
        long = LETTER * len(said)
        before, after = (long, 0.0) if "end" in kind else (long / 2, long / 2) if "middle" in kind else (0.0, long)
        assert (float(y) if turned else float(x) - before) >= 0
        assert (float(x) if turned else float(x) + after) <= width
        assert 0 < float(y) + (long if turned else 0) <= height


@pytest.mark.parametrize(("names", "kind"), [((), "plot fluid"), (("conv1", "fc"), "plot")])
def test_only_charts_over_numbers_shrink_with_the_page(names: tuple[str, ...], kind: str) -> None:
    """Names of layers would become too small to read, so such a chart scrolls."""
    one = study_records.task("fold", [ResultRow("accuracy", x, index=x) for x in (0.0, 1.0)])
    (series,) = gather(read(records_of(one, "s")).entries, lambda e: "", lambda e: e.index or 0.0, Commands())
    framed = re.findall(r'class="scroll ([^"]*)"', line_chart(Axes("t", "x", "y", names), [series]))
    assert framed[0] == kind


def test_two_alphas_are_two_lines() -> None:
    """Numbers of two alphas are not averaged."""
    rows = [ResultRow("llfc", value, layer="fc", index=alpha) for alpha, value in ((0.25, 0.1), (0.5, 0.3))]
    own = section(made(list(records_of(study_records.task("connectivity", rows, b="cnn-1"), "s"))), "connectivity")
    assert re.findall(r'<th scope="col">([^<]*)</th>', own) == ["layer", "α=0.25", "α=0.5"]
    assert "Largest: α=0.5: 0.3 at fc; α=0.25: 0.1 at fc." in own


def test_cells_of_a_heat_map(text: str) -> None:
    rows = [r for r in study_records.records() if r["quantity"] == "linear_cka" and r["b"] == "cnn-1"]
    for row in rows[:10]:
        title = f"<title>{row['layer']} × {row['other_layer']}: {row['value']:.4g}</title>"
        depth = re.search(rf'fill-opacity="([\d.]+)">{re.escape(title)}', text)
        assert depth is not None
        assert float(depth[1]) == pytest.approx(row["value"], abs=0.0051)
    plain = unescape(text)
    assert f"<title>conv1 × fc: {study_records.CONSTANT}</title>" in plain
    assert "8 of 64 have no value; hover over them for the reason." in text
    assert f'<span class="none" title="{study_records.CONSTANT}">–</span>' in plain


def test_intervals_of_penalties(text: str) -> None:
    row = next(r for r in study_records.records() if r["verb"] == "stitch" and r["value"] is not None)
    assert f"{row['value']:.4g} ({row['low']:.4g} to {row['high']:.4g})".replace("-", "−") in text
    assert text.count('class="whisker"') == sum(
        r["verb"] == "stitch" and r["low"] is not None for r in study_records.records()
    )
    assert "permutation: fc: the layers differ in width" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_infinite_and_nan_values_are_shown_as_missing(value: float) -> None:
    tree = Tree(made(records_of(study_records.task("fold", [ResultRow("accuracy", value, index=0.5)]), "s")))
    (row,) = held(tree)
    assert (row["value"], row["note"]) == (None, f"the value is {value}")


# -- Colours -----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_contrast_of_colours(mode: int) -> None:
    style = files("intertwine.lab.report").joinpath("study.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.S)
    colours = dict(re.findall(r"(--[\w-]+): (#\w{6})", blocks[mode]))

    def contrast(one: str, other: str) -> float:
        low, high = sorted(luminance(colours[name]) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    for name in ("--ink", "--faint", "--link", "--bad"):
        assert contrast(name, "--paper") >= 4.5
    for name in (*(f"--s{i}" for i in range(10)), "--heat"):
        assert contrast(name, "--paper") >= 3
    assert contrast("--on-heat", "--heat") >= 4.5
    assert contrast("--faint", "--tint") >= 4.5


# -- Bad input ---------------------------------------------------------------------------------------------------------


def test_the_folder_of_the_file_is_created(tmp_path: Path) -> None:
    file = write_study(study_records.records(), tmp_path / "new" / "report.html")
    assert file.read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"verb": "fold", "value": 1.0}],
            r"no column quantity, only verb, value\. Give the data frame of a study's store",
        ),
        (
            [{"verb": "fold", "quantity": "x", "value": "0.5"}],
            r"value must be a number, or None with a note, but is '0\.5' in row 0 of the records",
        ),
        (
            [{"verb": "f", "quantity": "x", "value": 1.0, "options": "beta"}],
            r"options must be the text of a JSON object.* but is 'beta'",
        ),
        (
            [{"verb": "f", "quantity": "x", "value": 1.0, "options": "[1]"}],
            r"options must be the text of a JSON object.* but is '\[1\]'",
        ),
    ],
)
def test_bad_records_are_refused(records: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        write_study(records, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/report\.html could not be written: .*\. Choose another place"):
        write_study([], tmp_path / "file" / "report.html")


# -- Networks, proof, canonical form -----------------------------------------------------------------------------------


def proved(error: float | None = 2e-15, note: str | None = None, a: str = "cnn-0") -> list[dict[str, Any]]:
    """The records of the verb symmetry for one network."""
    rows = [ResultRow("wires", 12.0), ResultRow("coverage", 0.97), ResultRow("certificate_error", error, note=note)]
    return list(records_of(study_records.task("symmetry", rows, a), "s"))


def moved(mark: str, a: str, equal: float = 1.0) -> list[dict[str, Any]]:
    """The records of the verb canonical for one network."""
    rows = [
        ResultRow("moved", 1.4),
        ResultRow("fingerprint_equal", equal, note=mark),
        ResultRow("average_accuracy", 0.09),
    ]
    return list(records_of(study_records.task("canonical", rows, a), "s"))


def section(text: str, anchor: str) -> str:
    found = re.search(rf'<section id="{anchor}".*?</section>', text, re.S)
    assert found is not None
    return found[0]


def test_accuracies_are_above_the_wires() -> None:
    tasks = [study_records.task("accuracy", [ResultRow("accuracy", v)], f"cnn-{i}") for i, v in enumerate((0.5, 0.75))]
    text = made([r for one in tasks for r in records_of(one, "s")], networks={"cnn": "<p>wires</p>"})
    own = section(text, "networks")
    bars = re.findall(r'<th scope="row">(cnn-\d)</th><td><a href="#c(\d)">([\d.]+)</a>.*?width:([\d.]+)%', own)
    assert bars == [("cnn-1", "1", "0.75", "100.0"), ("cnn-0", "0", "0.5", "66.7")]
    assert own.index("cnn-0") < own.index("<p>wires</p>")
    assert '<a href="#networks">accuracy</a>' in text
    assert "<table" not in section(made([], networks={"cnn": "<p>wires</p>"}), "networks")


def test_a_proof_names_the_largest_error() -> None:
    text = made(proved() + proved(7e-15, a="cnn-1"))
    own = section(text, "symmetry")
    assert "✓</strong> The symmetry holds for 2 networks" in own
    link = re.search(r'the outputs change by at most <a href="#(c\d)">7e−15</a>, relative to their size', own)
    assert link is not None
    assert f'<li id="{link[1]}"><code>intertwine symmetry zoo:cnn/cnn-1 ' in text
    assert re.findall(r'class="number">([^<]+)</th>', own) == ["wires", "coverage", "output error"]
    assert re.search(r'<th scope="row">cnn-0</th>.*?>12</a>.*?>0.97</a>.*?>2e−15</a>', own)


@pytest.mark.parametrize(("error", "note"), [(0.25, "the certificate failed"), (float("inf"), None)])
def test_a_failed_certificate_names_the_network(error: float, note: str | None) -> None:
    own = section(made(proved() + proved(error, note, "cnn-1")), "symmetry")
    assert "✗</strong> The symmetry does not hold for cnn-1:" in own
    assert "✓" not in own


def test_verdict_on_fingerprints() -> None:
    own = section(made(moved("aa", "cnn-0") + moved("bb", "cnn-1")), "canonical")
    assert "✓</strong> Every network has the fingerprint of its moved copy, and 2 networks have 2 fingerprints" in own
    assert 'cnn-1 <code><a href="#c1">bb</a></code>' in own
    twins = section(made(moved("aa", "cnn-0") + moved("aa", "cnn-1")), "canonical")
    assert "✗</strong> Every network has the fingerprint of its moved copy, and 2 networks have 1 fingerprint:" in twins
    wrong = section(made(moved("aa", "cnn-0") + moved("bb", "cnn-1", 0.0)), "canonical")
    assert "✗</strong> The moved copy of cnn-1 has another fingerprint." in wrong


def test_a_dissection_has_its_fraction_and_that_by_chance() -> None:
    rows = [ResultRow("units", 3.0, layer="conv2", note="loop"), ResultRow("fraction", 0.375, layer="conv2")]
    rows.append(ResultRow("fraction_by_chance", 0.125, layer="conv2"))
    own = section(made(list(records_of(study_records.task("dissect", rows), "s"))), "dissect")
    assert "3 units match 1 concept; most match loop (3). That is 38% of its units (12% by chance)." in own


# -- Size --------------------------------------------------------------------------------------------------------------


def test_twenty_thousand_rows_fit() -> None:
    rows = study_records.many(20_000)
    text = made(rows)
    assert len(text.encode()) < 10_000_000
    tree = Tree(text)
    assert [r["value"] for r in held(tree)] == [r["value"] for r in rows]
    assert set(tree.texts["code"]) == {r["command"] for r in rows}


def test_rows_are_left_out_evenly_if_the_page_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MAX_BYTES", 300_000)
    rows = study_records.many(2_000)
    text = made(rows)
    assert len(text.encode()) <= 300_000
    kept = held(Tree(text))
    assert f"{len(kept):,} of 2,000 rows are in this file, evenly chosen" in text
    assert re.search(r"\d+ of \d+ pictures are drawn, to keep this file small", text)
    assert 0.4 < sum(r["verb"] == "stitch" for r in kept) / len(kept) < 0.6


def test_a_plan_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MAX_BYTES", 100_000)
    with pytest.raises(
        InputError, match=r"without its rows, but at most 0\.1 MB are allowed: the plan or the outlines"
    ):
        made(study_records.records(), plan={"x": "y" * 200_000})


def test_many_layers_and_many_lines_are_thinned() -> None:
    layers = [f"l{i}" for i in range(70)]
    cells = [ResultRow("cka", 0.5, layer=a, other_layer=b) for a in layers for b in layers]
    lines = [study_records.task("fold", [ResultRow("accuracy", 0.5, index=0.5)], method=f"m{i}") for i in range(15)]
    text = made([r for one in [study_records.task("compare", cells, b="x"), *lines] for r in records_of(one, "s")])
    assert "One layer in 2 is drawn." in text
    assert text.count('class="h"') - 14 == len(layers[::2]) ** 2
    assert "The first 12 of 15 lines are drawn." in text


def test_frozen_reasons_without_their_place() -> None:
    place = "at my own model.py:15 in body.conv"
    frozen = [Frozen(name, f"positions along it matter to cumsum {place}") for name in "ab"]
    (found,) = frozen_reasons(frozen)
    assert (found.text, found.axes) == ("positions along it matter to cumsum", ("a", "b"))
    (found,) = frozen_reasons([Frozen("a", "it meets b (an input) in conv2d at net.py:3")])
    assert found.text == "it meets b (an input) in conv2d"


def test_a_long_failure_is_shortened() -> None:
    error = "Traceback …\nintertwine.errors.InputError: Choose a place " + "before the end " * 20
    title = failure_title({"verb": "fold", "a": "z:0", "error": error})
    assert title == "fold z:0: Choose a place " + "before the end " * 9 + "before …"


def test_a_name_contains_its_zoo_once() -> None:
    names = Names(zoos=True, options=())
    for name, shown in (("small:1", "small:1"), ("mine", "small mine")):
        about = {"verb": "fold", "zoo": "small", "a": name}
        assert names._name(TaskRecord(1, about, {}), "a") == shown


def test_labels_of_a_heat_map_of_a_comparison() -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU()) for _ in range(2))
    found = it.compare(a, b, [(torch.randn(20, 3), None)])
    (axes, _) = found.plot(names=("A", "B")).axes
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layers of A", "layers of B")
    assert found.plot().axes[0].get_ylabel() == "layers of the first network"


def test_the_report_names_the_highest_and_the_lowest_pair() -> None:
    cells = {("a", "b"): dot(0.2), ("a", "c"): dot(0.9), ("d", "c"): dot(None)}
    assert describe_cells(cells) == (
        "Highest 0.9 at a × c, lowest 0.2 at a × b. 1 of 3 have no value; hover over them for the reason."
    )


def dot(value: float | None) -> Dot:
    return Dot(0.0, value, None, None, 1, None, ())
