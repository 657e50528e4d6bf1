"""Write docs/reproduction.md and its figures again, from the plans under experiments/ and the committed results alone.

python docs/reproduction.py             # the page
python docs/reproduction.py --figures   # and the figures, under docs/images/reproduction
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from intertwine.lab.papers.experiments import Claim, ExperimentResult, PrintedNumber, claims, find, names, read_result
from intertwine.lab.papers.plan import SCALES, ExperimentPlan

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

PAGE = ROOT / "docs" / "reproduction.md"
RESULTS = ROOT / "experiments" / "results"
FIGURES = ROOT / "docs" / "images" / "reproduction"
#: How the names of a paper's experiments begin, and the paper.
PAPERS = {
    "godfrey": "Godfrey et al. 2022, On the Symmetries of Deep Learning Models and their Internal Representations",
    "csiszarik": "Csiszárik et al. 2021, Similarity and Matching of Neural Network Representations",
    "sorensen": "Sorensen 2020, Understanding and Collapsing Symmetries in Neural Network Parameter Spaces",
    "chen": "Chen et al. 2024, Going Beyond Neural Network Feature Similarity",
    "zhou": "Zhou et al. 2023, Going Beyond Linear Mode Connectivity",
    "corrections": "Errors in print",
}
MARKS = {
    "agrees": "agrees",
    "differs": "**differs**",
    "no value": "not measured",
    "no interval": "one pair: no interval",
}
#: Rows whose data or weights are not at hand: what it is, why it was not run, and how somebody who has them would.
ABSENT = {
    "003-F21": (
        "Chen et al. 2024, figure 3: merging in torchvision's VGG-13, -16, -19 and ResNet-50 (weights v1 and v2)",
        "neither ImageNet nor the published weights are at hand; the work itself takes seconds per network",
        "intertwine fold torchvision:vgg16 --weights FILE --data folder:IMAGENET --beta 0.1",
    ),
    "001-C12": (
        "Csiszárik et al. 2021, figure 2, third panel: Inception V1 on CelebA",
        "neither CelebA nor networks of it are at hand; the panels of Tiny-10 and ResNet-20 are above",
        "intertwine stitch A.py:net B.py:net --weights A --weights-b B --at PATH,… --data folder:CELEBA --fit both",
    ),
    "001-C15": (
        "Csiszárik et al. 2021, appendix C.2, as printed: Inception V1 of ImageNet into that of CelebA",
        "neither data set is at hand; csiszarik-cross has the same question between MNIST, turned digits and clothes",
        "intertwine stitch A.py:net B.py:net --weights A --weights-b B --at PATH,… --data folder:CELEBA",
    ),
}
#: What is said above results of scale `cpu`.
SMALL = (
    "What scale `cpu` gives, small networks on small images, is shown so that the way can be judged. It says nothing "
    "about the printed numbers, which are not set beside it; whether a claim holds is told of these networks alone."
)
INTRODUCTION = """\
# The five papers again

Every table and figure of the papers is a plan under `experiments/`. `intertwine reproduce NAME`
carries it out, `intertwine reproduce --list` shows them all. At scale `paper` the setting is the printed one; at
`gpu` there are fewer pairs and epochs, so that it takes minutes on one GPU; at `cpu` small networks on the digits or
MNIST show that the way works.

This page is written by `python docs/reproduction.py` from the result files under
`experiments/results/`; no number on it was typed by hand. A result file holds the rows behind the numbers and the
figure with six significant digits; heat maps in it are coarse, and maps that no figure shows are left out. The
command below each heading makes all of it again; `intertwine reproduce --draw FILE` draws the figure of a file.

