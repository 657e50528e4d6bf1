"""Padding: which tokens of a batch are none, read off its attention mask, so that they enter no measure.

Inputs given as a mapping may hold `attention_mask` (1 or True for a token) or `src_key_padding_mask` (True for padding)
of samples × tokens. Masks of other shapes say who attends to whom and not what is padding; they are not read. Only axes
of tokens, the letter t of a layout, are masked.
"""

from __future__ import annotations

from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.features.batches import Call
from intertwine.shapes import Float

#: Keyword → the value by which it says that a token is padding.
MASKS = {"attention_mask": False, "src_key_padding_mask": True}


def mask_of(call: Call) -> Tensor | None:
    """Which tokens are not padding, samples × tokens; None where the inputs do not say.

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
    """Tokens as rows ("channels", "tokens") or their mean ("pool"), padding left out.

    Raises:
        InputError: the policy has a place for every token, or a sample has no token at all.
        MismatchError: the mask is not of these tokens.

    >>> import torch
    >>> x, mask = torch.tensor([[[1.0, 3.0, 9.0]]]), torch.tensor([[True, True, False]])
    >>> unpadded(x, mask, "tokens").tolist(), unpadded(x, mask, "pool").tolist()
    ([[1.0], [3.0]], [[2.0]])
    """
    mask = mask.to(x.device)
    if mask.shape != (len(x), x.shape[2]):
        raise MismatchError(
            f"The inputs have padding, and their mask is {mask.shape[0]} samples × {mask.shape[1]} tokens, but a layer "
            f"has {len(x)} × {x.shape[2]}: which of its tokens are padding is not known. Leave that layer out, or give "
            "inputs of one length without a mask."
        )
    if policy in ("flatten", "structured"):
        raise InputError(
            f"The inputs have padding, and the policy {policy!r} has a place for every token, so that padding would be "
            'compared. Use "tokens" or "pool", or give inputs of one length. Measures that tell channels from '
            'positions, such as relu_cka, need "pool" here.'
        )
    if policy != "pool":
        return x.transpose(1, 2)[mask]
    if not mask.any(1).all():
        empty = int((~mask.any(1)).nonzero()[0])
        raise InputError(f"Sample {empty} of a batch has padding only, and so no mean over its tokens. Leave it out.")
    return x.masked_fill(~mask[:, None], 0).sum(2) / mask.sum(1, keepdim=True)
