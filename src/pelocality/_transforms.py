"""Whether a tensor is inside a function transform of torch."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transformed(*tensors: Tensor) -> bool:
    """Return whether any of the tensors is inside a `torch.func` transform or has a forward-mode tangent."""
    for each in tensors:
        _, tangent = forward_ad.unpack_dual(each)  # type: ignore[no-untyped-call]
        if tangent is not None or torch.func.debug_unwrap(each) is not each:
            return True
    return False
