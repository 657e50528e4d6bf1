"""Which axes a captured tensor has, and the policies that turn it into samples × features; padding is left out.

A layout names the axes of a tensor, one letter each: n samples, c channels, p positions in an image or signal, t
tokens. A convolution gives "ncpp", a transformer "ntc", a linear layer "nc", a recurrent net fed time first "tnc".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from intertwine.argument_types import Float
from intertwine.data.batches import Call
from intertwine.data.layers import LayerPath, pick
from intertwine.errors import InputError, MismatchError, did_you_mean
from intertwine.graph.model import refuse_scripted

#: Policy → what it makes of n samples with C channels at P positions.
POLICIES = {
    "channels": "(n·P, C): every position of every sample is one row",
    "flatten": "(n, C·P): every channel at every position is one feature",
    "pool": "(n, C): the mean over positions",
    "tokens": "(n·T, d): like channels, for layers with tokens only",
    "structured": "(n, C, P): for measures that tell channels from positions",
}
#: Number of axes → the layout if nothing else is known.
DEFAULT_LAYOUTS = {1: "n", 2: "nc", 3: "ntc", 4: "ncpp", 5: "ncppp"}
#: Keyword → the value with which it marks a token as padding.
MASKS = {"attention_mask": False, "src_key_padding_mask": True}

#: Files of torch.nn.modules whose layers have channels first; classes that have channels last.
_CHANNELS_FIRST = {"conv", "batchnorm", "instancenorm", "pooling", "upsampling", "pixelshuffle", "padding"}
_CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag)


# -- Layouts -----------------------------------------------------------------------------------------------------------


def layout_of(module: nn.Module, axes: int, keys: Sequence[str] = ()) -> str | None:
    """The layout of a module's inputs and outputs, or None if the kind of module does not determine it.

    >>> layout_of(nn.Conv1d(2, 2, 1), 3), layout_of(nn.Linear(2, 2), 4), layout_of(nn.ReLU(), 3)
    ('ncp', 'nppc', None)
    """
    files = {base.__module__.removeprefix("torch.nn.modules.") for base in type(module).__mro__}
    two_dimensional = "2d" in type(module).__name__.lower()  # LayerNorm2d of timm and torchvision has channels first
    if files & _CHANNELS_FIRST or isinstance(module, (nn.GroupNorm, nn.LocalResponseNorm)) or two_dimensional:
        return "nc" + "p" * (axes - 2) if axes >= 2 else None
    if isinstance(module, _CHANNELS_LAST):
        return {2: "nc", 3: "ntc"}.get(axes, "n" + "p" * (axes - 2) + "c") if axes >= 2 else None
    is_first = not keys or keys[0] == "0"
    if isinstance(module, nn.RNNBase) and axes == 3 and not is_first:
        return "cnc"  # the last state of every layer and direction
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and axes == 3 and is_first:
        return "ntc" if module.batch_first else "tnc"
    return None


def check_layout(x: Tensor, layout: str | None = None) -> str:
    """The layout of a tensor, the default one for its number of axes if none is given.

    >>> check_layout(torch.zeros(2, 3, 4, 4))
    'ncpp'
    """
    if not x.dim():
        raise InputError(
            "A layer with one number for all samples together has no layout. Name a layer with one entry per sample."
        )
    if layout is None and x.dim() in DEFAULT_LAYOUTS:
        return DEFAULT_LAYOUTS[x.dim()]
    advice = 'A layout has one letter per axis: n samples (once), c channels, p positions, t tokens; such as "ncpp".'
    if layout is None:
        raise InputError(f"A tensor {tuple(x.shape)} has {x.dim()} axes and no default layout. {advice}")
    if len(layout) != x.dim() or layout.count("n") != 1 or not set(layout) <= set("ncpt"):
        raise InputError(f"The layout {layout!r} does not fit a tensor {tuple(x.shape)}. {advice}")
    return layout


@dataclass
class LayoutFinder:
    """Finds the layout of every captured tensor during the first forward.

    The kind of module determines it if it can. Other modules, such as activations and blocks, take the layout of the
    last determined output of the same shape, or else of the next one: a ReLU after Conv1d has channels first, after
    Linear last.

    Attributes:
        recent: shape → the last layout determined for it. open: shape → layers that wait for one.
        found: layer → layout. kinds: layer → class of its module.
    """

    recent: dict[tuple[int, ...], str] = field(default_factory=dict)
    found: dict[LayerPath, str] = field(default_factory=dict)
    kinds: dict[LayerPath, str] = field(default_factory=dict)
    open: dict[tuple[int, ...], list[LayerPath]] = field(default_factory=dict)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hooks on all modules of the model, removed afterwards."""
        refuse_scripted(model)
        handles = [module.register_forward_hook(self._see) for module in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        try:
            x = pick(output)
        except LookupError:
            return
        if layout := layout_of(module, x.dim()):
            self.recent[tuple(x.shape)] = layout
            self.found.update(dict.fromkeys(self.open.pop(tuple(x.shape), ()), layout))

    def observe(self, layer: LayerPath, module: nn.Module, x: Tensor) -> None:
        """The callback for every captured tensor, in the order of the forward."""
        known = layout_of(module, x.dim(), layer.keys) or self.recent.get(tuple(x.shape))
        self.found[layer] = known or DEFAULT_LAYOUTS.get(x.dim()) or "n" + "p" * (x.dim() - 1)
        if known is None:
            self.open.setdefault(tuple(x.shape), []).append(layer)
        self.kinds[layer] = type(module).__name__


# -- Padding -----------------------------------------------------------------------------------------------------------


def mask_of(call: Call) -> Tensor | None:
    """Which tokens are not padding, samples × tokens; None if the inputs hold no such mask.

    Masks of other shapes describe which tokens attend to which, not padding, and are not read.

    >>> import torch
    >>> mask_of(((), {"attention_mask": torch.tensor([[1, 1, 0]])}))
    tensor([[ True,  True, False]])
    """
    for keyword, padding in MASKS.items():
        mask = call[1].get(keyword)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
            return mask.bool() != padding
    return None


def unpadded(x: Float[Tensor, "samples channels tokens"], mask: Tensor, policy: str) -> Float[Tensor, "rows channels"]:
    """Tokens as rows ("channels", "tokens") or their mean ("pool"), without padding.

    Raises:
        InputError: the policy has an entry for every token, or a sample has no token at all.
        MismatchError: the mask is not of these tokens.

    >>> import torch
    >>> x, mask = torch.tensor([[[1.0, 3.0, 9.0]]]), torch.tensor([[True, True, False]])
    >>> unpadded(x, mask, "tokens").tolist(), unpadded(x, mask, "pool").tolist()
    ([[1.0], [3.0]], [[2.0]])
    """
    mask = mask.to(x.device)
    if mask.shape != (len(x), x.shape[2]):
        raise MismatchError(
            f"The padding mask of the inputs is {mask.shape[0]} samples × {mask.shape[1]} tokens, but a layer has "
            f"{len(x)} × {x.shape[2]}: which of its tokens are padding is unknown. Leave that layer out, or give "
            "inputs of one length without a mask."
        )
    if policy in ("flatten", "structured"):
        raise InputError(
            f"The inputs have padding, and the policy {policy!r} would compare it: it has an entry for every token. "
            'Use "tokens" or "pool", or give inputs of one length. Measures that tell channels from positions, such as '
            'relu_cka, need "pool" here.'
        )
    if policy != "pool":
        return x.transpose(1, 2)[mask]
    if not mask.any(1).all():
        empty = int((~mask.any(1)).nonzero()[0])
        raise InputError(f"Sample {empty} of a batch has padding only, so its tokens have no mean. Leave it out.")
    return x.masked_fill(~mask[:, None], 0).sum(2) / mask.sum(1, keepdim=True)


# -- One layer ---------------------------------------------------------------------------------------------------------


def arrange(
    x: Tensor, policy: str = "channels", layout: str | None = None, mask: Tensor | None = None
) -> Float[Tensor, "rows ..."]:
    """A layer's tensor under a policy, see `POLICIES`. Half precision is averaged in float32.

    With a mask (samples × tokens, False for padding) padding is left out of rows and means of tokens.

    >>> x = torch.zeros(2, 3, 4, 4)
    >>> [tuple(arrange(x, policy).shape) for policy in ("channels", "flatten", "pool", "structured")]
    [(32, 3), (2, 48), (2, 3), (2, 3, 16)]
    >>> tuple(arrange(torch.zeros(2, 7, 5), "tokens").shape), tuple(arrange(x, "pool", layout="nppc").shape)
    ((14, 5), (2, 4))
    """
    if policy not in POLICIES:
        raise InputError(
            f"Unknown policy {policy!r}. {did_you_mean(policy, POLICIES)}Choose one of: {', '.join(POLICIES)}."
        )
    if not x.is_floating_point():
        dtype = str(x.dtype).removeprefix("torch.")
        raise InputError(f"A layer {tuple(x.shape)} of dtype {dtype} has no features to compare; it must hold floats.")
    layout = check_layout(x, layout)
    if policy == "tokens" and "t" not in layout:
        raise InputError(
            f'The policy "tokens" does not fit: a layer {tuple(x.shape)} of layout {layout!r} has no axis of tokens. '
            'Use "channels", or give a layout with the letter t.'
        )
    ordered, _ = _ordered(x, layout)
    rows = ordered.flatten(2) if ordered.dim() > 2 else ordered.unsqueeze(2)
    if mask is not None and "t" in layout and not mask.all():
        return unpadded(_wide(rows) if policy == "pool" else rows, mask, policy)
    match policy:
        case "flatten":
            return rows.flatten(1)
        case "pool":
            return _wide(rows).mean(2)
        case "structured":
            return rows
    return rows.transpose(1, 2).flatten(0, 1)


def _ordered(x: Tensor, layout: str) -> tuple[Tensor, tuple[int, ...]]:
    """Samples first, then all channels as one axis, then positions and tokens; and the sizes of these last."""
    samples = layout.index("n")
    channels = [i for i, letter in enumerate(layout) if letter == "c"]
    positions = [i for i, letter in enumerate(layout) if letter in "pt"]
    sizes = tuple(x.shape[i] for i in positions)
    width = torch.Size([x.shape[i] for i in channels]).numel()
    return x.permute([samples, *channels, *positions]).reshape(x.shape[samples], width, *sizes), sizes


def _wide(x: Tensor) -> Tensor:
    """In at least float32, so that averages do not lose precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# -- Two layers --------------------------------------------------------------------------------------------------------


def arrange_pair(
    x: Tensor,
    y: Tensor,
    policy: str = "channels",
    layouts: tuple[str | None, str | None] = (None, None),
    mask: Tensor | None = None,
) -> tuple[Float[Tensor, "rows ..."], Float[Tensor, "rows ..."]]:
    """Two layers of the same samples under one policy, with rows that belong together.

    Under "channels" and "structured" the larger resolution is averaged onto the smaller, axis by axis; if it is a
    multiple, every average is over a block of equal size. Under "flatten" and "pool" nothing has to be matched.

    >>> fine, coarse = torch.arange(16.0).reshape(1, 1, 4, 4), torch.zeros(1, 3, 2, 2)
    >>> a, b = arrange_pair(fine, coarse)
    >>> a[:, 0], tuple(b.shape)
    (tensor([ 2.5000,  4.5000, 10.5000, 12.5000]), (4, 3))
    """
    first, second = check_layout(x, layouts[0]), check_layout(y, layouts[1])
    samples = x.shape[first.index("n")], y.shape[second.index("n")]
    if samples[0] != samples[1]:
        raise MismatchError(
            f"Two layers are compared sample by sample, but one has {samples[0]} samples and the other {samples[1]}. "
            "Give the features of the same inputs in the same order."
        )
    if policy in ("channels", "structured", "tokens"):
        x, y, first, second = _matched(x, y, first, second)
        if policy == "channels" and "t" in first + second:  # positions that are compared with tokens share their mask
            first, second = first.replace("p", "t"), second.replace("p", "t")
    return arrange(x, policy, first, mask), arrange(y, policy, second, mask)


def _matched(x: Tensor, y: Tensor, first: str, second: str) -> tuple[Tensor, Tensor, str, str]:
    """Both layers with the same positions."""
    (a, sizes), (b, others) = _ordered(x, first), _ordered(y, second)
    kinds = ["".join(letter for letter in layout if letter in "pt") for layout in (first, second)]
    if sizes == others and (kinds[0] == kinds[1] or "t" in kinds[0] + kinds[1]):
        return x, y, first, second
    found = f"{tuple(x.shape)} as {first!r} and {tuple(y.shape)} as {second!r}"
    if "t" in kinds[0] + kinds[1]:
        raise MismatchError(
            f"Two layers have different tokens, {found}, and tokens cannot be averaged onto other tokens. Compare them "
            'under "pool" or "flatten", or leave the extra tokens, such as the class token, out.'
        )
    if kinds[0] and kinds[1] and len(sizes) != len(others):
        raise MismatchError(
            f'Two layers have positions along different numbers of axes, {found}. Compare them under "pool" or '
            '"flatten".'
        )
    rank = max(len(sizes), len(others))
    size = [min(pair) for pair in zip(sizes or (1,) * rank, others or (1,) * rank, strict=True)]
    layout = "nc" + "p" * rank
    return resized(a, size), resized(b, size), layout, layout


def resized(x: Tensor, sizes: Sequence[int]) -> Float[Tensor, "samples channels ..."]:
    """Channels (samples, channels, *positions) averaged onto fewer positions, in at least float32.

    >>> resized(torch.tensor([[[1.0, 3.0, 5.0, 7.0]]]), [2])
    tensor([[[2., 6.]]])
    """
    x = x if x.dim() > 2 else x.reshape(*x.shape, *[1] * len(sizes))
    if len(sizes) == 2 and [*x.shape[2:]] != [*sizes]:  # images: both axes at once
        return functional.adaptive_avg_pool2d(_wide(x), (sizes[0], sizes[1]))
    for axis, size in enumerate(sizes, 2):
        if x.shape[axis] != size:
            last = _wide(x).movedim(axis, -1)
            x = functional.adaptive_avg_pool1d(last.flatten(0, -2), size).reshape(*last.shape[:-1], size)
            x = x.movedim(-1, axis)
    return x
