"""The findings of docs/reproduction.md: where the papers are wrong or silent, each with numbers from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intertwine.lab.papers.experiments import ExperimentResult as Result

Finding = Callable[["Result"], str | None]


def mean(result: Result, series: str, label: str) -> float | None:
    """The mean of a number of a result; None where it was not measured."""
    values = result.numbers.get(series, {}).get(label, [])
    return fmean(values) if values else None


def dead_channels(result: Result) -> str:
    """How far dead channels raise the printed measure."""
    shares = {label: fmean(values) for label, values in result.numbers["dead channels"].items()}
    label = max(shares, key=lambda name: shares[name])
    ways = ("as printed", "without dead channels", "as printed, unrelated")
    printed, live, unrelated = (mean(result, f"G_ReLU, {way}", label) for way in ways)
    return (
        f"A channel that is zero for all images stays zero when divided by its norm, while the divisor counts "
        f"it, so that "
        f"it raises the similarity. At layer {label}, where {shares[label]:.1%} of the channels are dead, the printed "
        f"measure says {printed:.3f}, the same without them {live:.3f}; of unrelated features, with images "
        f"shuffled, it says {unrelated:.3f}. The 0.98 in print, against stitching and CKA, is likely of this kind."
    )


def stitched_dead(result: Result) -> str:
    """The layer of dead channels, as stitching sees it."""
    full = {label: fmean(values) for label, values in result.numbers["full"].items()}
    dead = full.pop("70")
    return (
        f"A linear map behind layer 70 of ResNet-18 costs {dead:.0f} % of accuracy, elsewhere "
        f"{max(full.values()):.0f} % at most. Most of its channels are dead "
        "(godfrey-fig10), so that there is little to carry over."
    )


def absorbing(result: Result) -> str:
    """What merging and absorbing keep at the share of parameters in print."""
    ways = ("as printed", "as published", "as published, statistics reset", "fold_to")
    seen = ", ".join(f"{way} {mean(result, f'vgg16_bn: {way}', '23.03 % left'):.1f} %" for way in ways)
    whole = mean(result, "vgg16_bn: fold_to", "whole")
    return (
        "Networks of 40 epochs have no equal features to merge, but features that others can express: with 23.03 % of "
        f"VGG-16's parameters left, {seen} of the answers are right, of {whole:.1f} % with "
        "all of them. `fold_to` needs no data either."
    )


def baseline(result: Result) -> str:
    """What the printed measure says of unrelated features."""
    own, unrelated = (mean(result, f"G_ReLU, as printed{end}", "10") for end in ("", ", unrelated"))
    centred = mean(result, "G_ReLU, corrected, unrelated", "10")
    return (
        f"Without centring, features that have nothing to do with each other are not at 0: at layer 10 the "
        f"printed measure "
        f"says {own:.3f} of trained pairs and {unrelated:.3f} of the same features with their images "
        f"shuffled; centred, "
        f"unrelated features give {centred:.3f}. Values mean little without that number beside them."
    )


def orthogonal_cka(result: Result) -> str:
    """The printed orthogonal CKA beside linear CKA."""
    rows = [label for label in ("3", "6", "10", "14") if f"orthogonal, as printed, {label}" in result.numbers]
    off = [(a, b) for a in rows for b in rows if a != b]
    means = [
        fmean(fmean(result.numbers[f"orthogonal, {way}, {a}"][b]) for a, b in off)
        for way in ("as printed", "corrected")
    ]
    return (
        'The paper\'s code divides every channel by its norm before it computes the "orthogonal" CKA, which then does '
        f"see rotations (corrections, D7). Between different layers it says {means[0]:.3f} on average, "
        f"linear CKA {means[1]:.3f}."
    )


def printed_and_corrected(name: str, words: str) -> Finding:
    """A sentence about one of the corrections, with both of its numbers."""

    def sentence(result: Result) -> str:
        printed, corrected = (mean(result, way, name) for way in ("as printed", "corrected"))
        return f"{words.format(printed=printed, corrected=corrected)} ({name})"

    return sentence


def averages(result: Result) -> str | None:
    """What averaging sorted networks gives."""
    found = {name: means for name, means in result.numbers.items() if "average of 10, %" in means}
    if not found:
        return None
    words = ", ".join(f"{name} {fmean(means['average of 10, %']):.1f} %" for name, means in found.items())
    return f"Right answers of the average of ten networks: {words}."


def octants(result: Result) -> str:
    """Where sorted points end."""
    octant, region = (mean(result, f"random points: in the {where}", "all") for where in (
        "octant of the sorted ones", "region of the order",
    ))  # fmt: skip
    return (
        f"The three points of the figure do, by chance: of random points {octant:.0f} % end in that octant once they "
        f"are sorted, {region:.0f} % in the region x1 ≤ x2 ≤ x3."
    )


def across_data(result: Result) -> str:
    """What fronts of other data, and untrained ones, keep of the accuracy."""
    fronts = {name: [fmean(values) for values in means.values()] for name, means in result.numbers.items()}
    seen = "; ".join(f"{name} ({', '.join(f'{100 * value:.1f}' for value in means)})" for name, means in fronts.items())
    return (
        "LeNets of MNIST keep, behind fronts trained on other data, in per cent of their own accuracy, layer by layer: "
        f"{seen}. The paper has no untrained fronts beside its own; they tell how much of it the map and the back "
        "alone can do."
    )


def matched_resnet(result: Result) -> str:
    """Barriers of matched ResNet-20 beside the slides' sentence."""
    ways = ("spawned", "independent", "weights", "activations")
    seen = ", ".join(f"{way} {mean(result, f'{way}: barrier', 'error'):.1f}" for way in ways)
    return (
        "Between ResNet-20 of width 1, trained for 30 epochs, matching takes no barrier away. "
        f"Barriers in points of error: {seen}."
    )


