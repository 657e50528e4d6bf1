"""The official files of each data set: URLs and checksums, the folders to search, and the download."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile

from intertwine.errors import InputError, unknown_name

#: The names that `data` reads.
NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "imagefolder")
#: The environment variable with folders to search.
VARIABLE = "INTERTWINE_DATA"
CHUNK = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
DownloadProgress = Callable[[str], None]


@dataclass(frozen=True)
class DownloadFile:
    """One file to download: its path in the data folder, md5 sum, size and URLs."""

    file: str
    md5: str
    size: int
    urls: tuple[str, ...]


def _idx(folder: str, mirrors: tuple[str, ...], files: tuple[tuple[str, str, int], ...]) -> tuple[DownloadFile, ...]:
    return tuple(
        DownloadFile(f"{folder}/{file}.gz", md5, size, tuple(f"{mirror}{file}.gz" for mirror in mirrors))
        for file, md5, size in files
    )


SOURCES: dict[str, tuple[DownloadFile, ...]] = {
    "mnist": _idx(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            ("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
    ),
    "fashion-mnist": _idx(
        "fashion-mnist",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            ("train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
            ("t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
    ),
    "cifar10": (
        DownloadFile(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            170_052_171,
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        ),
    ),
}

#: md5 sums of the unpacked files, by data set.
UNPACKED: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels": "a25bea736e30d166cdddb491f175f624",
        "t10k-images": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion-mnist": {
        "train-images": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "cifar10": {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
}


def known_name(name: str, names: Sequence[str] = NAMES) -> str:
    """The usual spelling of a data set's name; capitals, hyphens and underscores do not matter.

    Args:
        name: as the user writes it.
        names: those that the error message lists.

    >>> known_name("CIFAR-10"), known_name("FashionMNIST")
    ('cifar10', 'fashion-mnist')
    """
    letters = str.maketrans("", "", "-_ ")
    for known in NAMES:
        if name.lower().translate(letters) == known.translate(letters):
            return known
    folder = " Or read a folder of images with folder:PATH." if "imagefolder" in names else ""
    raise InputError(unknown_name("data set", name, names) + folder)


def remedy(name: str) -> str:
    """The advice on how to get the files of a data set."""
    first = SOURCES[name][0].urls[0]
    address = first if len(SOURCES[name]) == 1 else first.rpartition("/")[0] + "/"
    return f"Get it with `intertwine zoo download {name}`, or from {address}"


def md5_of_file(file: Path) -> str:
    """The md5 sum of a file, read in chunks."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def verify(contents: bytes, where: str | Path, name: str, md5: str, size: int) -> None:
    """Raise unless the contents of a file have the published md5 sum.

    Args:
        contents: of the file. where: its path, for the message. name: the data set it belongs to.
        md5: the published sum. size: the published size; a shorter file is reported as truncated.

    >>> verify(b"hello", "greeting", "mnist", "5d41402abc4b2a76b9719d911017c592", 5)
    """
    found = hashlib.md5(contents, usedforsecurity=False).hexdigest()
    if found == md5:
        return
    if len(contents) < size:
        raise truncated_error(where, name, size, len(contents))
    owner = next((known for known, sums in UNPACKED.items() if found in sums.values()), None)
    belongs = f" (it belongs to {owner})" if owner else ""
    raise InputError(
        f"{where} is not the file that was published for {name}: its md5 sum should be {md5} but is {found}{belongs}. "
        f"{remedy(name)}, or pass check=False to read the file without this check."
    )


def truncated_error(where: str | Path, name: str, expected: int, found: int) -> InputError:
    """The error for a file that ends too early."""
    return InputError(f"{where} is truncated: it should hold {expected} bytes but holds {found}. {remedy(name)}.")


def not_found_error(name: str, folders: Sequence[Path], files: str) -> InputError:
    """The error for a data set without any file in the folders."""
    searched = ", ".join(f"{folder}{'' if folder.is_dir() else ' (no such folder)'}" for folder in folders)
    return InputError(
        f"The data set {name} was not found. Searched: {searched}; for {files}. {remedy(name)}, and pass its folder or "
        f"name it in the environment variable {VARIABLE}."
    )


def incomplete_error(name: str, folder: Path, missing: Sequence[str]) -> InputError:
    """The error for a data set with some of its files missing."""
    return InputError(f"{folder} holds only a part of {name}: missing {', '.join(missing)}. {remedy(name)}.")


