"""Places in a network: the path of a module, and what is wanted of it.

A place in a network is written as the path of a module, as `model.named_modules()` prints it, and what is wanted of it:

    layer1.0.relu             the output; of a tuple or mapping the first tensor in it
    layer1.0.relu:input       the input instead, likewise
    layer1.0.relu@2           of the second call, where the forward calls the module more than once
    lstm[1][0], head[logits]  one item of a tuple or mapping
    layer1.*.relu, **.conv1   every module that fits: * is one step of a path, ** any number of steps, ? one letter
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from intertwine.errors import InputError, did_you_mean

#: Class → the name of the child that it wraps, which is left out of paths.
WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
#: Modules that are named to somebody who asked for one there is not.
SHOWN = 8


@dataclass(frozen=True)
class Site:
    """One place of a network. `exact` is False where it was found by a pattern or asked for by no name at all."""

    path: str
    side: str = "output"
    call: int | None = None
    keys: tuple[str, ...] = ()
    asked: str | None = None
    exact: bool = True

    def __str__(self) -> str:
        if self.asked is not None:
            return self.asked
        side = ":input" if self.side == "input" else ""
        call = f"@{self.call}" if self.call else ""
        return self.path + side + call + "".join(f"[{key}]" for key in self.keys)


_SITE = re.compile(r"(?P<path>.*?)(?P<side>:input|:output)?(?:@(?P<call>\d+))?(?P<keys>(?:\[[^\[\]]+\])*)")


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path → module, every name of a shared module included; the wrappers of DataParallel and compile are seen through.

    >>> list(modules_of(nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))))
    ['', '0', '1']
    """
    return {plain: module for _, plain, module in _walk(model)}


def _walk(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """The path as torch prints it, the path without wrappers, and the module."""
    plain: dict[str, str] = {}
    seen: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        if not name:
            plain[name] = ""
        elif WRAPPERS.get(type(seen[parent]).__name__) == last:
            plain[name] = plain[parent]
        else:
            plain[name] = f"{plain[parent]}.{last}".removeprefix(".")
        seen[name] = module
        yield name, plain[name], module


def sites(model: nn.Module, layers: str | Iterable[str] | None = None, whose: str = "the model") -> tuple[Site, ...]:
    """The places that some paths and patterns stand for; None stands for every module without children.

    `whose` is what an error calls the network.

    >>> [str(site) for site in sites(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["*:input", "1"])]
    ['0:input', '1:input', '1']
    """
    table = modules_of(model)
    if layers is None:
        first = {id(module): path for path, module in reversed(table.items())}  # a shared module by its first path
        paths = (path for path, module in table.items() if first[id(module)] == path)
        return tuple(Site(path, exact=False) for path in paths if not any(table[path].children()))
    asked = [layers] if isinstance(layers, str) else list(layers)
    if not asked or not all(isinstance(text, str) for text in asked):
        raise InputError(f"layers must be module paths or None for all leaf modules; found {asked!r}.")
    raw = {name: path for name, path, _ in _walk(model)}
    found: dict[str, Site] = {}
    for text in asked:
        for site in _parse(text, table, raw, whose):
            found.setdefault(str(site), site)
    return tuple(found.values())


def _parse(text: str, table: Mapping[str, nn.Module], raw: Mapping[str, str], whose: str) -> list[Site]:
    if text in table:
        return [Site(text, asked=text)]
    match = _SITE.fullmatch(text)
    if match is None:
        raise InputError(f"The layer {text!r} cannot be read. Write path, path:input, path@2 or path[1].")
    side = "input" if match["side"] == ":input" else "output"
    call = int(match["call"]) if match["call"] else None
    if call == 0:
        raise InputError(f"The layer {text!r} was asked for, but calls are counted from 1: @1 is the first.")
    site = Site("", side, call, tuple(re.findall(r"\[([^\[\]]+)\]", match["keys"])))
    path = match["path"]
    if path in table or path in raw:
        return [replace(site, path=path if path in table else raw[path], asked=text)]
    fitting = [name for name in table if name and _pattern(path).fullmatch(name)] if set("*?") & set(path) else []
    if not fitting:
        what = f"no module of {whose} fits it" if set("*?") & set(path) else f"{whose} has no module of that path"
        raise InputError(
            f"The layer {text!r} was asked for, but {what}. {did_you_mean(path, table) or _some(table)}"
            "Paths are those of model.named_modules(); in a pattern * is one step of a path and ** any number of steps."
        )
    return [replace(site, path=name, exact=False) for name in fitting]


def _some(table: Mapping[str, nn.Module]) -> str:
    """The sentence that names the first few modules there are."""
    paths = [path for path in table if path]
    return f"There are {', '.join(paths[:SHOWN])}{' …' * (len(paths) > SHOWN)}. " if paths else ""


def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.|\*\*|\*|\?)", text)
    meaning = {"**.": r"(?:.+\.)?", "**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))
