# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are there whole or not at all, and that can be checked."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "files.json"
_BLOCK = 1 << 22


def write_json(path: Path, value: Any) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder under another name, list its files with their checksums, and rename it.

    A folder of that name is there until the new one is complete; a kill at any moment leaves one of them, under its
    name or as NAME.old (`recover` puts that back).

    Raises:
        OSError: it could not be written; what was there is untouched.
    """
    temporary, old = temporary_of(final), final.with_name(f"{final.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        write_json(temporary / MANIFEST, {name: list(sum_of(temporary / name)) for name in _names(temporary)})
        folders = [path for path in temporary.rglob("*") if path.is_dir()]
        for path in (*(temporary / name for name in _names(temporary)), *folders, temporary):
            _sync(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    recover(final)
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def temporary_of(final: Path) -> Path:
    """Where a folder is while it is written."""
    return final.with_name(f"{final.name}.tmp")


def recover(final: Path) -> None:
    """Settle what a kill between two renames left behind."""
    old = final.with_name(f"{final.name}.old")
    if old.exists() and not final.exists():
        os.replace(old, final)
    shutil.rmtree(old, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that `write_folder` made, or None."""
    try:
        listed: dict[str, list[int]] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, (size, checksum) in listed.items():
        try:
            found = sum_of(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if found != (size, checksum):
            return f"{name} is not as it was written ({found[0]} of {size} bytes, checksum {found[1]:08x})"
    return None


def sum_of(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum


def _names(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
