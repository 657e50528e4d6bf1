"""Capture: a PyTorch model and example inputs become a flat list of ATen calls.

`torch.export` (non-strict) runs the forward once on fake tensors; nothing is computed and the model is not changed.
What export refuses ends in a `CaptureError` that names the line of the user's code it stopped at.
"""

from __future__ import annotations

import io
import logging
import operator
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from intertwine.errors import CaptureError, InputError
from intertwine.graph.export import calls_of, inputs_of, without_unused_pieces
from intertwine.graph.model import check_model, empty_caches, fresh_copy, quiet_forward, tied_names
from intertwine.graph.program import Call, Program, fed_by_inputs

#: Parts of torch that print graphs and tracebacks while an export fails.
VERBOSE_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._subclasses.fake_tensor")
#: Ops that draw random numbers: a forward that runs one is not a function, so it has no symmetry.
RANDOM_OPS = frozenset(
    "bernoulli bernoulli_ rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform "
    "uniform_ multinomial poisson exponential_ native_dropout".split()
)


def capture(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Program:
    """Turn `model(*args, **kwargs)` into a `Program`; raises `InputError` or `CaptureError` with what to do next."""
    check_model(model)
    traced = fresh_copy(model)
    kept = CacheWatcher(traced)
    program, marked = _traced(model, traced, kept, args, dict(kwargs or {}))
    _check_calls(program)
    behind = {
        name: ".".join(filter(None, place))
        for place, names in made_of_weights(program, marked).items()
        if _read_again(model, program, kept, place, args, dict(kwargs or {}))
        for name in sorted(names)
    }
    return replace(program, kept=behind)


def _traced(
    model: nn.Module, copy: nn.Module, kept: CacheWatcher, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Program, dict[str, AttributePath]]:
    """The program of a copy of a model, and which of its tensors were kept in attributes."""
    exported = _export(_with_marked_outputs(copy), args, kwargs)
    tied = tied_names(model)
    calls, outputs = calls_of(exported)
    marked = kept.remove_marks(calls)
    calls = without_unused_pieces(calls, outputs)
    return Program(tuple(inputs_of(exported, model, tied)), tuple(calls), outputs, model.training, tied), marked


def _with_marked_outputs(model: nn.Module) -> nn.Module:
    """Let every submodule end in an alias of its (first) output: a call of its own, by which its features are found."""

    def mark(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
        if first is None:
            return None
        leaves[first] = torch.ops.aten.alias(leaves[first])
        return tree_unflatten(leaves, structure)

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(mark)
    return model


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    try:
        with quiet_forward(), _quiet_export(), torch.no_grad():
            return torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        raise _explain(model, args, kwargs, error) from error


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Keep torch.export from printing whole graphs when it fails; the error that follows says what matters."""
    loggers = [logging.getLogger(name) for name in VERBOSE_LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _explain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """The user's view of a failed export: were the inputs wrong, or does the forward do what cannot be captured?"""
    described = [*(_describe(a) for a in args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())]
    given = ", ".join(described) or "no inputs"
    line = user_line(traceback.extract_tb(error.__traceback__))
    first = _first_line(error)
    try:
        with quiet_forward(), torch.no_grad(), TransformDetector() as transforms:
            model(*args, **kwargs)
    except Exception as plain:  # noqa: BLE001  (a user's forward may raise anything)
        at = user_line(traceback.extract_tb(plain.__traceback__))
        return InputError(
            f"{type(model).__name__} was called with {given}, and its own forward raised {type(plain).__name__}: "
            f"{_first_line(plain)} (at {at}). Pass example inputs the model accepts: "
            "intertwine.symmetry(model, *args, **kwargs) calls model(*args, **kwargs)."
        )
    text = str(error).lower()
    if "data-dependent" in text or "unbacked" in text or "guard" in text:
        return CaptureError(
            f"{type(model).__name__} decides by the values of its data at {line}: {first} Shapes and branches must not "
            "depend on data. Capture the part before or after that line as a module of its own, or replace the branch "
            "by torch.where."
        )
    if transforms.line is not None:
        return CaptureError(_no_plain_op("torch.vmap or a transform like it", transforms.line))
    if "fake tensor" in text and "constant" in text:
        return CaptureError(
            f"{type(model).__name__} could not be captured with {given}: its forward writes into the .data of a tensor "
            "or keeps a tensor in an attribute, so it is not a function of its weights alone. Compute with the result "
            "instead, for example F.linear(x, self.weight * self.mask)."
        )
    return CaptureError(
        f"{type(model).__name__} could not be captured with {given}; torch.export stopped at {line}: {first} "
        "Rewrite that line with plain tensor ops, or capture the submodules around it one by one."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype}{tuple(value.shape)}".replace("torch.", "")


def _drops(op: str, call: Call) -> bool:
    """Whether a call runs an active dropout (on its own, inside attention, or between recurrent layers) or RReLU."""
    if "dropout" in op:
        return len(call.args) > 2 and call.args[2] is True and call.args[1] != 0
    if op in ("rrelu", "rrelu_"):  # (input, lower, upper, train)
        return bool(call.kwargs.get("training", call.args[3] if len(call.args) > 3 else False))
    if op == "scaled_dot_product_attention":
        return bool(call.kwargs.get("dropout_p", call.args[4] if len(call.args) > 4 else 0.0))
    if op in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # (input, state, params, biases, layers, dropout, train, …)
        return call.args[4] > 1 and call.args[5] > 0 and bool(call.args[6])
    return False


def _no_plain_op(what: str, place: str) -> str:
    return (
        f"The forward uses {what} at {place}, which is not a plain tensor op (a function transform such as torch.vmap, "
        "or control flow such as torch.cond). Write that line with batched tensor ops, or capture the modules around "
        "it one by one."
    )


def _check_calls(program: Program) -> None:
    """Refuse random ops, and what cannot be followed call by call: control flow as an operator, function transforms."""
    for call in program.calls:
        if not isinstance(call.target, torch._ops.OpOverload) and call.target is not operator.getitem:
            raise CaptureError(_no_plain_op(getattr(call.target, "__name__", str(call.target)), call.place))
    for call in program.calls:
        op = call.op.removeprefix("aten.").split(".")[0]
        if op in RANDOM_OPS or _drops(op, call):
            raise InputError(
                f"The forward draws random numbers ({op} at {call.place}), so it is not a function. Call model.eval() "
                "first, or set the dropout probability to 0."
            )


def _read_again(
    model: nn.Module, program: Program, kept: CacheWatcher, place: AttributePath, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:  # fmt: skip
    """Whether a later forward reads what an earlier one left in an attribute, and a change of mode does not drop it."""
    later = fresh_copy(model)
    kept.put_into(later, place)
    empty_caches(later)
    if all(place != found for found, _ in _tensors(later)):
        return False
    try:
        again = _traced(model, later, CacheWatcher(later), args, kwargs)[0]
    except (InputError, CaptureError):  # it was read, and zeros did not fit
        return True
    first, second = ([c.op for c in p.calls if c.target is not operator.getitem] for p in (program, again))
    return first != second


# -- Function transforms: whether a forward runs torch.vmap or a similar transform, and at which line ------------------


class TransformDetector(TorchFunctionMode):
    """Records the first line at which an op receives a tensor that a function transform has wrapped.

    A failed export only says that it met a fake tensor; the forward itself, run once, shows the cause.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        tensors = (v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        if self.line is None and any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            self.line = user_line(traceback.extract_stack())
        return func(*args, **(kwargs or {}))


def user_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The deepest of some frames that is not torch's own, as `file.py:12`."""
    here = os.path.dirname(__file__)
    own = [f for f in frames if not f.filename.startswith((os.path.dirname(torch.__file__), "<"))]
    own = [f for f in own if os.path.dirname(f.filename) != here]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else "a line of torch's own"


# -- Caches: what a forward leaves in plain attributes of its modules --------------------------------------------------

#: Attributes of every module: what is registered with it, and what torch keeps for itself.
MODULE_INTERNALS = frozenset(vars(nn.Module()))

#: An op that no model runs by itself.
MARKER_OP = "aten.alias_copy.default"

AttributePath = tuple[str, str]  # path of a module, name of its attribute


@dataclass(frozen=True)
class _Blank:
    """The form of a tensor that a trace computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class CacheWatcher:
    """Watches a model while it is traced: which attributes come to hold tensors that were not there before.

    Weights that one forward reads through what it computed from them, and later ones through what it kept, are frozen:
    a cached function of the weights does not move with them. Every such tensor is marked at the end of the trace by a
    call of `MARKER_OP` that nothing reads.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = {place for place, _ in _tensors(model)}
        self.marked: list[AttributePath] = []
        self.values: dict[AttributePath, Any] = {}
        model.register_forward_hook(self._mark)

    def _mark(self, model: nn.Module, _inputs: Any, _output: Any) -> None:
        self.marked = []
        for (path, name), tensor in _tensors(model):
            if (path, name) not in self.before and isinstance(tensor, FakeTensor):
                torch.ops.aten.alias_copy(tensor)
                self.marked.append((path, name))
                self.values[path, name] = tree_map(_blank, vars(model.get_submodule(path))[name])

    def remove_marks(self, calls: list[Call]) -> dict[str, AttributePath]:
        """Remove the marks from the calls: name of the tensor each of them marks → where it was kept."""
        marks = [call for call in calls if call.op == MARKER_OP]
        if not self.marked or len(marks) < len(self.marked):
            return {}
        marks = marks[-len(self.marked) :]
        calls[:] = [call for call in calls if not any(call is mark for mark in marks)]
        return {mark.args[0].name: place for mark, place in zip(marks, self.marked, strict=True)}

    def put_into(self, model: nn.Module, place: AttributePath) -> None:
        """Let a model hold zeros in that attribute, as it holds something after a forward."""
        zeros = tree_map(lambda v: v.zeros() if isinstance(v, _Blank) else v, self.values[place])
        vars(model.get_submodule(place[0]))[place[1]] = zeros


def made_of_weights(program: Program, marked: Mapping[str, AttributePath]) -> dict[AttributePath, frozenset[str]]:
    """Attributes that hold something computed from weights alone → first names of these weights."""
    fed = fed_by_inputs(program)
    made = {s.name: frozenset((s.target,)) for s in program.inputs if s.moves and s.target is not None}
    weights = set(made)
    for call in program.calls:
        made[call.name] = frozenset[str]().union(*(made.get(name, ()) for name in call.reads))
    found: dict[AttributePath, frozenset[str]] = {}
    for name, place in marked.items():
        if made.get(name) and name not in fed and name not in weights:
            found[place] = found.get(place, frozenset()) | made[name]
    return found


def _tensors(model: nn.Module) -> Iterator[tuple[AttributePath, Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in MODULE_INTERNALS:
                yield from (((path, name), v) for v in tree_leaves(value) if isinstance(v, Tensor))


def _blank(value: Any) -> Any:
    return _Blank(tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else value
