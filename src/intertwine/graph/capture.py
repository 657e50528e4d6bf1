"""Capture: a PyTorch model and example inputs become a flat list of ATen calls.

`torch.export` (non-strict) runs the forward once on fake tensors; nothing is computed and the model is not changed.
What export refuses ends in a `CaptureError` that names the line of the user's code it stopped at.
"""

from __future__ import annotations

import io
import logging
import operator
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from intertwine.errors import CaptureError, InputError
from intertwine.graph.caches import Kept, Place, made_of_weights, same_ops
from intertwine.graph.copies import copied
from intertwine.graph.exported import calls_of, sources_of, without_idle_pieces
from intertwine.graph.program import Call, Program
from intertwine.graph.transforms import Transforms, user_line

#: Parts of torch that print graphs and tracebacks while an export fails.
TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._subclasses.fake_tensor")
#: Ops that draw random numbers: a forward that runs one is not a function, so it has no symmetry to speak of.
RANDOM_OPS = frozenset(
    "bernoulli bernoulli_ rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform "
    "uniform_ multinomial poisson exponential_ native_dropout".split()
)


def capture(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Program:
    """Turn `model(*args, **kwargs)` into a `Program`; raises `InputError` or `CaptureError` with what to do next."""
    check_model(model)
    traced = fresh_copy(model)
    kept = Kept(traced)
    program, marked = _traced(model, traced, kept, args, dict(kwargs or {}))
    _refuse_what_is_no_op(program)
    _refuse_randomness(program)
    behind = {
        name: ".".join(filter(None, place))
        for place, names in made_of_weights(program, marked).items()
        if _read_again(model, program, kept, place, args, dict(kwargs or {}))
        for name in sorted(names)
    }
    return replace(program, kept=behind)


def _traced(
    model: nn.Module, copy: nn.Module, kept: Kept, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Program, dict[str, Place]]:
    """The program of a copy of a model, and which of its tensors were kept in attributes."""
    exported = _export(_with_marked_outputs(copy), args, kwargs)
    tied = tied_names(model)
    sources = tuple(sources_of(exported, model, tied))
    calls, outputs = calls_of(exported)
    marked = kept.taken_from(calls)
    calls = without_idle_pieces(calls, outputs)
    return Program(sources, tuple(calls), outputs, model.training, tied), marked


def fresh_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules around the same tensors, with the caches that some layers keep between forwards emptied.

    Tracing may write to a module's attributes, and a cached function of the weights would hide them; neither must touch
    the user's model. Layers that cache drop it when they change to training mode, so the copy goes there and back.
    """
    fresh = copied(model, (*model.parameters(), *model.buffers()))
    empty_caches(fresh)
    return fresh


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


def empty_caches(model: nn.Module) -> None:
    """Make layers forget what they computed from their weights in an earlier forward; modes are left as they were."""
    modes = {name: module.training for name, module in model.named_modules()}
    top = model.training
    model.train(True)
    model.train(top)
    for name, module in model.named_modules():
        module.training = modes.get(name, top)


def check_model(model: nn.Module) -> None:
    """Raise `InputError` for what no symmetry can be found of: not a module, meta, quantised, complex or integer."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"Asked for the symmetry of a {type(model).__name__}, but a torch.nn.Module is needed. "
            "Pass the model object itself; load a checkpoint into its module first (model.load_state_dict)."
        )
    refuse_scripted(model)
    for _, module in model.named_modules():
        if type(module).__module__.startswith(
            ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")
        ):
            raise InputError(
                f"The model holds a quantised layer ({type(module).__name__}); its integer weights have no "
                f"continuous "
                "symmetry and cannot be moved. Analyse the float model before it is quantised."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"Parameter {name!r} lies on the meta device and has no values. Materialise the model first, "
                f"for example "
                "model.to_empty(device='cpu') and load a state dict."
            )
        if parameter.is_quantized or not parameter.dtype.is_floating_point:
            kind = "complex" if parameter.dtype.is_complex else "not floating point"
            raise InputError(
                f"Parameter {name!r} is {kind} ({parameter.dtype}); only real floating-point parameters are "
                f"supported. "
                "Store complex weights as two real tensors, and integer tables as buffers."
            )


