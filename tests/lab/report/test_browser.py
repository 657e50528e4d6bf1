"""Tests of the report in a browser: switches, slider, tables, CSV, commands, phone, dark mode, no JavaScript."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import study_records

from intertwine.lab.report.page import write_study
from intertwine.lab.study.records import COLUMNS

WIDE = {"width": 1100, "height": 800}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = write_study(
        study_records.records(),
        tmp_path_factory.mktemp("report") / "report.html",
        plan=study_records.PLAN,
        networks={"cnn": '<div class="wires"><ul><li>conv1<span class="size">8</span></li></ul></div>'},
        failures=[study_records.failure()],
    )
    return file.as_uri()


def guard(route: Any, report: str, wrong: list[str]) -> None:
    """Allow requests for the report itself; block and record any other."""
    if route.request.url.split("#")[0] == report:
        route.continue_()
    else:
        wrong.append(f"request: {route.request.url}")
        route.abort()


@pytest.fixture
def opened(browser: Any, report: str) -> Iterator[Any]:
    """Opens the report in a new window; another request or a script error fails the test."""
    contexts, wrong = [], []

    def open_report(**options: Any) -> Any:
        context = browser.new_context(**{"viewport": WIDE, **options})
        contexts.append(context)
        context.set_default_timeout(10_000)
        context.route("**/*", lambda route: guard(route, report, wrong))
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None)
        page.goto(report)
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert wrong == []


def seen(page: Any, section: str) -> Any:
    """The visible pictures of a section."""
    return page.locator(f"#{section} figure:visible")


IMAGE = '<img src="http://example.invalid/x.png">'


def test_the_guard_records_a_request(browser: Any, report: str) -> None:
    wrong: list[str] = []
    page = browser.new_context().new_page()
    page.route("**/*", lambda route: guard(route, report, wrong))
    page.set_content(IMAGE)
    page.wait_for_timeout(200)
    assert wrong == ["request: http://example.invalid/x.png"]
    page.context.close()


def test_the_report_itself_forbids_requests(browser: Any, report: str) -> None:
    said: list[str] = []
    page = browser.new_context().new_page()
    page.goto(report)
    page.on("console", lambda message: said.append(message.text))
    with page.expect_console_message():
        page.evaluate("(image) => document.body.insertAdjacentHTML('beforeend', image)", IMAGE)
    assert "violates the following Content Security Policy" in said[0]
    page.context.close()


def test_the_switch_of_the_measure_changes_the_picture(opened: Any) -> None:
    page = opened()
    figure = seen(page, "similarity")
    assert figure.count() == 1
    assert figure.locator("figcaption").inner_text().startswith("linear_cka between the layers of cnn-0 × cnn-1")
    before = figure.locator("rect.h").nth(1).get_attribute("fill-opacity")
    page.get_by_label("measure").select_option("orthogonal_procrustes")
    assert figure.count() == 1
    assert figure.locator("figcaption").inner_text().startswith("orthogonal_procrustes between")
    assert figure.locator("rect.h").nth(1).get_attribute("fill-opacity") != before
    page.locator("#similarity").get_by_label("networks").select_option("cnn-0 × cnn-2")
    assert (
        figure.locator("figcaption")
        .inner_text()
        .startswith("orthogonal_procrustes between the layers of cnn-0 × cnn-2")
    )


def test_the_slider_moves_the_marker_and_its_numbers(opened: Any) -> None:
    page = opened()
    figure = seen(page, "barrier")
    slider, marker = figure.get_by_role("slider"), figure.locator(".marker line")
    assert figure.locator("output").inner_text() == "t = 0.5"
    place, number = float(marker.get_attribute("x1")), figure.locator(".now").nth(0).inner_text()
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert figure.locator("output").inner_text() == "t = 0.6"
    assert slider.get_attribute("aria-valuetext") == "t = 0.6"
    assert float(marker.get_attribute("x1")) > place
    assert figure.locator(".now").nth(0).inner_text() != number
    rows = [
        r["value"] for r in study_records.records()
        if r["verb"] == "barrier" and r["quantity"] == "error" and r["index"] == 0.6 and r["b"] == "cnn-1"
        and "none" in r["options"]
    ]  # fmt: skip
    assert float(figure.locator(".now").nth(0).inner_text()) == pytest.approx(sum(rows) / 3, abs=5e-5)
    dot = figure.locator("svg a circle").nth(6)  # of the first line, at t = 0.6
    assert figure.locator(".marker circle").nth(0).get_attribute("cy") == dot.get_attribute("cy")


def column(page: Any, verb: str, name: str) -> list[str]:
    box = page.locator(f'.rows[data-verb="{verb}"]')
    heads = box.locator("th[data-column]")
    place = heads.evaluate_all("(all, name) => all.findIndex((one) => one.dataset.column === name)", name)
    return box.locator(f"tbody tr td:nth-child({place + 1})").all_inner_texts()


def test_tables_sort_with_missing_values_last(opened: Any) -> None:
    page = opened()
    box = page.locator('.rows[data-verb="stitch"]')
    values = sorted(r["value"] for r in study_records.records() if r["verb"] == "stitch" and r["value"] is not None)
    head = box.locator('th[data-column="value"]')
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(text) for text in column(page, "stitch", "value")] == pytest.approx(values[:20], abs=5e-5)
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert [float(text) for text in column(page, "stitch", "value")] == pytest.approx(values[::-1][:20], abs=5e-5)
    for _ in range(2):
        box.get_by_role("button", name="Next").click()
    assert column(page, "stitch", "value")[-2:] == ["–", "–"]
    assert column(page, "stitch", "note")[-2:] == ["the layers differ in width"] * 2
    assert box.get_by_role("button", name="Next").is_disabled()


def test_tables_filter_by_all_words(opened: Any) -> None:
    page = opened()
    box = page.locator('.rows[data-verb="stitch"]')
    box.get_by_label("filter").fill("Orthogonal layer2.0 cnn-2")
    assert column(page, "stitch", "layer") == ["layer2.0.relu"]
    assert "1–1 of 1 rows" in box.locator("caption").inner_text()
    box.get_by_label("filter").fill("nowhere")
    assert "no row has all these words" in box.locator("caption").inner_text()
    box.get_by_label("filter").fill("")
    assert "1–20 of 48 rows" in box.locator("caption").inner_text()


def saved(page: Any, button: Any) -> list[dict[str, str]]:
    with page.expect_download() as waiting:
        button.click()
    path = Path(waiting.value.path())
    assert waiting.value.suggested_filename.endswith(".csv")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_csv_has_all_rows_and_columns(opened: Any) -> None:
    page = opened()
    rows = saved(page, page.get_by_role("button", name="Download all rows as CSV"))
    wanted = study_records.records()
    assert list(rows[0]) == list(COLUMNS)
    for row, record in zip(rows, wanted, strict=True):
        for name, value in record.items():
            found = row[name]
            same = float(found) == value if isinstance(value, float | int) else found == (value or "")
            assert same, name


def test_the_csv_of_a_filtered_table_has_those_rows(opened: Any) -> None:
    page = opened()
    box = page.locator('.rows[data-verb="dissect"]')
    box.get_by_label("filter").fill("stroke")
    rows = saved(page, box.get_by_role("button", name="Download CSV"))
    assert [(r["a"], r["note"], r["value"]) for r in rows] == [
        ("cnn-0", "stroke, upright", "14"),
        ("cnn-1", "stroke, upright", "14"),
    ]


def test_a_number_shows_its_command_and_copies_it(opened: Any) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    page.locator('.rows[data-verb="fold"] tbody a').nth(0).click()
    dialog = page.get_by_role("dialog")
    command = "intertwine fold zoo:cnn/cnn-0 --method weights --seed 0"
    assert dialog.locator("code").all_inner_texts() == [command]
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == command
    page.keyboard.press("Escape")
    assert dialog.count() == 0


def test_a_mean_shows_the_commands_of_all_repeats(opened: Any) -> None:
    page = opened()
    seen(page, "barrier").locator("svg a").nth(5).click()
    shown = page.get_by_role("dialog").locator("code").all_inner_texts()
    assert shown == [f"intertwine barrier zoo:cnn/cnn-0 zoo:cnn/cnn-1 --method none --seed {i}" for i in range(3)]


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_a_phone_does_not_scroll_sideways(opened: Any, script: bool) -> None:
    page = opened(viewport={"width": 390, "height": 844}, java_script_enabled=script)
    for fold in page.locator("details:visible > summary").all()[:30]:
        fold.click()
    wide = page.locator("body").bounding_box()
    assert wide is not None
    assert wide["width"] <= 390
    session = page.context.new_cdp_session(page)  # asks the browser, which works without JavaScript too
    assert session.send("Page.getLayoutMetrics")["cssContentSize"]["width"] == 390


def brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def colour(page: Any, selector: str, what: str) -> float:
    return brightness(page.locator(selector).first.evaluate(f"(one) => getComputedStyle(one)['{what}']"))


def test_dark_mode_is_dark_and_its_lines_bright(opened: Any) -> None:
    light, dark = opened(color_scheme="light"), opened(color_scheme="dark")
    assert colour(light, "body", "backgroundColor") > 240
    assert colour(dark, "body", "backgroundColor") < 40
    assert colour(light, "body", "color") < 80
    assert colour(dark, "body", "color") > 200
    for selector, what in (("#barrier polyline", "stroke"), ("#similarity rect.h", "fill"), ("svg text", "fill")):
        assert colour(dark, selector, what) > colour(light, selector, what) + 30


def test_without_script_everything_is_shown_and_no_controls(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert seen(page, "similarity").count() == 6  # three measures of two pairs
    assert seen(page, "barrier").count() == 4
    for picture in page.locator("figure:visible > svg, figure:visible > * > svg").all():
        box = picture.bounding_box()
        assert box["width"] > 100
        assert box["height"] > 50
    assert page.locator("select:visible, input:visible, button:visible").count() == 0
    assert column(page, "fold", "value")[0] != ""
    assert page.locator('.rows[data-verb="barrier"] tbody tr').count() == 100
    assert "The first 100 of 576 rows" in page.locator('.rows[data-verb="barrier"] caption').inner_text()
    link = page.locator('.rows[data-verb="fold"] tbody a').nth(0)
    link.click()
    target = page.locator(link.get_attribute("href"))
    assert target.is_visible()
    assert target.inner_text() == "intertwine fold zoo:cnn/cnn-0 --method weights --seed 0"


def test_controls_have_labels_and_tables_have_headers(opened: Any) -> None:
    page = opened()
    for control in page.locator("select:visible, input:visible").all():
        assert control.evaluate("(one) => [...one.labels].map((label) => label.textContent.trim()).join('')") != ""
    assert page.locator("table:not(:has(th[scope]))").count() == 0
    assert page.locator("svg[role=img]:not(:has(> title))").count() == 0
