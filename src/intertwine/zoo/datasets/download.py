"""Downloading the official files of a data set, each checked against its published sum before it gets its name."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile

from intertwine.errors import InputError
from intertwine.zoo.datasets.checksums import CHUNK, md5_of_file
from intertwine.zoo.datasets.places import cache_folder
from intertwine.zoo.datasets.sources import SOURCES, Source, known_name

TIMEOUT = 30.0  # seconds without a byte
Report = Callable[[str], None]


def _silent(line: str) -> None:
    """The report of a caller who wants none."""


def download(name: str, folder: str | Path | None = None, report: Report = _silent) -> Path:
    """Fetch the official files of a data set and return the folder they are in, which `data` can then be given.

    A transfer that breaks off leaves a `.part` file, and the next call goes on from there. Files that are there already
    are checked and not fetched again.

    Args:
        name: `mnist`, `fashion-mnist` or `cifar10`.
        folder: where to put them; by default the user's cache folder, which `data` searches by itself.
        report: called with a line of text now and then.

    >>> download("cifar10", report=print)  # doctest: +SKIP

    Raises:
        InputError: nothing to download, or no address gave the file; says what was tried and what went wrong.
    """
    known = known_name(name, tuple(SOURCES))
    if known not in SOURCES:
        why = "it comes with scikit-learn" if known == "digits" else "it is a folder of your own"
        raise InputError(f"{known} cannot be downloaded: {why}. Downloads exist for {', '.join(SOURCES)}.")
    target = cache_folder() if folder is None else Path(folder).expanduser()
    for source in SOURCES[known]:
        _fetch(source, target / source.file, report)
    return target


def _make_writable(folder: Path, name: str) -> None:
    """The folder, made if need be; one that nothing can be put into is refused before anything is fetched."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{name} was to be put into {folder}, which cannot be written ({error.strerror}). Choose another folder."
        ) from error


def _fetch(source: Source, file: Path, report: Report) -> None:
    if file.is_file() and md5_of_file(file) == source.md5:
        return report(f"{file.name} is there already")
    part = file.with_name(file.name + ".part")
    _make_writable(file.parent, file.name)
    problems: list[str] = []
    for url in source.urls:
        problem = _attempt(source, url, part, report)
        if problem is None:
            part.replace(file)
            return report(f"{file.name} is complete")
        problems.append(f"{url}: {problem}")
        report(problems[-1])
    raise InputError(
        f"{file.name} could not be downloaded. {'; '.join(problems)}. Try again later, or fetch it by hand and put it "
        f"at {file}; its md5 sum is {source.md5}."
    )


def _attempt(source: Source, url: str, part: Path, report: Report) -> str | None:
    """Complete the `.part` file from one address; what went wrong, or None."""
    for _ in range(2):  # the rest of a file that broke off may not fit its beginning; then once more from the start
        resumed = part.is_file() and part.stat().st_size > 0
        if resumed and md5_of_file(part) == source.md5:
            return None
        try:
            _transfer(source, url, part, report)
        except (OSError, HTTPException) as error:
            reason = _reason(error)
            if not resumed or not _past_the_end(error):
                return reason
        found = md5_of_file(part)
        if found == source.md5:
            return None
        part.unlink()
        if not resumed:
            return f"its md5 sum should be {source.md5} but is {found}, so what came was removed"
    return "the file there is not the published one"


def _transfer(source: Source, url: str, part: Path, report: Report) -> None:
    start = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "intertwine", **({"Range": f"bytes={start}-"} if start else {})}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        if response.status != 206:  # the server sends the whole file, wanted or not
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else source.size
        done = start
        shown = -1
        with part.open("ab" if start else "wb") as stream:
            while chunk := response.read(CHUNK):
                stream.write(chunk)
                done += len(chunk)
                if (tenth := 10 * done // max(total, 1)) > shown:
                    report(f"{url}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")
                    shown = tenth
    if length and done < total:
        raise ConnectionError(f"the transfer broke off: expected {total} bytes, found {done}; call again to go on")


def _past_the_end(error: Exception) -> bool:
    """Whether the server refuses to go on because what is there is already too long."""
    return isinstance(error, urllib.error.HTTPError) and error.code == 416


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"not reachable ({error.reason})"
    return str(error) or type(error).__name__
