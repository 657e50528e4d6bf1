"""Stack: many networks of one architecture, held and run as one.

    stack = Stack([build("myrtle") for _ in range(8)])
    logits = stack(images)            # (8, batch, …) → (8, batch, 10): images of its own for each network
    stack.module(3)                   # network 3 as an ordinary module

The networks are independent: up to the order of rounding, each one computes what it computes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from intertwine.errors import InputError, MismatchError
from intertwine.lab.zoo.stacking import layers
from intertwine.lab.zoo.stacking.program import ROOT, StackStep, trace

try:
    from intertwine.lab.zoo.stacking import fused
except ImportError:  # triton is not installed
    fused = None


class Stack:
    """Networks of one architecture; `parameters` and `buffers` are stacked along a first axis of networks.

    Args:
        models: the networks, which are copied. device, dtype: of the stacked tensors.
        fast: run convolutions, normalisation and activations in bfloat16 with fused Triton kernels (on a GPU).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        fast: bool = False,
    ) -> None:
        if not models:
            raise InputError("A stack needs at least one network.")
        self.template = copy.deepcopy(models[0]).to("meta")
        self.device, self.dtype, self.fast = torch.device(device), dtype, fast
        if fast and fused is None:
            raise InputError("fast=True needs triton, which is not installed. Pass fast=False.")
        self.training = True
        self.keys: Tensor | None = None  # (networks,) int64: keys of the dropout in training
        self.draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in models[0].modules())
        self.size = len(models)
        self._program = trace(self.template, fuse=fast)
        self._alias, self._saved = _aliases(models[0]), set(models[0].state_dict())
        states = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in models]
        _check_alike(states)
        _check_constants(models)
        names = set(dict(models[0].named_parameters()))
        self.tensors = {name: self._stacked([s[name] for s in states]) for name in states[0]}
        self.parameters = {
            name: self.tensors[name].requires_grad_(states[0][name].requires_grad)
            for name in states[0]
            if name in names
        }
        self.buffers = {name: t for name, t in self.tensors.items() if name not in names}
        self._runners = [self._runner(i, step) for i, step in enumerate(self._program.steps)]

    def __len__(self) -> int:
        return self.size

    def __call__(self, *inputs: Tensor) -> Any:
        """Outputs of every network for inputs (networks, batch, …); pass shared inputs as `x.expand(K, …)`."""
        values = dict(zip(self._program.inputs, inputs, strict=True))
        for step, runner in zip(self._program.steps, self._runners, strict=True):
            values[step.into] = runner(values)
            for name in step.drops:
                del values[name]
        output = self._program.output
        return values[output.name] if isinstance(output, fx.Node) else fx.map_arg(output, lambda n: values[n.name])

    def train(self, mode: bool = True) -> Stack:
        """Turn batch statistics and dropout on or off."""
        self.training = mode
        return self

    def state(self, index: int) -> dict[str, Tensor]:
        """The state dict of one network, on the CPU; tied parameters under their first name only."""
        return {name: t for name, t in self._tensors(index).items() if name in self._saved}

    def _tensors(self, index: int) -> dict[str, Tensor]:
        return {
            name: t.detach()[index].to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, t in self.tensors.items()
        }

    def module(self, index: int) -> nn.Module:
        """One network as an ordinary module, in eval mode."""
        model, state = copy.deepcopy(self.template).to_empty(device="cpu").to(self.dtype), self._tensors(index)
        for path in self._alias:  # moving the template to "meta" untied its parameters
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(self._alias[path]))
        with torch.no_grad():  # non-persistent buffers too
            for name, t in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
                t.copy_(state[name])
        return model.eval()

    def _stacked(self, tensors: list[Tensor]) -> Tensor:
        stacked = torch.stack([t.detach() for t in tensors]).to(self.device)
        if stacked.is_floating_point():
            stacked = stacked.to(self.dtype)
        if self.fast and stacked.dim() == 5:  # the memory layout that the kernels read
            return stacked.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)
        return stacked.contiguous()

    def _of(self, path: str, module: nn.Module) -> dict[str, Tensor]:
        """The stacked tensors of one module, by their names inside it."""
        start = f"{path}." if path else ""
        own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
        return {name: self.tensors[self._alias.get(start + name, start + name)] for name in own}

    def _runner(self, number: int, step: StackStep) -> Callable[[dict[str, Any]], Any]:
        """A function that runs one step on the results so far."""
        if step.chain is not None and fused is not None:
            conv, norm = (self.template.get_submodule(p) if p else None for p in (step.chain.conv, step.chain.norm))
            tensors = [self._of(p, m) if p and m else {} for p, m in ((step.chain.conv, conv), (step.chain.norm, norm))]
            chain = fused.ChainRunner(step.chain, conv, norm, *tensors)  # pyrefly: ignore
            skip = step.chain.skip.name if step.chain.skip is not None else None
            source = step.args[0].name
            return lambda values: chain(values[source], values[skip] if skip else None, self.training)
        if step.call == "get_attr":
            name = self._alias.get(step.args[0], step.args[0])
            return lambda values: self.tensors[name] if name in self.tensors else self._constant(name)
        if step.call is F.scaled_dot_product_attention and not step.kwargs.keys() & {"attn_mask", "dropout_p"}:

            def attend(values: dict[str, Any]) -> Tensor:
                args, kwargs = _filled(step, values)
                return layers.attention(*args, **kwargs)

            return attend
        if step.path is None:
            call = step.call if callable(step.call) else _method(str(step.call))
            return lambda values: layers.vmapped(call, {}, *_filled(step, values), len(self))
        module = self.template.get_submodule(step.path) if step.path != ROOT else self.template
        run = self._layer(number, module, self._of(step.path, module))
        return lambda values: run(*_filled(step, values))

    def _layer(self, number: int, module: nn.Module, tensors: dict[str, Tensor]) -> Callable[..., Any]:
        match module:
            case nn.Linear() if "weight" in tensors:  # not parametrised
                return lambda args, kwargs: layers.linear(module, tensors, *args, **kwargs)
            case nn.Conv2d() if "weight" in tensors:
                return lambda args, kwargs: layers.convolution(module, tensors, *args, **kwargs)
            case nn.modules.batchnorm._BatchNorm():
                return lambda args, kwargs: layers.batch_norm(module, tensors, *args, training=self.training)
            case nn.Dropout():
                return lambda args, kwargs: layers.dropout(
                    module, args[0], self.keys if self.training else None, number
                )
            case _ if isinstance(module, layers.ENTRYWISE):
                return lambda args, kwargs: module(*args)
            case nn.Flatten() if module.start_dim > 0:
                end = module.end_dim + (module.end_dim >= 0)
                return lambda args, kwargs: args[0].flatten(module.start_dim + 1, end)
            case _ if isinstance(module, layers.POOLS):
                return lambda args, kwargs: layers.pooled(module, *args)
        return lambda args, kwargs: layers.vmapped(module.train(self.training), tensors, args, kwargs, len(self))

    def _constant(self, name: str) -> Tensor:
        """A tensor of the template that is neither a parameter nor a buffer: the same for every network."""
        owner, _, attribute = name.rpartition(".")
        constant = getattr(self.template.get_submodule(owner), attribute).to(self.device)
        return constant.expand(len(self), *constant.shape)


