"""Layers of a network by path or pattern, and hooks that capture their inputs and outputs during one forward.

A layer is written as the path of its module, as `model.named_modules()` prints it:

    layer1.0.relu             the output; of a tuple or mapping the first tensor in it
    layer1.0.relu:input       the input instead
    layer1.0.relu@2           of the second call, if the forward calls the module more than once
    lstm[1][0], head[logits]  one item of a tuple or mapping
    layer1.*.relu, **.conv1   every module that matches: * is one step of a path, ** any number of steps, ? one letter
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

from intertwine.data.batches import Call, copied_arguments, kind_of, on_device_of
from intertwine.errors import InputError, did_you_mean
from intertwine.graph.model import refuse_scripted

#: Class → the name of the child that it wraps, which is left out of paths.
WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
#: Wrappers that need not run: replicas in threads and compiled code do not call hooks as the plain module does.
UNWRAPPED = {"DataParallel", "DistributedDataParallel", "OptimizedModule"}
#: How many modules an error lists at most.
MOST_NAMED = 8
#: Called with every captured tensor, in the order of the forward.
CaptureCallback = Callable[["LayerPath", nn.Module, Tensor], None]

_LAYER = re.compile(r"(?P<path>.*?)(?P<side>:input|:output)?(?:@(?P<call>\d+))?(?P<keys>(?:\[[^\[\]]+\])*)")
_WILDCARDS = {"**.": r"(?:.+\.)?", "**": r".*", "*": r"[^.]*", "?": r"[^.]"}


@dataclass(frozen=True)
class LayerPath:
    """One input or output of a module. `exact` is False if a pattern or `layers=None` selected it."""

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


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Path → module, under every name of a shared module; wrappers such as DataParallel are left out of paths.

    >>> list(modules_of(nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))))
    ['', '0', '1']
    """
    return {plain: module for _, plain, module in _walk(model)}


