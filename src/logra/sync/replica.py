# SPDX-License-Identifier: Apache-2.0
"""A rollout replica: it owns its version, refuses what does not follow it, and answers with a digest of the result."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logra.optim.digest import MASK, digest_of, name_key
from logra.optim.factors import exact_products
from logra.optim.merge import LayerStep
from logra.sketch.projection import KINDS
from logra.sketch.targets import is_conv1d, stable_name
from logra.sync.full import decode_piece, is_piece
from logra.sync.held import HeldWeight, Slice
from logra.sync.layout import DTYPES, Layout, near_misses
from logra.sync.message import DamagedMessage, SyncMessage, decode


@dataclass(frozen=True)
class Answer:
    """What a replica says to a message.

    Attributes:
        version: that it has now; None while it has no whole state.
        digest: of the weights it computes with; None likewise.
        refusal: why it did not take the message, or None.
    """

    version: int | None
    digest: int | None
    refusal: str | None = None

    def to_bytes(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Answer":
        """As it came."""
        return cls(**json.loads(data))

    def accepted(self, name: str) -> None:
        """Nothing, if a replica took what it was told.

        Raises:
            ValueError: it did not.
        """
        if self.refusal is not None:
            raise ValueError(f"replica {name}: {self.refusal}")


class Replica:
    """The weights of one engine, or of one of its tensor-parallel parts.

    Args:
        layout: as the trainer told it.
        slices: by name of each selected weight, where its values are; several where a model holds it in several parts.
        whole: by name, where the tensors that travel whole are, likewise; as `as_slice` sees them.
        changed: called whenever weights changed, half done or not: caches made with others must go.
        keep_on: device of what is kept beside weights.
        frozen: by name, where tensors are that never change; those that are whole are compared with the trainer's.

    Raises:
        ValueError: a weight of the layout is nowhere in the model (the message names near ones), has another dtype or
            shape, or a frozen one has other values.
    """

    def __init__(
        self,
        layout: Layout,
        slices: Mapping[str, Sequence[Slice]],
        whole: Mapping[str, Sequence[Slice]],
        changed: Callable[[], None] = lambda: None,
        keep_on: str | None = None,
        frozen: Mapping[str, Sequence[Slice]] | None = None,
    ) -> None:
        self.layout, self.whole, self.changed = layout, whole, changed
        self.version: int | None = None
        self.digest: int | None = None
        self._next_piece = 0
        missing = [each.name for each in layout.weights if not slices.get(each.name)]
        missing += [each.name for each in layout.whole if not whole.get(each.name)]
        if missing:
            near = near_misses(missing[0], [*slices, *whole])
            raise ValueError(
                f"{len(missing)} of {len(layout.weights) + len(layout.whole)} weights of the trainer are not in this "
                f"model, such as {missing[0]!r}{near}; is it the same model?"
            )
        self._check(slices, frozen or {})
        self.held = {
            each.name: [HeldWeight(each, part, layout.seed, keep_on) for part in slices[each.name]]
            for each in layout.weights
        }

    def _check(self, slices: Mapping[str, Sequence[Slice]], frozen: Mapping[str, Sequence[Slice]]) -> None:
        """Refuse what could never come to the trainer's digest."""
        for each in self.layout.weights:
            wanted = self.layout.computing_dtype(each)
            for part in slices[each.name]:
                if part.computing.dtype != wanted:
                    raise ValueError(f"{each.name} is {part.computing.dtype} in this model, the trainer's is {wanted}")
        for entry in self.layout.whole:
            rows, columns = as_rows(entry.shape)
            for part in self.whole[entry.name]:
                fits = part.computing.shape == (len(part.rows), len(part.columns))
                fits = fits and part.rows.stop <= rows and part.columns.stop <= columns
                if part.computing.dtype != DTYPES[entry.dtype] or not fits:
                    raise ValueError(
                        f"{entry.name} is {part.computing.dtype} {tuple(part.computing.shape)} in this model, the "
                        f"trainer's is {DTYPES[entry.dtype]} {entry.shape}"
                    )
        dtype = DTYPES[self.layout.compute]
        other = []
        for name, digest, shape in self.layout.frozen:
            parts = frozen.get(name, [])
            if sum(len(each.rows) * len(each.columns) for each in parts) == math.prod(shape):
                found = sum(_digest(name, each, as_rows(shape)[1], dtype) for each in parts) & MASK
                other += [name] if found != digest else []
        if other:
            raise ValueError(
                f"{len(other)} tensors that the trainer never changes have other values here, such as {other[0]}; load "
                f"the replica from the model that the run began with"
            )

    @torch.no_grad()
    def handle(self, data: bytes) -> Answer:
        """Take a message or a piece of a full state, or say why not; what is refused changes nothing."""
        try:
            if is_piece(data):
                return self._take_piece(data)
            return self._take(decode(self.layout, data))
        except DamagedMessage as error:
            return self._refusal(str(error))

    def _take(self, message: SyncMessage) -> Answer:
        if self.version is None:
            return self._refusal("this replica has no whole state; it needs a full one")
        if message.base != self.version:
            return self._refusal(f"the message follows version {message.base}, this replica has {self.version}")
        self.version = self.digest = None  # until all of it is merged
        try:
            digest = self._merged(message)
        finally:
            self.changed()
        self.version, self.digest = message.version, (digest + self._whole_digest()) & MASK
        return Answer(self.version, self.digest)

    def _merged(self, message: SyncMessage) -> int:
        """Merge every step; digest of the selected weights."""
        digest = 0
        device = next(iter(self.held.values()))[0].held.computing.device if self.held else torch.device("cpu")
        integers: dict[str, Tensor] = {}
        with exact_products(device.type):
            for weight in self.layout.weights:
                step = message.steps.get(weight.name)
                for held in self.held[weight.name]:
                    if step is None:
                        digest += held.digest()
                        continue
                    if weight.group not in integers:
                        integers = {weight.group: self._integers(weight, message.update, device)}
                    rows, columns = held.held.rows, held.held.columns
                    part = LayerStep(
                        step.integers[rows.start : rows.stop].to(device),
                        integers[weight.group][:, columns.start : columns.stop].contiguous(),
                        step.scales[rows.start : rows.stop].to(device),
                        step.decay_factor,
                        message.update,
                    )
                    digest += held.merge(part)
        for name, value in message.whole.items():
            self._enter_whole(name, value)
        return digest

    def _integers(self, weight: Any, update: int, device: torch.device) -> Tensor:
        layout = self.layout
        made = KINDS[layout.projection](layout.seed, weight.group, update, weight.rank, weight.columns, device)
        return made.integers()

    def _take_piece(self, data: bytes) -> Answer:
        piece = decode_piece(self.layout, data)
        if piece.index not in (0, self._next_piece):
            return self._refusal(f"piece {piece.index} came when {self._next_piece} was expected")
        self.version = self.digest = None
        self._next_piece = piece.index + 1
        if piece.index == 0:
            self.changed()
        if piece.index < len(self.layout.weights):
            for held in self.held[self.layout.weights[piece.index].name]:
                rows, columns = held.held.rows, held.held.columns
                held.load(piece.values[rows.start : rows.stop, columns.start : columns.stop])
        else:
            self._enter_whole(self.layout.whole[piece.index - len(self.layout.weights)].name, piece.values)
        if piece.last:
            self._next_piece = 0
            self.changed()
            parts = sum(held.digest() for each in self.held.values() for held in each)
            self.version, self.digest = piece.version, (parts + self._whole_digest()) & MASK
        return Answer(self.version, self.digest)

    def _enter_whole(self, name: str, value: Tensor) -> None:
        lines = value.reshape(as_rows(value.shape))
        for part in self.whole[name]:
            values = lines[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
            part.computing.copy_(values.to(part.computing.device))

    def _whole_digest(self) -> int:
        return sum(
            _digest(each.name, part, as_rows(each.shape)[1])
            for each in self.layout.whole
            for part in self.whole[each.name]
            if part.counted
        )

    def _refusal(self, why: str) -> Answer:
        return Answer(self.version, self.digest, why)


def _digest(name: str, part: Slice, columns: int, dtype: torch.dtype | None = None) -> int:
    values = part.computing if dtype is None else part.computing.to(dtype)
    return digest_of(values, name_key(name), part.rows, part.columns, columns)


class ToldReplica:
    """A replica that comes to be when it is told the layout, and anew when it is told again.

    Args:
        make: a replica of a layout, on this engine's weights.
    """

    def __init__(self, make: Callable[[Layout], Replica]) -> None:
        self.make = make
        self.replica: Replica | None = None

    def __call__(self, data: bytes) -> Answer:
        """To a layout, or to what the replica takes."""
        if data[:1] == b"{":
            self.replica = None
            try:
                self.replica = self.make(Layout.from_json(data.decode()))
            except (ValueError, TypeError, KeyError) as error:
                return Answer(None, None, f"{type(error).__name__}: {error}")
            return Answer(None, None)
        if self.replica is None:
            return Answer(None, None, "this replica was told of no layout yet")
        return self.replica.handle(data)


def joined(answers: Sequence[Answer]) -> Answer:
    """What tensor-parallel parts say, as one answer: digests add up, and one refusal is a refusal."""
    refusal = next((each.refusal for each in answers if each.refusal is not None), None)
    versions, digests = {each.version for each in answers}, [each.digest for each in answers]
    if len(versions) > 1:
        return Answer(None, None, refusal or f"its parts have the versions {sorted(map(str, versions))}")
    known = [each for each in digests if each is not None]
    return Answer(versions.pop(), sum(known) & MASK if len(known) == len(digests) else None, refusal)


def as_rows(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of any shape."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def as_slice(tensor: Tensor) -> Slice:
    """All of a tensor, as rows and columns; shares its storage."""
    rows, columns = as_rows(tensor.shape)
    return Slice(tensor.detach().view(rows, columns), range(rows), range(columns))


def whole_digest(name: str, value: Tensor) -> int:
    """Of a tensor that travels whole."""
    rows, columns = as_rows(value.shape)
    return digest_of(value.detach().reshape(rows, columns), name_key(name), range(rows), range(columns), columns)


def slices_of(model: nn.Module) -> dict[str, list[Slice]]:
    """Every linear weight of a Hugging Face model by stable name, whole."""
    found: dict[str, list[Slice]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) or is_conv1d(module):
            assert isinstance(weight, Tensor)
            computing = weight.detach().T if is_conv1d(module) else weight.detach()
            rows, columns = computing.shape
            found[stable_name(name)] = [Slice(computing, range(rows), range(columns))]
    return found


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by name; a tied one under all its names."""
    return {stable_name(name): each.detach() for name, each in model.named_parameters(remove_duplicate=False)}


def replica_of(layout: Layout, model: nn.Module, changed: Callable[[], None] = lambda: None) -> Replica:
    """A replica on the weights of a Hugging Face model."""
    whole = {name: [as_slice(each)] for name, each in tensors_of(model).items()}
    return Replica(layout, slices_of(model), whole, changed, frozen=whole)
