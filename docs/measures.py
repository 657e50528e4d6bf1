"""Write the table of measures in docs/measures.md from what the code declares; costs and peers are kept here.

python docs/measures.py
"""

from __future__ import annotations

from math import inf
from pathlib import Path

import intertwine as it
from intertwine.measure.measure import CHANGES

PAGE = Path(__file__).parent / "measures.md"
BEGIN, END = "<!-- measures: begin (written by docs/measures.py) -->", "<!-- measures: end -->"
SHORT = {
    "permutation": "P", "positive scales": "D₊", "signs": "±", "orthogonal": "O", "invertible": "GL",
    "isotropic scale": "s", "translation": "t",
}  # fmt: skip
#: Measure → floating-point operations for n samples of d features (d ≤ n), and memory.
COSTS = {
    "linear_cka": "6nd², one pass, d²", "linear_cka_biased": "6nd², one pass, d²", "rv": "6nd², one pass, d²",
    "channel_cka": "6nd², d²", "rbf_cka": "4n²d, n²", "laplace_cka": "n²d, n²", "relu_cka": "2n²d, n²",
    "orthogonal_procrustes": "2nd² + SVD(d), or SVD(n)", "permutation_procrustes": "2nd² + assignment(d)",
    "relu_procrustes": "2nd² + assignment(d)", "soft_matching": "2nd² + transport(d)", "cca": "QR/SVD, nd²",
    "svcca": "SVD, nd²", "pwcca": "SVD, nd²", "r2": "SVD, nd²", "rsa": "2n²d, n²", "mutual_knn": "2n²d, n²",
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
        cells = (f"`{m.name}`", m.kind, f"[{low}, {high}]", kept, COSTS[m.name], PEERS.get(m.name, ""), m.reference)
        lines.append(f"| {' | '.join(cells)} |")
    legend = ", ".join(f"{short} {change}" for change, short in SHORT.items())
    return "\n".join([*lines, "", f"{legend}; of the second representation."])


def written(page: str) -> str:
    """The page with its table written anew."""
    head, _, rest = page.partition(BEGIN)
    if END not in rest:
        raise SystemExit(f"{PAGE.name} needs the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
