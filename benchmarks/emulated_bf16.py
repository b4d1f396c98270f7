# SPDX-License-Identifier: Apache-2.0
"""bf16 products on a processor that has none: computed in fp32 and rounded, for measurements of memory.

Such a processor's own bf16 products are hundreds of times slower than its fp32 ones. What is held here inside a product
is not counted by a `LiveBytes` that is entered later.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class EmulatedBf16(TorchDispatchMode):
    """Inside, products of bf16 matrices go through fp32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, widened if it is a bf16 product."""
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _PRODUCTS and not kwargs and args[0].dtype == torch.bfloat16:
            return func(*(each.to(torch.float32) for each in args)).to(torch.bfloat16)
        return func(*args, **kwargs)