def _walk(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """The path as torch prints it, the path without wrappers, and the module."""
    plain: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        if not name:
            plain[name] = ""
        elif WRAPPERS.get(type(modules[parent]).__name__) == last:
            plain[name] = plain[parent]
        else:
            plain[name] = f"{plain[parent]}.{last}".removeprefix(".")
        modules[name] = module
        yield name, plain[name], module


def distinct_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Path → module, a shared module under its first path only."""
    table = modules_of(model)
    first = {id(module): path for path, module in reversed(table.items())}
    return {path: module for path, module in table.items() if first[id(module)] == path}


def layer_paths(
    model: nn.Module, layers: str | Iterable[str] | None = None, whose: str = "the model"
) -> tuple[LayerPath, ...]:
    """The layers that some paths and patterns select; None selects every module without children.

    `whose` is the name of the network in errors.

    >>> [str(layer) for layer in layer_paths(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["*:input", "1"])]
    ['0:input', '1:input', '1']
    """
    if layers is None:
        distinct = distinct_modules(model)
        return tuple(LayerPath(path, exact=False) for path, module in distinct.items() if not any(module.children()))
    given = [layers] if isinstance(layers, str) else list(layers)
    if not given or not all(isinstance(text, str) for text in given):
        raise InputError(f"layers must be module paths, or None for all modules without children; found {given!r}.")
    table, raw = modules_of(model), {name: path for name, path, _ in _walk(model)}
    found: dict[str, LayerPath] = {}
    for text in given:
        for layer in _parse(text, table, raw, whose):
            found.setdefault(str(layer), layer)
    return tuple(found.values())


def _parse(text: str, table: Mapping[str, nn.Module], raw: Mapping[str, str], whose: str) -> list[LayerPath]:
    if text in table:
        return [LayerPath(text, asked=text)]
    match = _LAYER.fullmatch(text)
    if match is None:
        raise InputError(f"The layer {text!r} cannot be read. Write path, path:input, path@2 or path[1].")
    side = "input" if match["side"] == ":input" else "output"
    call = int(match["call"]) if match["call"] else None
    if call == 0:
        raise InputError(f"Calls are counted from 1, but the layer is {text!r}: @1 is the first.")
    layer = LayerPath("", side, call, tuple(re.findall(r"\[([^\[\]]+)\]", match["keys"])))
    path = match["path"]
    if path in table or path in raw:
        return [replace(layer, path=path if path in table else raw[path], asked=text)]
    is_pattern = bool(set("*?") & set(path))
    pattern = "".join(_WILDCARDS.get(part, re.escape(part)) for part in re.split(r"(\*\*\.|\*\*|\*|\?)", path))
    matching = [name for name in table if name and re.fullmatch(pattern, name)] if is_pattern else []
    if not matching:
        paths = [name for name in table if name]
        listed = f"{', '.join(paths[:MOST_NAMED])}{' …' * (len(paths) > MOST_NAMED)}"
        what = f"no module of {whose} matches it" if is_pattern else f"{whose} has no module of that path"
        advice = did_you_mean(path, table) or (f"Its modules: {listed}. " if paths else "")
        raise InputError(
            f"Unknown layer {text!r}: {what}. {advice}"
            "Paths are those of model.named_modules(); in a pattern * is one step of a path and ** any number of steps."
        )
    return [replace(layer, path=name, exact=False) for name in matching]


def wrapped_by(model: nn.Module) -> tuple[nn.Module, str]:
    """The network inside wrappers that need not run, and the prefix of its tensor names outside.

    >>> inner, prefix = wrapped_by(nn.DataParallel(nn.ReLU()))
    >>> type(inner).__name__, prefix
    ('ReLU', 'module.')
    """
    prefix = ""
    while type(model).__name__ in UNWRAPPED:
        child = WRAPPERS[type(model).__name__]
        model, prefix = getattr(model, child), f"{prefix}{child}."
    return model, prefix


# -- One forward -------------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, without gradients, fused kernels or compiled code; all restored afterwards.

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
    """Captures the tensors of some layers during one forward.

    Every tensor is copied at once, because a later in-place operation, such as ReLU(inplace=True), would overwrite it.

    Attributes:
        counts: layer → calls of its module. kept: layer, with the number of the call → tensor, in the order of the
            forward. failed: layer → why there is no tensor.
    """

    device: str | torch.device | None = None
    callback: CaptureCallback | None = None
    counts: dict[LayerPath, int] = field(default_factory=dict)
    kept: dict[LayerPath, Tensor] = field(default_factory=dict)
    failed: dict[LayerPath, str] = field(default_factory=dict)

    @contextmanager
    def listening(self, model: nn.Module, layers: Sequence[LayerPath]) -> Iterator[None]:
        """Hooks on the modules of the layers, always removed afterwards."""
        table = modules_of(model)
        with ExitStack() as stack:
            for layer in layers:
                if isinstance(table[layer.path], torch.jit.ScriptModule):
                    refuse_scripted(table[layer.path], layer.path)
                self.counts[layer] = 0
                stack.callback(self._attach(table[layer.path], layer).remove)
            yield

    def _attach(self, module: nn.Module, layer: LayerPath) -> torch.utils.hooks.RemovableHandle:
        if layer.side == "input":
            return module.register_forward_pre_hook(
                lambda module, args, kwargs: self._record(layer, module, {**dict(enumerate(args)), **kwargs}),
                with_kwargs=True,
            )
        return module.register_forward_hook(lambda module, _inputs, output: self._record(layer, module, output))

    def _record(self, layer: LayerPath, module: nn.Module, value: Any) -> None:
        self.counts[layer] += 1
        if layer.call not in (None, self.counts[layer]):
            return
        try:
            tensor = pick(value, layer.keys)
        except LookupError as reason:
            self.failed.setdefault(layer, str(reason.args[0]))
            return
        this = replace(layer, call=self.counts[layer])
        self.kept[this] = tensor.detach().to(self.device or tensor.device, copy=True)
        if self.callback is not None:
            self.callback(this, module, self.kept[this])


def pick(value: Any, keys: Sequence[str] = ()) -> Tensor:
    """The first tensor under some keys of nested tuples and mappings.

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
    if isinstance(value, Mapping):
        known = {str(name): item for name, item in value.items()}
        if key in known:
            return known[key]
        raise LookupError(f"gives {kind_of(value)} without the key {key}; its keys are {', '.join(known) or 'none'}")
    index = int(key) if re.fullmatch(r"-?\d+", key) else None
    if is_dataclass(value):
        names: Sequence[str] = [part.name for part in fields(value)]
    else:
        names = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()  # of a named tuple
    if index is None and key in names:
        return getattr(value, key)
    if isinstance(value, (tuple, list)) and index is not None and -len(value) <= index < len(value):
        return value[index]
    raise LookupError(f"gives {kind_of(value)}, which has no item [{key}]")


def _tensors(value: Any) -> Iterator[Tensor]:
    items: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (tuple, list)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, part.name) for part in fields(value))
    for item in items:
        yield from _tensors(item)


