"""The version of this package, as pyproject.toml has it; known also where the package is on the path uninstalled."""

from __future__ import annotations

VERSION = "0.1.0"
