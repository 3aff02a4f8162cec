"""Rows as tensors, in the order that `trainer.sampler` fixes.

Promise: what a batch holds depends on its rows alone: nothing random happens in a loader process, so 0 and 2
workers give the same batches; and iterating draws nothing from the global random generators. That matters: a
stock DataLoader takes its base seed from the global generator each time it is iterated, which on a resume in
mid-epoch happens after the random state was restored, and shifts every dropout mask from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from trainer.config import LoaderConfig, ModelConfig
from trainer.manifest import Row
from trainer.sampler import Order
from trainer.stop import deaf_children
from trainer.text import IGNORED, PAD, PIXEL_MEAN, PIXEL_SCALE, encode

Batch = dict[str, Any]


class Rows(Dataset[tuple[Row, torch.Tensor]]):  # type: ignore[misc]
    """The manifest's rows with their pictures, float32 [3, S, S] in [-1, 1]."""

    def __init__(self, rows: tuple[Row, ...], image_size: int) -> None:
        self._rows = rows
        self._size = image_size

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Row, torch.Tensor]:
        row = self._rows[index]
        with Image.open(row.image) as picture:
            if picture.size != (self._size, self._size):
                raise ValueError(
                    f"row {row.id}: expected {self._size} x {self._size} pixels, found {picture.size}"
                )
            values = numpy.asarray(picture.convert("RGB"), dtype=numpy.float32)
        pixels = torch.from_numpy(values / numpy.float32(255.0)).permute(2, 0, 1).contiguous()
        return row, (pixels - PIXEL_MEAN) / PIXEL_SCALE


def collate(text_bytes: int) -> Callable[[list[tuple[Row, torch.Tensor]]], Batch]:
    """The function that makes a batch:
    texts padded on the right to the longest of them, ids carried along.
    """

    def together(items: list[tuple[Row, torch.Tensor]]) -> Batch:
        encoded = [encode(row.text, text_bytes) for row, _ in items]
        longest = max(len(inputs) for inputs, _ in encoded)
        return {
            "ids": [row.id for row, _ in items],
            "pixels": torch.stack([pixels for _, pixels in items]),
            "input_ids": torch.tensor([i + [PAD] * (longest - len(i)) for i, _ in encoded]),
            "attention_mask": torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i, _ in encoded]),
            "labels": torch.tensor([t + [IGNORED] * (longest - len(t)) for _, t in encoded]),
        }

    return together


class RunLoader:
    """One rank's batches. Its length is a whole epoch's; iterating starts after `completed()` updates.

    Transformers sets the epoch (`set_epoch`) and takes its number of updates an epoch from the length; it is
    told to skip nothing itself, since its skipping differs between versions.
    """

    def __init__(
        self,
        rows: Rows,
        order: Order,
        rank: int,
        model: ModelConfig,
        loader: LoaderConfig,
        completed: Callable[[], int],
    ) -> None:
        self.dataset = rows
        self._order = order
        self._rank = rank
        self._collate = collate(model.text_bytes)
        self._loader = loader
        self._completed = completed
        self._epoch = 0

    def __len__(self) -> int:
        return self._order.micro_batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        workers = self._loader.workers
        stream: DataLoader[tuple[Row, torch.Tensor]] = DataLoader(
            self.dataset,
            batch_sampler=self._order.remaining(self._completed(), self._epoch, self._rank),
            collate_fn=self._collate,
            num_workers=workers,
            prefetch_factor=self._loader.prefetch if workers else None,
            generator=torch.Generator().manual_seed(0),
        )
        with deaf_children():
            return iter(stream)