*Printed* is the paper's number, *ours* the mean and one standard deviation over pairs or networks. Two numbers agree
when they lie no further apart than two deviations, the paper's and ours taken together, and what the printed number
was rounded by; where the paper gives no deviation, ours alone counts, and where ours is of one pair too, there is no
verdict. Results of scale `gpu` are compared with the printed numbers all the same; a sentence below the table says
where fewer epochs are the reason for a difference. Networks and rows that experiments share count to the time of the
first of them.
"""


def results() -> dict[str, ExperimentResult]:
    """Experiment → the result of its largest scale that was committed."""
    found = {}
    for name in names():
        for scale in SCALES:
            file = RESULTS / f"{name}.{scale}.json"
            if file.is_file():
                found[name] = read_result(file)
                break
    return found


def page(found: Mapping[str, ExperimentResult]) -> str:
    """The whole page."""
    from reproduction_findings import findings  # beside this file

    plans = {name: find(name) for name in names()}
    parts = [INTRODUCTION, "## At a glance", "", *_overview(plans, found), "", "## Findings", "", *findings(found), ""]
    for start, paper in PAPERS.items():
        own = {name: plan for name, plan in plans.items() if name.partition("-")[0] == start}
        if own:
            parts += [f"## {paper}", ""]
            for name, plan in own.items():
                parts += [*_section(name, plan, found.get(name)), ""]
    parts += ["## What could not be run here", "", *_absent()]
    return "\n".join(parts).rstrip() + "\n"


def _absent() -> Iterator[str]:
    """Every row that needs what is not at hand."""
    yield "| row | what it is | why not | the command, where data and weights are |"
    yield "|---|---|---|---|"
    for row, (what, why, command) in ABSENT.items():
        yield f"| {row} | {what} | {why} | `{command}` |"


# -- at a glance -------------------------------------------------------------------------------------------------------


def _overview(plans: Mapping[str, ExperimentPlan], found: Mapping[str, ExperimentResult]) -> Iterator[str]:
    yield "| experiment | rows | scale | numbers that agree | claims that hold | device | time |"
    yield "|---|---|---|---|---|---|---|"
    for name, plan in plans.items():
        yield f"| [{name}](#{name}) | {', '.join(plan.rows)} | {' | '.join(_glance(name, found.get(name)))} |"


def _glance(name: str, result: ExperimentResult | None) -> tuple[str, ...]:
    if result is None:
        return "not run", "", "", "", ""
    if _only_small(result):
        return "not run (`cpu`, below)", "", "", result.manifest["device"], _time(result.manifest["seconds"])
    lines, said = result.lines(), _claimed(name, result)
    agree = _share([line.verdict == "agrees" for line in lines if line.verdict != "no interval"], "one pair", lines)
    hold = _share([claim.holds for claim in said if claim.holds is not None], "not told", said)
    return result.plan["scale"], agree, hold, result.manifest["device"], _time(result.manifest["seconds"])


def _share(held: Sequence[bool], otherwise: str, asked: Sequence[object]) -> str:
    """How many hold of those that could be judged; the reason where none could."""
    return f"{sum(held)} of {len(held)}" if held else otherwise if asked else ""


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


# -- one experiment ----------------------------------------------------------------------------------------------------


def _section(name: str, plan: ExperimentPlan, result: ExperimentResult | None) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield f"{plan.title} ({', '.join(plan.rows)})."
    yield ""
    if result is None or _only_small(result):
        cost = plan.cost.get("gpu") or plan.cost.get("paper") or "not known"
        yield (
            f"Not run: the GPU time at hand went to other experiments. At scale `gpu` it takes {cost}: "
            f"`intertwine reproduce {name} --scale gpu`"
        )
    if result is None:
        return
    if _only_small(result):
        yield ""
        yield SMALL
        yield ""
    for picture in sorted(FIGURES.glob(f"{name}.*")):
        yield f"![{plan.title}](images/reproduction/{picture.name})"
        yield ""
    yield _how(result)
    yield ""
    if not _only_small(result):
        yield from _numbers(result, plan.notes)
    claimed = _claimed(name, result)
    yield from _claims(claimed)
    if "claims" in plan.notes and any(claim.holds is False for claim in claimed):
        yield ""
        yield f"- Where a claim does not hold: {plan.notes['claims']}"
    if "remark" in plan.notes:
        yield ""
        yield f"- {plan.notes['remark']}"


def _only_small(result: ExperimentResult) -> bool:
    """Whether there are results of small networks alone, which say nothing about the printed numbers."""
    return result.plan["scale"] == "cpu"


def _how(result: ExperimentResult) -> str:
    """What was run, in a line."""
    plan, manifest = result.plan, result.manifest
    said = [f"`{manifest['command']}`", manifest["device"].replace("NVIDIA", "one NVIDIA")]
    if plan.get("pairs"):
        pairs = len({row.get("pair") for row in result.rows})
        said.append("1 pair" if pairs == 1 else f"{pairs} pairs")
    if plan.get("networks"):
        epochs = plan["networks"]["changes"].get("epochs")
        recipe = "published networks" if plan["networks"].get("published") else f"recipe {plan['networks']['recipe']}"
        said.append(recipe + (f", {epochs} epochs" if epochs else ""))
    said += [f"{_time(manifest['seconds'])}", manifest["finished"].partition("T")[0]]
    return "; ".join(said) + "." + (f" {manifest['note']}" if "note" in manifest else "")


def _numbers(result: ExperimentResult, notes: Mapping[str, str]) -> Iterator[str]:
    lines, plan = result.lines(), result.plan
    if not lines:
        return
    unit = f", {plan['unit']}" if plan["unit"] else ""
    yield f"| series | place | printed{unit} | ours{unit} | difference | n | verdict |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        cells = (line.series, line.label, _number(line.printed, line.printed_spread), _number(line.mean, line.spread))
        difference = "" if line.difference is None else f"{line.difference:+.3g}"
        yield f"| {' | '.join(cells)} | {difference} | {line.count} | {MARKS[line.verdict]} |"
    yield ""
    said = list(_notes(notes, lines))
    yield from said
    if said:
        yield ""


def _notes(notes: Mapping[str, str], lines: list[PrintedNumber]) -> Iterator[str]:
    """One sentence per series that differs somewhere; the plan's word for all where they have none."""
    different = dict.fromkeys(line.series for line in lines if line.verdict in ("differs", "no interval"))
    for series in different:
        if series in notes:
            yield f"- Where {series} differs: {notes[series]}"
    if "all" in notes and any(series not in notes for series in different):
        yield f"- Where they differ: {notes['all']}"


def _number(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return ""
    return f"{mean:.3g}" if spread is None else f"{mean:.3g} ± {spread:.2g}"


def _claimed(name: str, result: ExperimentResult) -> list[Claim]:
    """The claims of the plan as it is today: one that was added later is tested on the rows that were kept."""
    return claims(find(name, result.plan["scale"]).to_dict(), result.numbers)


def _claims(claimed: Sequence[Claim]) -> Iterator[str]:
    if not claimed:
        return
    yield "| the paper says | holds here | seen |"
    yield "|---|---|---|"
    marks = {True: "yes", False: "**no**", None: "not told"}
    for claim in claimed:
        yield f"| {claim.says} | {marks[claim.holds]} | {claim.seen} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="draw the figures too")
    options = parser.parse_args()
    found = results()
    if options.figures:
        from figures import save_compact  # beside this file

        for name, result in found.items():
            save_compact(result.plot, FIGURES / f"{name}.svg")
    PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