def _filled(step: StackStep, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(step.args) == 1 and isinstance(step.args[0], fx.Node) and not step.kwargs:  # the usual case, faster
        return (values[step.args[0].name],), {}
    return fx.map_arg((step.args, step.kwargs), lambda node: values[node.name])


def _method(name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters → their first name."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    }


def _check_alike(states: list[dict[str, Tensor]]) -> None:
    shapes = {name: tuple(t.shape) for name, t in states[0].items()}
    for i, state in enumerate(states):
        if {name: tuple(t.shape) for name, t in state.items()} != shapes:
            raise MismatchError(
                f"The networks of a stack must have one architecture, but network {i} has other tensors than network "
                "0. Make one stack for each architecture."
            )


def _check_constants(models: Sequence[nn.Module]) -> None:
    """Tensors that are neither parameters nor buffers must be the same in all networks."""
    for path, module in models[0].named_modules():
        for name, value in vars(module).items():
            others = [vars(m.get_submodule(path)).get(name) for m in models] if isinstance(value, Tensor) else []
            if not all(isinstance(other, Tensor) and torch.equal(value, other) for other in others):
                raise MismatchError(
                    f"The networks of a stack differ in the tensor {f'{path}.{name}'.strip('.')}, which is neither a "
                    "parameter nor a buffer. Register it as a buffer."
                )
