"""What `ferry image smoke --gpu` runs in a container, twice: a kernel of flash-linear-attention on each GPU; judges nothing.

Prints one line of JSON: the GPUs that torch sees, how far the kernel's result on each lies from the same sum in double
precision (as a part of the largest value), and the files in Triton's cache afterwards. The first run compiles; the second
finds everything in the cache, or it fails for want of a compiler. Needs nothing but the image's own packages.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from fla.ops.linear_attn import chunk_linear_attn


def distance(device: str) -> float:
    """Return how far causal linear attention, as the kernel computes it on `device`, is from its definition."""
    generator = torch.Generator().manual_seed(429)
    q, k, v = (torch.randn(2, 256, 4, 64, generator=generator) for _ in range(3))
    found, _ = chunk_linear_attn(q.to(device), k.to(device), v.to(device), scale=1.0, normalize=False)
    weights = torch.einsum("bthk,bshk->bhts", q.double(), k.double()).tril()
    wanted = torch.einsum("bhts,bshv->bthv", weights, v.double())
    return float((found.cpu().double() - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    """Print the answer."""
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    distances = []
    for device in devices:
        with torch.cuda.device(device):
            distances.append(distance(device))
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    answer = {
        "gpus": [torch.cuda.get_device_name(device) for device in devices],
        "distances": distances,
        "files": sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()),
    }
    print("KERNELS " + json.dumps(answer, sort_keys=True))


if __name__ == "__main__":
    main()