def cache_folder() -> Path:
    """The user's folder for downloads: `~/.cache/intertwine`, or under XDG_CACHE_HOME where that is set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "intertwine"


def places(folder: str | Path | None = None) -> list[Path]:
    """The folders to search, in order.

    A given folder is the only one, so that data never comes from elsewhere. Otherwise the folders in INTERTWINE_DATA
    (separated as in PATH) come first, then the cache folder.

    >>> [str(place) for place in places(".")]
    ['.']
    """
    if folder is not None:
        given = Path(folder).expanduser()
        if not given.is_dir():
            what = "is a file" if given.exists() else "does not exist"
            raise InputError(f"The data folder {folder} {what}. Give the folder that holds the files.")
        return [given]
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [*(Path(name).expanduser() for name in named if name), cache_folder()]


def download(name: str, folder: str | Path | None = None, progress: DownloadProgress = lambda line: None) -> Path:
    """Fetch the official files of a data set and return their folder, which `data` accepts.

    An interrupted transfer leaves a `.part` file, and the next call resumes it. Files that are already there are
    checked and not fetched again.

    Args:
        name: `mnist`, `fashion-mnist` or `cifar10`.
        folder: where to put them; by default the user's cache folder, which `data` searches by itself.
        progress: called with a line of text from time to time.

    >>> download("cifar10", progress=print)  # doctest: +SKIP

    Raises:
        InputError: nothing to download, or no URL gave the file; the message lists the attempts and their errors.
    """
    known = known_name(name, tuple(SOURCES))
    if known not in SOURCES:
        why = "it comes with scikit-learn" if known == "digits" else "it is a folder of your own"
        raise InputError(f"{known} cannot be downloaded: {why}. Downloads exist for {', '.join(SOURCES)}.")
    target = cache_folder() if folder is None else Path(folder).expanduser()
    for source in SOURCES[known]:
        _fetch(source, target / source.file, progress)
    return target


def _fetch(source: DownloadFile, file: Path, progress: DownloadProgress) -> None:
    if file.is_file() and md5_of_file(file) == source.md5:
        return progress(f"{file.name} is there already")
    try:  # before anything is fetched
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise InputError(
            f"{file.name} cannot be saved: {file.parent} is not writable ({error.strerror}). Choose another folder."
        ) from error
    part = file.with_name(file.name + ".part")
    problems: list[str] = []
    for url in source.urls:
        problem = _attempt(source, url, part, progress)
        if problem is None:
            part.replace(file)
            return progress(f"{file.name} is complete")
        problems.append(f"{url}: {problem}")
        progress(problems[-1])
    raise InputError(
        f"{file.name} could not be downloaded. {'; '.join(problems)}. Try again later, or fetch it by hand and put it "
        f"at {file}; its md5 sum is {source.md5}."
    )


def _attempt(source: DownloadFile, url: str, part: Path, progress: DownloadProgress) -> str | None:
    """Complete the `.part` file from one URL; returns the reason of a failure, or None."""
    for _ in range(2):  # a resumed file may not match its beginning; then start again
        resumed = part.is_file() and part.stat().st_size > 0
        if resumed and md5_of_file(part) == source.md5:
            return None
        try:
            _transfer(source, url, part, progress)
        except (OSError, HTTPException) as error:
            too_long = isinstance(error, urllib.error.HTTPError) and error.code == 416  # nothing left to resume
            reason = _reason(error)
            if not resumed or not too_long:
                return reason
        found = md5_of_file(part)
        if found == source.md5:
            return None
        part.unlink()
        if not resumed:
            return f"its md5 sum should be {source.md5} but is {found}, so the download was deleted"
    return "the file there is not the published one"


def _transfer(source: DownloadFile, url: str, part: Path, progress: DownloadProgress) -> None:
    start = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "intertwine", **({"Range": f"bytes={start}-"} if start else {})}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        if response.status != 206:  # the server ignores the range and sends the whole file
            start = 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else source.size
        done, shown = start, -1
        with part.open("ab" if start else "wb") as stream:
            while chunk := response.read(CHUNK):
                stream.write(chunk)
                done += len(chunk)
                if (tenth := 10 * done // max(total, 1)) > shown:
                    progress(f"{url}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")
                    shown = tenth
    if length and done < total:
        raise ConnectionError(f"the transfer was interrupted: expected {total} bytes, got {done}; call again to resume")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"not reachable ({error.reason})"
    return str(error) or type(error).__name__
