"""The model: a patch encoder, a projector and a small GPT-2 that writes a text about the picture.

Promise: built from the config alone, with weights that depend on the seed alone; every parameter belongs to
exactly one of the parts body, adapter and head. It downloads nothing. The loss is the mean next-token
cross-entropy in float32.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, PretrainedConfig, PreTrainedModel

from trainer.config import ModelConfig
from trainer.text import BEGIN, END, IGNORED, PAD, VOCABULARY

Part = Literal["body", "adapter", "head"]


class PictureTextConfig(PretrainedConfig):  # type: ignore[misc]
    """Sizes as in `trainer.config.ModelConfig`, in the form that Transformers saves as config.json."""

    model_type = "ferry-picture-text"
    image_size: int = 32
    patch: int = 8
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    text_bytes: int = 48
    teacher_width: int = 32
    dropout: float = 0.1


class PictureTextModel(PreTrainedModel):  # type: ignore[misc]
    """Picture tokens first, then text; the picture's mean token is also read out for the teacher."""

    config_class = PictureTextConfig
    base_model_prefix = "picture_text"
    main_input_name = "input_ids"

    def __init__(self, config: PictureTextConfig) -> None:
        super().__init__(config)
        self.patches = (config.image_size // config.patch) ** 2
        self.encoder = nn.Conv2d(3, config.hidden, kernel_size=config.patch, stride=config.patch)
        self.encoder_norm = nn.LayerNorm(config.hidden)
        self.projector = nn.Linear(config.hidden, config.hidden)
        self.drop = nn.Dropout(config.dropout)
        self.body = GPT2Model(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=self.patches + config.text_bytes + 2,
                n_embd=config.hidden,
                n_layer=config.layers,
                n_head=config.heads,
                resid_pdrop=config.dropout,
                embd_pdrop=config.dropout,
                attn_pdrop=config.dropout,
                attn_implementation="eager",
                use_cache=False,
                bos_token_id=BEGIN,
                eos_token_id=END,
                pad_token_id=PAD,
            )
        )
        self.text_head = nn.Linear(config.hidden, VOCABULARY, bias=False)
        self.teacher_head = nn.Linear(config.hidden, config.teacher_width)
        self.post_init()

    def forward(
        self,
        pixels: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """`pixels` [B, 3, S, S] in [-1, 1]; `input_ids`, `attention_mask`, `labels` [B, T].

        Gives `loss` (scalar, float32) and `features` [B, teacher_width].
        """
        tokens = self.encoder(pixels.to(self.encoder.weight.dtype)).flatten(2).transpose(1, 2)
        tokens = self.projector(self.encoder_norm(torch.nn.functional.gelu(tokens)))
        features = self.teacher_head(tokens.mean(dim=1))
        embedded = torch.cat([self.drop(tokens), self.body.wte(input_ids)], dim=1)
        seen = torch.cat(
            [torch.ones_like(attention_mask[:, :1]).expand(-1, self.patches), attention_mask], dim=1
        )
        hidden = self.body(inputs_embeds=embedded, attention_mask=seen).last_hidden_state[:, self.patches :]
        logits = self.text_head(hidden).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "features": features}


def part_of(name: str) -> Part:
    """The part of the model that a parameter belongs to, by its name."""
    first = name.split(".", 1)[0]
    if first == "body":
        return "body"
    return "adapter" if first in ("encoder", "encoder_norm", "projector") else "head"


def build_model(config: ModelConfig, seed: int) -> PictureTextModel:
    """The untrained model; equal on every rank."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "image_size": config.image_size,
        "patch": config.patch,
        "hidden": config.hidden,
        "layers": config.layers,
        "heads": config.heads,
        "text_bytes": config.text_bytes,
        "teacher_width": config.teacher_width,
        "dropout": config.dropout,
    }
    return PictureTextModel(PictureTextConfig(**values))
