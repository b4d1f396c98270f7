# SPDX-License-Identifier: Apache-2.0
"""The compiled helper, if it was built, and the threads that run it. Everything has a plain twin in torch."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

native: Any
try:
    from logra import _native as native  # type: ignore[no-redef, attr-defined, unused-ignore]
except ImportError:  # no compiler at installation
    native = None

_ELEMENTS_PER_THREAD = 1 << 15


def in_row_parts(work: Callable[[int, int], None], rows: int, elements: int) -> None:
    """Run work(first_row, row_count) over all rows, on as many threads as torch uses where that pays.

    `work` must release the interpreter and write only its own rows.
    """
    threads = max(1, min(torch.get_num_threads(), elements // _ELEMENTS_PER_THREAD, rows))
    if threads == 1:
        work(0, rows)
        return
    size = -(-rows // threads)
    list(_pool().map(lambda first: work(first, min(size, rows - first)), range(0, rows, size)))


_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # threads do not survive a fork


def _pool() -> ThreadPoolExecutor:
    """One pool, of as many threads as torch uses now."""
    threads = torch.get_num_threads()
    if threads not in _pools:
        for pool in _pools.values():
            pool.shutdown(wait=False)
        _pools.clear()
        _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="logra-native")
    return _pools[threads]
