"""What tests share: shapes from reports, dtypes, poisoned and guarded outputs, odd strides, the
rows of hyper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Shapes that broke other implementations, then small ones around vector and block widths.
SHAPES_2D = (
    (1, 1), (1, 17), (17, 1), (4, 100), (10, 10), (16, 4), (4, 16), (18, 230), (72, 33), (128, 1),
    (51, 140), (63, 65), (64, 64), (65, 63), (7, 511), (5, 513), (3, 1030), (33, 129),
)  # fmt: skip
SHAPES_3D = ((3, 64, 3), (20, 5, 7), (2, 33, 40), (1, 9, 8), (192, 1, 3))
EMPTY_SHAPES = ((0, 5), (5, 0), (0, 4, 4), (3, 0, 4), (3, 4, 0))


def seeded(*key: object) -> torch.Generator:
    """A generator that depends on the key only."""
    generator = torch.Generator()
    generator.manual_seed(hash_key(key))
    return generator


def hash_key(key: Sequence[object]) -> int:
    """A number from the text of a key, the same in every process."""
    value = 1469598103934665603
    for byte in repr(key).encode():
        value = (value ^ byte) * 1099511628211 % 2**63
    return value


def randn(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *key: object, scale: float = 1.0
) -> Tensor:
    """Normal numbers that depend on shape, dtype and key only, whatever the device."""
    values = torch.randn(tuple(shape), generator=seeded(tuple(shape), *key), dtype=torch.float64)
    return (values * scale).to(dtype).to(device)


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An output to be written completely: NaN, or a wild index."""
    value = float("nan") if dtype.is_floating_point else -(2**30)
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


class Guarded:
    """A dense tensor inside a larger buffer whose other bytes must not change."""

    def __init__(self, like: Tensor, margin: int = 64) -> None:
        numel = like.numel()
        self.buffer = torch.full((numel + 2 * margin,), 7, dtype=like.dtype, device=like.device)
        self.inside = slice(margin, margin + numel)
        self.tensor = self.buffer[self.inside].view(like.shape)
        self.tensor.copy_(like)

    def intact(self) -> bool:
        """Whether nothing but the tensor itself was written."""
        outside = torch.cat([self.buffer[: self.inside.start], self.buffer[self.inside.stop :]])
        return bool((outside == 7).all())


def with_layout(t: Tensor, layout: str) -> Tensor:
    """The values of t with other strides: "dense", "transposed", "sliced" or "row-expanded" (rows
    all alike).
    """
    if layout == "dense":
        return t.clone()
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "sliced":
        wide = torch.full((*t.shape[:-2], t.shape[-2] + 1, 2 * t.shape[-1] + 3), 3.0, dtype=t.dtype)
        view = wide.to(t.device)[..., 1:, 1 : 2 * t.shape[-1] + 1 : 2]
        view.copy_(t)
        return view
    if layout == "row-expanded":
        return t[..., :1, :].expand(t.shape)
    raise ValueError(layout)


LAYOUTS = ("dense", "transposed", "sliced")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, signs of zero and NaN places included (NaN payloads are not compared)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a.cpu(), b.cpu())
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differ = a.view(integer) != b.view(integer)
    return not bool((differ & ~(a.isnan() & b.isnan())).any())


def hyper_tensor(device: torch.device, *rows: dict[str, float]) -> Tensor:
    """The float32 (groups, 12) tensor from named values; defaults are a Muon group's."""
    names = (
        "decay", "step", "keep", "gain", "feedback", "eps", "beta2", "neuron_eps", "nesterov",
    )  # fmt: skip
    defaults = {
        "decay": 0.99, "step": 0.02, "keep": 1.0, "gain": 0.05, "feedback": 0.95, "eps": 1e-7,
        "beta2": 0.95, "neuron_eps": 1e-8, "nesterov": 1.0,
    }  # fmt: skip
    table = torch.zeros(max(1, len(rows)), 12)
    for i, row in enumerate(rows or ({},)):
        assert not set(row) - set(names), row
        for j, name in enumerate(names):
            table[i, j] = row.get(name, defaults[name])
    return table.to(device)


def adamw_hyper(device: torch.device, **values: float) -> Tensor:
    """The float32 (1, 12) tensor of an AdamW group."""
    v = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "sign": 1.0}
    v |= values
    row = [
        1 - v["lr"] * v["weight_decay"], v["lr"], v["beta1"], 1 - v["beta1"], v["beta2"],
        1 - v["beta2"], v["eps"], v["sign"], 0, 0, 0, 0,
    ]  # fmt: skip
    return torch.tensor([row], dtype=torch.float32, device=device)


@contextlib.contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """Fail if one of the tensors changes inside."""
    before = [t.clone() for t in tensors]
    yield
    for old, new in zip(before, tensors, strict=True):
        assert same_bits(old, new), "an input was modified"
