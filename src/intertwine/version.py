"""The version of this package, as in pyproject.toml; also known if the package is not installed."""

from __future__ import annotations

VERSION = "0.1.0"
