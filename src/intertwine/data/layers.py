"""Layers of a network by path or pattern, and what they compute: hooks that capture inputs and outputs during one
forward.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from intertwine.data.batches import Call, calls, copied_arguments, kind_of, on_device_of
from intertwine.errors import InputError, did_you_mean
from intertwine.graph.model import refuse_scripted

# ----------------------------------------------------------------------------------------------------
# Places in a network: the path of a module, and what is wanted of it.
#
# A place in a network is written as the path of a module, as `model.named_modules()` prints it, and what is wanted of it:
#
#     layer1.0.relu             the output; of a tuple or mapping the first tensor in it
#     layer1.0.relu:input       the input instead, likewise
#     layer1.0.relu@2           of the second call, where the forward calls the module more than once
#     lstm[1][0], head[logits]  one item of a tuple or mapping
#     layer1.*.relu, **.conv1   every module that fits: * is one step of a path, ** any number of steps, ? one letter


#: Class → the name of the child that it wraps, which is left out of paths.
WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
#: Modules that are named to somebody who asked for one there is not.
MOST_NAMED = 8


@dataclass(frozen=True)
class LayerPath:
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


def layer_paths(
    model: nn.Module, layers: str | Iterable[str] | None = None, whose: str = "the model"
) -> tuple[LayerPath, ...]:
    """The places that some paths and patterns stand for; None stands for every module without children.

    `whose` is what an error calls the network.

    >>> [str(site) for site in layer_paths(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["*:input", "1"])]
    ['0:input', '1:input', '1']
    """
    table = modules_of(model)
    if layers is None:
        first = {id(module): path for path, module in reversed(table.items())}  # a shared module by its first path
        paths = (path for path, module in table.items() if first[id(module)] == path)
        return tuple(LayerPath(path, exact=False) for path in paths if not any(table[path].children()))
    asked = [layers] if isinstance(layers, str) else list(layers)
    if not asked or not all(isinstance(text, str) for text in asked):
        raise InputError(f"layers must be module paths or None for all leaf modules; found {asked!r}.")
    raw = {name: path for name, path, _ in _walk(model)}
    found: dict[str, LayerPath] = {}
    for text in asked:
        for site in _parse(text, table, raw, whose):
            found.setdefault(str(site), site)
    return tuple(found.values())


def _parse(text: str, table: Mapping[str, nn.Module], raw: Mapping[str, str], whose: str) -> list[LayerPath]:
    if text in table:
        return [LayerPath(text, asked=text)]
    match = _SITE.fullmatch(text)
    if match is None:
        raise InputError(f"The layer {text!r} cannot be read. Write path, path:input, path@2 or path[1].")
    side = "input" if match["side"] == ":input" else "output"
    call = int(match["call"]) if match["call"] else None
    if call == 0:
        raise InputError(f"The layer {text!r} was asked for, but calls are counted from 1: @1 is the first.")
    site = LayerPath("", side, call, tuple(re.findall(r"\[([^\[\]]+)\]", match["keys"])))
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
    return f"There are {', '.join(paths[:MOST_NAMED])}{' …' * (len(paths) > MOST_NAMED)}. " if paths else ""


def _pattern(text: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*\.|\*\*|\*|\?)", text)
    meaning = {"**.": r"(?:.+\.)?", "**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))


# ----------------------------------------------------------------------------------------------------
# Capturing what modules compute, batch by batch, with hooks that live for one forward only.


CaptureCallback = Callable[
    [LayerPath, nn.Module, Tensor], None
]  # told of every tensor that is kept, in the order of the forward

#: Wrappers that need not run: replicas in threads and compiled code do not call hooks as the plain module does.
UNWRAPPED = {"DataParallel", "DistributedDataParallel", "OptimizedModule"}


def wrapped_by(model: nn.Module) -> tuple[nn.Module, str]:
    """The network inside wrappers that need not run, and what the names of its tensors begin with outside.

    >>> inner, prefix = wrapped_by(nn.DataParallel(nn.ReLU()))
    >>> type(inner).__name__, prefix
    ('ReLU', 'module.')
    """
    prefix = ""
    while type(model).__name__ in UNWRAPPED:
        child = WRAPPERS[type(model).__name__]
        model, prefix = getattr(model, child), f"{prefix}{child}."
    return model, prefix


# -- one forward -------------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, no gradients, no fused or compiled paths around hooks; all put back behind.

    Flags are set one by one: `model.eval()` may be overridden, and some overrides change weights.
    """
    flags = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    compiled = "torch._dynamo" in sys.modules  # nothing can be compiled otherwise, and the import takes seconds
    try:
        for module, _ in flags:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in flags:
            module.training = training