def matched_vgg(result: Result) -> str:
    """Barriers of VGG-16, before and after its statistics are estimated again."""
    ways = ("spawned", "independent", "weights", "activations")
    seen = ", ".join(
        f"{way} {mean(result, f'{way}: barrier', 'error'):.1f} and "
        f"{mean(result, f'{way}, statistics reset: barrier', 'error'):.1f}"
        for way in ways
    )
    return (
        "Between VGG-16 with BatchNorm, trained for 20 epochs, barriers in points of error, with the mixed statistics "
        f"and with those estimated again: {seen}. Without that step the paper's picture is not seen."
    )


#: Title, the experiment a finding rests on, and the sentences made from its result.
FINDINGS: list[tuple[str, str, Finding]] = [
    ("Dead channels raise G_ReLU-Procrustes (D6, layer 70*)", "godfrey-fig10", dead_channels),
    ("Layer 70, seen by stitching", "godfrey-fig7", stitched_dead),
    ("The printed Procrustes similarity has no zero (D4, D5)", "godfrey-table2", baseline),
    ("\"Orthogonal\" CKA is not orthogonal (D7)", "godfrey-fig5", orthogonal_cka),
    (
        "NodeSort is canonical for one hidden layer only", "corrections",
        printed_and_corrected(
            "D10", "Of permuted copies of networks with two hidden layers, the printed order brings {printed:.0%} to "
            "one "
            "form; with keys taken after the layer behind is sorted, {corrected:.0%}."
        ),
    ),
    ("Averages of sorted networks", "sorensen-table1", averages),
    ("Sorted points do not all lie in one octant", "sorensen-fig2", octants),
    ("Stitching across data sets needs a control", "csiszarik-cross", across_data),
    (
        "Iterative feature merging must keep its counts", "corrections",
        printed_and_corrected(
            "D11", "Algorithm 1 sets the count of a merged feature back to 1. Eight equal features merged so change "
            "the "
            "output by {printed:.0%}; with counts kept by {corrected:.0e}."
        ),
    ),
    (
        "Connected by a line of low loss does not mean equivalent (Prop. 3.2 of Chen et al.)", "corrections",
        printed_and_corrected(
            "D15", "Two networks with loss {printed:.0e} all along the line between them, whose features no invertible "
            "map "
            "takes into each other: {corrected:.2f} of their size is left over."
        ),
    ),
    ("Merged and absorbed", "chen-fig2a", absorbing),
    ("Matched is not yet connected", "zhou-fig3-resnet20", matched_resnet),
    ("… unless statistics are estimated again", "zhou-fig3-vgg16", matched_vgg),
]  # fmt: skip


def findings(found: Mapping[str, Result]) -> Iterator[str]:
    """One item per finding whose experiment was run."""
    for title, name, sentence in FINDINGS:
        said = sentence(found[name]) if name in found else None
        if said:
            yield f"- **{title}.** {said} ([{name}](#{name}))"
