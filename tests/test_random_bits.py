"""The counter-based generator: published answers, golden digests, and independence of how it is called."""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from logra import native as native_module
from logra import random_bits
from logra.random_bits import BitStream, Purpose

STREAM = BitStream.named(7, "model.layers.0.mlp.up_proj", Purpose.ROUNDING, 3)


@pytest.fixture(params=["plain"] if native_module.native is None else ["native", "plain"])
def generator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs with the compiled helper, where a compiler was at hand to build it, and without."""
    if request.param == "plain":
        monkeypatch.setattr(random_bits, "native", None)
    return request.param


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_philox4x32_10(generator: str, counter: tuple[int, ...], key: int, words: str) -> None:
    block, row, update, purpose = counter
    got = BitStream(key, purpose, update).words(range(row, row + 1), range(4 * block, 4 * block + 4))
    assert " ".join(f"{word & 0xFFFFFFFF:08x}" for word in got[0].tolist()) == words


def test_golden_digest(generator: str) -> None:
    words = STREAM.words(range(3, 20), range(5, 1000))
    digest = hashlib.sha256(words.contiguous().numpy().tobytes()).hexdigest()
    assert digest[:16] == "718af11462275e76"


def test_any_rectangle_equals_the_same_part_of_the_whole(generator: str) -> None:
    whole = STREAM.words(range(0, 40), range(0, 200))
    for rows, columns in [(range(0, 1), range(0, 1)), (range(7, 31), range(13, 14)), (range(39, 40), range(3, 197))]:
        part = STREAM.words(rows, columns)
        assert torch.equal(part, whole[rows.start : rows.stop, columns.start : columns.stop])
    lanes = STREAM.lanes(range(40), range(200), 8)
    assert torch.equal(STREAM.lanes(range(4, 9), range(17, 55), 8), lanes[4:9, 17:55])
    halves = STREAM.lanes(range(40), range(100), 16)
    assert torch.equal(STREAM.lanes(range(4, 9), range(17, 55), 16), halves[4:9, 17:55])


def test_lanes_subdivide_words_from_their_low_end(generator: str) -> None:
    words = STREAM.words(range(2), range(8)).to(torch.int64) & 0xFFFFFFFF
    lanes = STREAM.lanes(range(2), range(32), 8).to(torch.int64)
    assert torch.equal(lanes[:, 0::4] | lanes[:, 1::4] << 8 | lanes[:, 2::4] << 16 | lanes[:, 3::4] << 24, words)


def test_native_and_plain_agree_for_any_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, words = range(1, 700), range(0, 501)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(STREAM.words(rows, words))
    torch.set_num_threads(2)
    monkeypatch.setattr(random_bits, "native", None)
    results.append(STREAM.words(rows, words))
    assert all(torch.equal(result, results[0]) for result in results)


def test_plain_chunks_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = STREAM.words(range(0, 64), range(0, 64))
    monkeypatch.setattr(random_bits, "native", None)
    monkeypatch.setattr(random_bits, "_PLAIN_CHUNK_WORDS", 300)
    assert torch.equal(STREAM.words(range(0, 64), range(0, 64)), whole)


def test_seed_name_purpose_and_update_each_give_other_bits() -> None:
    streams = [
        BitStream.named(0, "a", Purpose.ROUNDING, 1),
        BitStream.named(1, "a", Purpose.ROUNDING, 1),
        BitStream.named(0, "b", Purpose.ROUNDING, 1),
        BitStream.named(0, "a", Purpose.DITHER, 1),
        BitStream.named(0, "a", Purpose.ROUNDING, 2),
    ]
    words = [stream.words(range(8), range(64)) for stream in streams]
    for first in range(len(words)):
        for second in range(first):
            assert (words[first] == words[second]).float().mean() < 0.01


def test_bits_are_balanced_and_uncorrelated_between_rows() -> None:
    signs = STREAM.packed(range(64), range(4096)).to(torch.int64)
    bits = ((signs[..., None] >> torch.arange(8)) & 1).reshape(64, -1).double() * 2 - 1
    assert abs(bits.mean()) < 4 / bits.numel() ** 0.5
    correlation = bits @ bits.T / bits.shape[1]
    off_diagonal = correlation - torch.diag(torch.diagonal(correlation))
    assert off_diagonal.abs().max() < 5.5 / bits.shape[1] ** 0.5


@pytest.mark.skipif(native_module.native is None, reason="torch's own threads do not survive a fork")
def test_a_forked_process_makes_the_same_bits() -> None:
    code = (
        "import os, torch; torch.set_num_threads(2)\n"
        "from logra.random_bits import BitStream\n"
        "words = lambda: BitStream(5, 1, 1).words(range(512), range(512)).numpy().tobytes()\n"
        "before = words(); child = os.fork()\n"
        "if child == 0: os._exit(0 if words() == before else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=300, check=False).returncode == 0


def test_the_helper_is_built_where_a_compiler_is_at_hand() -> None:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which("cc") and headers.exists():
        assert native_module.native is not None, "reinstall the package: its compiled helper is missing"


@pytest.mark.parametrize("device", ["meta"])
def test_a_default_device_elsewhere_does_not_reach_the_helper(device: str) -> None:
    with torch.device(device):
        words = STREAM.words(range(4), range(8))
    assert words.device.type == "cpu"
    assert torch.equal(words, STREAM.words(range(4), range(8)))