@dataclass
class Recorder:
    """Listens at some places during one forward.

    Every tensor is copied as it passes: a later in-place operation, such as ReLU(inplace=True), would overwrite it.
    """

    device: str | torch.device | None = None
    note: CaptureCallback | None = None
    counts: dict[LayerPath, int] = field(default_factory=dict)
    kept: dict[LayerPath, Tensor] = field(
        default_factory=dict
    )  # in the order of the forward; with the number of the call
    failed: dict[LayerPath, str] = field(default_factory=dict)

    @contextmanager
    def listening(self, model: nn.Module, places: Sequence[LayerPath]) -> Iterator[None]:
        """Hooks on the modules of the places, removed behind whatever happens."""
        table = modules_of(model)
        with ExitStack() as stack:
            for site in places:
                if isinstance(table[site.path], torch.jit.ScriptModule):
                    refuse_scripted(table[site.path], site.path)
                self.counts[site] = 0
                stack.callback(self._attach(table[site.path], site).remove)
            yield

    def _attach(self, module: nn.Module, site: LayerPath) -> torch.utils.hooks.RemovableHandle:
        if site.side == "input":

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._hear(site, module, {**dict(enumerate(args)), **kwargs})

            return module.register_forward_pre_hook(before, with_kwargs=True)

        def after(module: nn.Module, _inputs: Any, output: Any) -> None:
            self._hear(site, module, output)

        return module.register_forward_hook(after)

    def _hear(self, site: LayerPath, module: nn.Module, value: Any) -> None:
        self.counts[site] += 1
        if site.call not in (None, self.counts[site]):
            return
        try:
            tensor = pick(value, site.keys)
        except LookupError as reason:
            self.failed.setdefault(site, str(reason.args[0]))
            return
        this = replace(site, call=self.counts[site])
        self.kept[this] = tensor.detach().to(self.device or tensor.device, copy=True)
        if self.note is not None:
            self.note(this, module, self.kept[this])


def pick(value: Any, keys: Sequence[str] = ()) -> Tensor:
    """The tensor under some keys of nested tuples and mappings, or the first one of all.

    >>> pick({"state": (torch.zeros(1), torch.ones(2))}, ["state", "1"])
    tensor([1., 1.])
    """
    for key in keys:
        value = _item(value, key)
    tensor = next(_tensors(value), None)
    if tensor is None:
        raise LookupError(f"gives no tensor, but {kind_of(value)}")
    return tensor


def _item(value: Any, key: str) -> Any:
    index = int(key) if re.fullmatch(r"-?\d+", key) else None
    if isinstance(value, Mapping):
        known = {str(name): item for name, item in value.items()}
        if key in known:
            return known[key]
        raise LookupError(f"gives {kind_of(value)} without the key {key}; its keys are {', '.join(known) or 'none'}")
    if index is None and key in _names(value):
        return getattr(value, key)
    if isinstance(value, (tuple, list)) and index is not None and -len(value) <= index < len(value):
        return value[index]
    raise LookupError(f"gives {kind_of(value)}, which has no item [{key}]")


def _names(value: Any) -> Sequence[str]:
    """The fields of a named tuple or a dataclass."""
    if is_dataclass(value):
        return [part.name for part in fields(value)]
    return getattr(value, "_fields", ()) if isinstance(value, tuple) else ()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))


