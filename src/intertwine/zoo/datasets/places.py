"""Where data sets are looked for: a folder, the environment variable INTERTWINE_DATA, and the user's own cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from intertwine.errors import InputError
from intertwine.zoo.datasets.sources import remedy

VARIABLE = "INTERTWINE_DATA"


def cache_folder() -> Path:
    """The user's folder for downloads: `~/.cache/intertwine`, or under XDG_CACHE_HOME where that is set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "intertwine"


def places(folder: str | Path | None = None) -> list[Path]:
    """The folders to search, best first.

    A folder that is given is the only one: data from elsewhere is not what was asked for. Otherwise the folders in
    INTERTWINE_DATA (several are separated as in PATH) come first, then the cache folder.

    >>> [str(place) for place in places(".")]
    ['.']
    """
    if folder is not None:
        given = Path(folder).expanduser()
        if not given.is_dir():
            what = "is a file" if given.exists() else "does not exist"
            raise InputError(f"The data folder {folder} was given, but it {what}. Give the folder with the files.")
        return [given]
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [*(Path(name).expanduser() for name in named if name), cache_folder()]


def nothing_found(name: str, searched: Sequence[Path], files: str) -> InputError:
    """The error for a data set of which no file was found."""
    where = ", ".join(f"{place}{'' if place.is_dir() else ' (no such folder)'}" for place in searched)
    return InputError(
        f"The data set {name} was not found. Searched: {where}; for {files}. {remedy(name)}, and name its folder in "
        f"the call or in the environment variable {VARIABLE}."
    )


def incomplete(name: str, folder: Path, missing: Sequence[str]) -> InputError:
    """The error for a data set of which some files were found and some were not."""
    return InputError(f"{folder} holds only a part of {name}: missing {', '.join(missing)}. {remedy(name)}.")