def refuse_scripted(model: nn.Module, path: str = "") -> None:
    """Refuse scripted and traced modules inside a network, or inside the part of it at `path`.

    They run as one piece: no hook is called inside, their layers are of no known class, and no op of them can be read.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            full = ".".join(filter(None, (path, name)))
            which = repr(full) if full else "The model"
            raise InputError(
                f"{which} is a scripted or traced module ({type(module).__name__}), which cannot be "
                "read op by op or watched while it runs. Pass the module it was made from, with its weights loaded."
            )


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    try:
        with quiet_forward(), _quiet_export(), torch.no_grad():
            return torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        raise _explain(model, args, kwargs, error) from error


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Keep torch.export from printing whole graphs when it fails; the error that follows says what matters."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def quiet_forward() -> Iterator[None]:
    """Run a forward without fused attention fast paths (one opaque op would hide the heads) and without warnings."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def _explain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
    """The user's view of a failed export: were the inputs wrong, or does the forward do what cannot be captured?"""
    given = (
        ", ".join([*(_describe(a) for a in args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())]) or "no inputs"
    )
    line = _user_line(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    try:
        with quiet_forward(), torch.no_grad(), Transforms() as transforms:
            model(*args, **kwargs)
    except Exception as plain:  # noqa: BLE001  (a user's forward may raise anything, and its words are handed on)
        reason = str(plain).strip().splitlines()[0] if str(plain).strip() else type(plain).__name__
        return InputError(
            f"{type(model).__name__} was called with {given}, and its own forward raised {type(plain).__name__}: "
            f"{reason} (at {_user_line(plain)}). Pass example inputs the model accepts: "
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
            "or keeps a tensor in an attribute, so it is no function of its weights alone. Compute with the result "
            "instead, for example F.linear(x, self.weight * self.mask)."
        )
    return CaptureError(
        f"{type(model).__name__} could not be captured with {given}; torch.export stopped at {line}: {first} "
        "Rewrite that line with plain tensor ops, or capture the submodules around it one by one."
    )


def _describe(value: Any) -> str:
    return (
        f"{value.dtype}{tuple(value.shape)}".replace("torch.", "")
        if isinstance(value, Tensor)
        else type(value).__name__
    )


def _user_line(error: BaseException) -> str:
    """The deepest line of the traceback that is not torch's own."""
    return user_line(traceback.extract_tb(error.__traceback__))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer name → the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names[name] = first.setdefault(id(tensor), name)
    return names


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


def _refuse_what_is_no_op(program: Program) -> None:
    """Control flow kept as an operator, or a function transform, cannot be followed call by call."""
    for call in program.calls:
        if not isinstance(call.target, torch._ops.OpOverload) and call.target is not operator.getitem:
            raise CaptureError(_no_plain_op(getattr(call.target, "__name__", str(call.target)), call.place))


def _no_plain_op(what: str, place: str) -> str:
    return (
        f"The forward uses {what} at {place}, which is no plain tensor op (a function transform such as torch.vmap, or "
        "control flow such as torch.cond). Write that line with batched tensor ops, or capture the modules around it "
        "one by one."
    )


def _refuse_randomness(program: Program) -> None:
    for call in program.calls:
        op = call.op.removeprefix("aten.").split(".")[0]
        if op in RANDOM_OPS or _drops(op, call):
            raise InputError(
                f"The forward draws random numbers ({op} at {call.place}), so it is not one "
                "function. Call model.eval() first, or set the dropout probability to 0."
            )


def _read_again(
    model: nn.Module, program: Program, kept: Kept, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a later forward reads what an earlier one left in an attribute, and a change of mode does not drop it."""
    later = fresh_copy(model)
    kept.put_into(later, place)
    empty_caches(later)
    if not Kept.holds(later, place):
        return False
    try:
        again = _traced(model, later, Kept(later), args, kwargs)[0]
    except (InputError, CaptureError):  # it was read, and zeros did not fit
        return True
    return not same_ops(program, again)