def record(
    model: nn.Module,
    call: Call,
    places: Sequence[LayerPath],
    device: str | torch.device | None = None,
    note: CaptureCallback | None = None,
) -> tuple[dict[LayerPath, Tensor], dict[str, str]]:
    """One forward: the tensor of every place, and the places found by pattern that gave none, with the reason.

    A place found by pattern whose module is called more than once becomes one place per call.
    """
    model, _ = wrapped_by(model)
    if any(isinstance(tensor, nn.UninitializedParameter) for tensor in model.parameters()):
        raise InputError(
            "The model has lazy modules without weights yet. Run it once; capturing never changes a model."
        )
    recorder = Recorder(device, note)
    args, kwargs = on_device_of(copied_arguments(call), model)
    with evaluating(model), recorder.listening(model, places):
        model(*args, **kwargs)
    found: dict[LayerPath, Tensor] = {}
    skipped: dict[str, str] = {}
    for site in places:
        if reason := _problem(site, recorder):
            if site.exact:
                raise InputError(f"The layer {str(site)!r} was asked for, but {reason}")
            skipped[str(site)] = reason
            continue
        made = recorder.counts[site]
        for number in range(1, made + 1) if site.call is None else [site.call]:
            final = replace(site, call=number) if made > 1 and site.call is None else site
            found[final] = recorder.kept[replace(site, call=number)]
    if not any(site.exact for site in places):  # nobody named an order, so the order of the forward
        order = {this: i for i, this in enumerate(recorder.kept)}
        found = dict(sorted(found.items(), key=lambda item: order[replace(item[0], call=item[0].call or 1)]))
    return found, skipped


def _problem(site: LayerPath, recorder: Recorder) -> str:
    """Why a place has no tensor, or not one that is meant without doubt."""
    made, times = recorder.counts[site], "once" if recorder.counts[site] == 1 else f"{recorder.counts[site]} times"
    if made == 0:
        return (
            "the forward did not call that module. It may be unused for these inputs, called through .forward(), or "
            "computed inside a module above it, as the out_proj of nn.MultiheadAttention is; ask for the module above."
        )
    if site.call is not None and made < site.call:
        return f"the forward called that module {times}. Ask for call {made} or less."
    if site in recorder.failed:
        side = "as its input " if site.side == "input" else ""
        return (
            f"that module {side}{recorder.failed[site]}. Ask for another module, or choose with path[1] or path[key]."
        )
    if site.exact and site.call is None and made > 1:
        choices = ", ".join(str(replace(site, call=k, asked=None)) for k in range(1, min(made, 3) + 1))
        return f"the forward called that module {made} times. Say which call is meant: {choices}{', …' * (made > 3)}."
    return ""


# -- many forwards -----------------------------------------------------------------------------------------------------


def capture(
    model: nn.Module, data: Any, layers: str | Iterable[str] | None = None, device: str | torch.device | None = None
) -> Iterator[dict[str, Tensor]]:
    """What the places compute, one mapping of tensors per batch. The model is as it was whenever a batch is handed out.

    Args:
        data: any iterable of (inputs, targets); inputs are a tensor, a tuple of tensors or a mapping of keywords.
        layers: paths and patterns as the head of this module explains them; None for every module without children.
        device: where the tensors are kept; None leaves them on the model's device.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(inplace=True))
    >>> for batch in capture(model, [(torch.ones(4, 3), None)], ["0", "1:input"]):
    ...     print({path: tuple(x.shape) for path, x in batch.items()}, torch.equal(batch["0"], batch["1:input"]))
    {'0': (4, 2), '1:input': (4, 2)} True
    """
    places = layer_paths(model, layers)
    batches = calls(data)

    def walk() -> Iterator[dict[str, Tensor]]:
        wanted: tuple[LayerPath, ...] = ()
        for call in batches:
            found, _ = record(model, call, wanted or places, device)
            wanted = wanted or exact_paths(found)
            yield {str(site): tensor for site, tensor in found.items()}

    return walk()


def exact_paths(found: Iterable[LayerPath]) -> tuple[LayerPath, ...]:
    """The places of the first batch, which every later batch must have as well."""
    return tuple(replace(site, exact=True) for site in found)
