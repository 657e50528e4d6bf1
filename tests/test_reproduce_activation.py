"""The kind "activation": figure 17 of paper 0, against integrals of scipy."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from intertwine.reproduce.experiments import Result, find, reproduce

NAME = "godfrey-fig17"


def defect(scale: float) -> float:
    """λ√E[(X(Φ(λX) − Φ(X)))²], equation E.22, for λ > 0."""
    density = lambda x: (x * (norm.cdf(scale * x) - norm.cdf(x))) ** 2 * norm.pdf(x)  # noqa: E731
    return scale * sqrt(quad(density, -12, 12, points=[0], limit=500)[0])


def test_the_values_are_those_of_scipy(tmp_path: Path) -> None:
    result = reproduce(NAME, "cpu", folder=tmp_path)
    exact, sampled = (result.numbers[f"GELU, {form}"] for form in ("corrected", "as printed"))
    for label in ("0.39", "0.5", "2", "10"):
        assert exact[label] == pytest.approx([defect(float(label))], rel=1e-7)
        assert np.mean(sampled[label]) == pytest.approx(exact[label][0], rel=0.01)
    assert exact["slope"] == pytest.approx([0.12675], abs=5e-6)
    assert exact["1"] == [0.0]
    assert len(sampled["slope"]) == 2
    curve = {row["scale"]: row["value"] for row in result.rows if row["series"] == "curve"}
    assert len(curve) == 40
    assert curve[1.0] == 0
    assert result.plot(tmp_path / "figure.svg").exists()
    full = Result(result.manifest | {"plan": find(NAME).to_dict()}, result.rows)
    assert {line.verdict for line in full.lines()} == {"agrees"}
    assert [claim.holds for claim in full.claims()] == [True]
