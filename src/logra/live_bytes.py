# SPDX-License-Identifier: Apache-2.0
"""Bytes of the tensors that are alive, as torch operations make and free them: peak, and what was alive at the peak.

    with LiveBytes() as live:
        live.hold("weights", model.parameters())
        loss_of(model).backward()
    live.peak, live.at_peak["weights"]

Works on real tensors of any device and on fake ones, which have sizes and no memory. Of tensors held in parts, the part
here counts. Workspaces that an operation takes and gives back inside are not seen.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TEMPORARY = "temporary"


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operation that returns it until it is freed.

    Attributes:
        now: bytes alive.
        peak: most bytes alive at one time since `start_peak`.
        at_peak: bytes by cause at that time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.by_cause: Counter[str] = Counter()
        self.at_peak: Counter[str] = Counter()
        self._cause = TEMPORARY
        self._held: dict[int, tuple[Any, str, int]] = {}

    def __enter__(self) -> "LiveBytes":
        """Follow storages that are resized, too: FSDP frees and fills weights in this way."""
        resize, follow = torch.UntypedStorage.resize_, self._resized

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            follow(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Leave storages as they were."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and enter the storages it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf, self._cause)
        return result

    def hold(self, cause: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors under a cause, those that are followed already too."""
        for tensor in tensors:
            self._enter(tensor, cause, again=True)

    @contextmanager
    def cause(self, name: str) -> Iterator[None]:
        """What operations make inside counts under `name`."""
        before, self._cause = self._cause, name
        try:
            yield
        finally:
            self._cause = before

    def start_peak(self) -> None:
        """Let the peak begin anew, at what is alive now."""
        self.peak, self.at_peak = self.now, self.by_cause.copy()

    def _enter(self, tensor: Tensor, cause: str, again: bool = False) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._held.get(key)
        if known is not None:
            if again and known[1] != cause:
                self.by_cause[known[1]] -= known[2]
                self.by_cause[cause] += known[2]
                self._held[key] = (known[0], cause, known[2])
            return
        size = storage.nbytes()
        self._held[key] = (weakref.ref(storage, lambda _: self._leave(key)), cause, size)
        self.now += size
        self.by_cause[cause] += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self.by_cause.copy()

    def _resized(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._held:
            return
        held, cause, before = self._held[key]
        size = storage.nbytes()
        self._held[key] = (held, cause, size)
        self.now += size - before
        self.by_cause[cause] += size - before
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self.by_cause.copy()

    def _leave(self, key: int) -> None:
        _, cause, size = self._held.pop(key)
        self.now -= size
        self.by_cause[cause] -= size
