"""Write the tables of docs/measures.md: what the code declares, and what bench/measure_validation.py found.

Costs and peers are kept here.

python docs/measures.py
"""

from __future__ import annotations

import json
import sys
from math import inf
from pathlib import Path

import intertwine as it
from intertwine.measure.measure import CHANGES

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import measure_validation

PAGE = Path(__file__).parent / "measures.md"
BEGIN, END = "<!-- measures: begin (written by docs/measures.py) -->", "<!-- measures: end -->"
VALID_BEGIN, VALID_END = "<!-- validity: begin (written by docs/measures.py) -->", "<!-- validity: end -->"
SHORT = {
    "permutation": "P", "positive scales": "D₊", "signs": "±", "orthogonal": "O", "invertible": "GL",
    "isotropic scale": "s", "translation": "t",
}  # fmt: skip
#: Measure → floating-point operations for n samples of d features (d ≤ n), and memory; for others only what is held.
COSTS = {
    "linear_cka": "6nd², one pass, d²", "linear_cka_biased": "6nd², one pass, d²", "rv": "6nd², one pass, d²",
    "kernel_alignment": "6nd², one pass, d²",
    "channel_cka": "6nd², d²", "rbf_cka": "4n²d, n²", "laplace_cka": "n²d, n²", "relu_cka": "2n²d, n²",
    "orthogonal_procrustes": "2nd² + SVD(d), or SVD(n); one pass, d²",
    "permutation_procrustes": "2nd² + assignment(d); one pass, d²",
    "relu_procrustes": "2nd² + assignment(d); one pass, d²", "soft_matching": "2nd² + transport(d); one pass, d²",
    "cca": "SVD, nd²; one pass, d²", "svcca": "SVD, nd²; one pass, d²", "pwcca": "SVD, nd²; one pass, d²",
    "r2": "SVD, nd²; one pass, d²", "rsa": "2n²d, n²", "mutual_knn": "2n²d, n²",
}  # fmt: skip
#: What a survey of public packages (versions of 2022 to 2025, run or read) found; not measured again here.
PEERS = {
    "linear_cka": "right in few: three-term sums in float32 fail on features with a mean; one package divides by a "
    "biased norm, one counts the last batch only",
    "linear_cka_biased": "right in most; float32 matrix norms are off by 0.5 % at 8192²",
    "relu_cka": "one package, slow", "relu_procrustes": "one package; dead channels inflate it",
    "channel_cka": "one package, under the name of orthogonal CKA, which it is not",
    "orthogonal_procrustes": "right in several; one gives NaN for equal inputs in float32",
    "svcca": "wrong in two: a fraction compared with a variance, or no SVD",
    "pwcca": "three packages, three values; one changes with the mean",
    "rsa": "right in several", "soft_matching": "few",
}  # fmt: skip


def table() -> str:
    """One row per measure."""
    heads = ("measure", "kind", "range", "leave it as it is", "cost, memory", "elsewhere", "reference")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for m in it.measures():
        low, high = ("∞" if abs(bound) == inf else f"{bound:.3g}" for bound in m.range)
        kept = " ".join(SHORT[change] for change in CHANGES if change in m.invariances)
        cost = COSTS.get(m.name, f"holds {m.memory}")
        cells = (f"`{m.name}`", m.kind, f"[{low}, {high}]", kept, cost, PEERS.get(m.name, ""), m.reference)
        lines.append(f"| {' | '.join(cells)} |")
    legend = ", ".join(f"{short} {change}" for change, short in SHORT.items())
    return "\n".join([*lines, "", f"{legend}; of the second representation."])


def validity() -> str:
    """The scores of every measure, as they were measured."""
    return measure_validation.table(json.loads(measure_validation.RESULTS.read_text(encoding="utf-8"))["rows"])


def written(page: str) -> str:
    """The page with its tables written anew."""
    return _between(_between(page, BEGIN, END, table()), VALID_BEGIN, VALID_END, validity())


def _between(page: str, begin: str, end: str, text: str) -> str:
    head, _, rest = page.partition(begin)
    if end not in rest:
        raise SystemExit(f"{PAGE.name} needs the lines {begin} and {end}")
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
