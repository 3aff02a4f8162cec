"""The frozen teacher: picture features from a weights file of known identity.

Promise: weights of any other SHA-256, or of other names, shapes or types, are refused before anything is
trained; the teacher has no dropout, no gradient, and never enters a checkpoint.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load as load_safetensors

from trainer.config import ModelConfig, TeacherConfig
from trainer.refusal import Difference, Refusal, refuse
from trainer.synthetic import teacher_shapes


class Teacher:
    """Maps pixels [B, 3, S, S] in [-1, 1] to features [B, width], both float32."""

    def __init__(self, weights: dict[str, torch.Tensor], patch: int, device: torch.device) -> None:
        self._patch = patch
        self._weights = {name: tensor.to(device) for name, tensor in weights.items()}

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the student's picture read-out is pulled towards.
        Needs no gradient: no weight here asks for one.
        """
        patches = torch.nn.functional.unfold(pixels.float(), self._patch, stride=self._patch).transpose(1, 2)
        hidden = torch.tanh(patches @ self._weights["patch.weight"].T + self._weights["patch.bias"])
        return hidden.mean(dim=1) @ self._weights["mix.weight"].T


def require_identity(config: TeacherConfig) -> bytes:
    """The weights file's bytes, if they are the ones that the config names.

    Raises:
        Refusal: when the file is absent or has another SHA-256.
    """
    path = Path(config.path)
    fix = "put the teacher that the run was made with at this path"
    if not path.is_file():
        raise refuse("the teacher is not there", "/teacher/path", f"a file at {config.path}", "none", fix)
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != config.sha256:
        raise refuse("this is another teacher", "/teacher/sha256", config.sha256, found, fix)
    return content


def load_teacher(content: bytes, model: ModelConfig, device: torch.device) -> Teacher:
    """The teacher of weights that passed `require_identity`."""
    weights = load_safetensors(content)
    shapes = teacher_shapes(model.patch, model.teacher_width)
    wrong = [
        Difference(name, f"float32 {list(shape)}", _described(weights.get(name)))
        for name, shape in shapes.items()
        if name not in weights or tuple(weights[name].shape) != shape or weights[name].dtype != torch.float32
    ]
    wrong += [
        Difference(name, "no such tensor", _described(weights[name]))
        for name in sorted(set(weights) - set(shapes))
    ]
    if wrong:
        raise Refusal(
            "the teacher does not fit the model", wrong, "make /model/patch and /model/teacher_width fit it"
        )
    return Teacher(weights, model.patch, device)


def _described(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
