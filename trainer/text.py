"""Text as bytes: the vocabulary, and what `navigation.json` says about the input.

Promise: encoding is a pure function of the text and `text_bytes`; the metadata names everything that changes
what a token or a pixel means. Standard library only.
"""

from __future__ import annotations

from typing import Any

from trainer.config import RunConfig

BEGIN, END, PAD = 256, 257, 258
VOCABULARY = 264
IGNORED = -100
PIXEL_MEAN, PIXEL_SCALE = 0.5, 0.5


def encode(text: str, text_bytes: int) -> tuple[list[int], list[int]]:
    """Input and target tokens of equal length: the target at each place is the next token of the text."""
    tokens = [BEGIN, *text.encode("utf-8")[:text_bytes], END]
    return tokens[:-1], tokens[1:]


def input_metadata(config: RunConfig) -> dict[str, Any]:
    """The serializer's metadata: with it, and the weights, an input can be made again."""
    return {
        "ferry": 1,
        "serializer": "ferry-bytes-1",
        "vocabulary": {"size": VOCABULARY, "encoding": "utf-8 bytes", "begin": BEGIN, "end": END, "pad": PAD},
        "text": {"max_bytes": config.model.text_bytes, "ignored_target": IGNORED},
        "image": {
            "size": config.model.image_size,
            "channels": "RGB",
            "patch": config.model.patch,
            "mean": PIXEL_MEAN,
            "scale": PIXEL_SCALE,
        },
        "data": {"fingerprint": config.data.fingerprint, "rows": config.data.rows},
        "teacher": {"sha256": config.teacher.sha256, "width": config.model.teacher_width},
    }