def record(
    model: nn.Module,
    call: Call,
    layers: Sequence[LayerPath],
    device: str | torch.device | None = None,
    callback: CaptureCallback | None = None,
) -> tuple[dict[LayerPath, Tensor], dict[str, str]]:
    """One forward: the tensor of every layer, and the layers selected by a pattern that have none, with the reason.

    A layer selected by a pattern becomes one layer per call of its module.
    """
    model, _ = wrapped_by(model)
    if any(isinstance(tensor, nn.UninitializedParameter) for tensor in model.parameters()):
        raise InputError(
            "The model has lazy modules without weights yet. Run it once; capturing never changes a model."
        )
    recorder = Recorder(device, callback)
    args, kwargs = on_device_of(copied_arguments(call), model)
    with evaluating(model), recorder.listening(model, layers):
        model(*args, **kwargs)
    found: dict[LayerPath, Tensor] = {}
    skipped: dict[str, str] = {}
    for layer in layers:
        if reason := _problem(layer, recorder):
            if layer.exact:
                raise InputError(f"The layer {str(layer)!r} has no features: {reason}")
            skipped[str(layer)] = reason
            continue
        count = recorder.counts[layer]
        for number in range(1, count + 1) if layer.call is None else [layer.call]:
            final = replace(layer, call=number) if count > 1 and layer.call is None else layer
            found[final] = recorder.kept[replace(layer, call=number)]
    if not any(layer.exact for layer in layers):  # patterns have no order, so the order of the forward
        order = {layer: i for i, layer in enumerate(recorder.kept)}
        found = dict(sorted(found.items(), key=lambda item: order[replace(item[0], call=item[0].call or 1)]))
    return found, skipped


def _problem(layer: LayerPath, recorder: Recorder) -> str:
    """Why a layer has no tensor, or more than one; empty otherwise."""
    count = recorder.counts[layer]
    if count == 0:
        return (
            "the forward did not call that module. It may be unused for these inputs, called through .forward(), or "
            "computed inside a module above it, as the out_proj of nn.MultiheadAttention is; name the module above."
        )
    if layer.call is not None and count < layer.call:
        times = "once" if count == 1 else f"{count} times"
        return f"the forward called that module {times}. Name call {count} or less."
    if layer in recorder.failed:
        side = "as its input " if layer.side == "input" else ""
        return f"that module {side}{recorder.failed[layer]}. Name another module, or choose with path[1] or path[key]."
    if layer.exact and layer.call is None and count > 1:
        choices = ", ".join(str(replace(layer, call=k, asked=None)) for k in range(1, min(count, 3) + 1))
        return f"the forward called that module {count} times. Name one call: {choices}{', …' * (count > 3)}."
    return ""


def exact_paths(found: Iterable[LayerPath]) -> tuple[LayerPath, ...]:
    """The layers of the first batch, which every later batch must have too."""
    return tuple(replace(layer, exact=True) for layer in found)
