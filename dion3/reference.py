"""The step operations in plain PyTorch: slow, obvious, and equal to the C functions bit for bit.

Each function has the name, arguments and meaning of an operator of :mod:`dion3.ops` and runs on any
device. It is the specification in code, the oracle of the tests, and what runs where no native
kernel is. Arithmetic is float32 with one rounding per operation (csrc/rows.h); sums are float64.
Only the order of those sums is not the C functions', so scores and norms may differ in the last
digits of a float64.

Legend: w weight, m momentum, g gradient, o orthogonalized update, v second moment; a list holds one
entry per matrix, (rows, cols) or (batch, rows, cols); an empty tensor means "absent".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROWS, COLS = 0, 1

# Columns of hyper (csrc/dion3.h).
DECAY, STEP, KEEP, GAIN, FEEDBACK, EPS, BETA2, NEURON_EPS, NESTEROV = range(9)
ADAMW_DECAY, ADAMW_LR, BETA1, BETA1_COMPLEMENT = range(4)
ADAMW_BETA2, BETA2_COMPLEMENT, ADAMW_EPS, SIGN = range(4, 8)

_MASK = 0xFFFFFFFF


def selection_count(fraction: float, n: int) -> int:
    """k = max(1, ceil(fraction * n)), clamped to n; 0 for n = 0. 0.07 * 100 is 7, not 8."""
    return min(n, max(1, math.ceil(fraction * n - 1e-6))) if n > 0 else 0


# ---- random bits ---------------------------------------------------------------------------------


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * x for 32-bit x held in int64."""
    low, high = constant * (x & 0xFFFF), constant * (x >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): four 32-bit words from four, all held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def random_bits(index: Tensor, seed: int, step: int, param_id: int) -> Tensor:
    """The 16 random bits of each element by its global index (int64); see csrc/dion3_round.h."""
    block = index >> 3
    word = torch.full_like(block, step & _MASK)
    counter = (block & _MASK, block >> 32, word, torch.full_like(block, param_id & _MASK))
    words = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    lane = index & 7
    chosen = torch.stack(words, -1).gather(-1, (lane >> 1).unsqueeze(-1)).squeeze(-1)
    return (chosen >> (16 * (lane & 1))) & 0xFFFF


def round_stochastic(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """x (float32) as dtype: |y| = ulp * floor(|x| / ulp + bits / 65536).

    Finite values saturate at the largest one; Inf and NaN pass; float32 stays as it is.
    """
    if dtype == torch.float32:
        return x
    info = torch.finfo(dtype)
    magnitude = x.double().abs()
    # The spacing of dtype at |x|; frexp gives |x| = f * 2^e with f in [1/2, 1).
    digits = 8 if dtype == torch.bfloat16 else 11
    smallest = math.log2(info.smallest_normal) - digits + 1
    exponent = torch.frexp(magnitude)[1].double() - digits
    ulp = torch.exp2(exponent.clamp(min=smallest))
    rounded = torch.floor(magnitude / ulp + bits.double() / 65536) * ulp
    rounded = torch.where(magnitude.isfinite(), rounded.clamp(max=info.max), magnitude)
    return torch.copysign(rounded, x.double()).to(dtype)


# ---- helpers ------------------------------------------------------------------------------------


def _stack(t: Tensor) -> Tensor:
    """The (batch, rows, cols) view of a matrix or stack."""
    return t if t.dim() == 3 else t.unsqueeze(0)


def _slices(x: Tensor, axis: int) -> Tensor:
    """x with its slices in dimension 1."""
    return x if axis == ROWS else x.transpose(1, 2)


def _seen(row: Tensor, m: Tensor, g: Tensor | None) -> Tensor:
    """What Newton-Schulz sees: m, or with nesterov nu * m + (1 - nu) * sign(gain) * g."""
    nu = row[NESTEROV]
    if float(nu) == 1.0 or g is None:
        return m
    signed = torch.where(torch.signbit(row[GAIN]), -g, g)
    return nu * m + (1 - nu) * signed


def _sqrt(x: Tensor) -> Tensor:
    """The correctly rounded float32 root (torch.sqrt may be off by one ulp on the CPU)."""
    return x.double().sqrt().float()


def _select_sum(x: Tensor) -> Tensor:
    """Float64 sum over the last dimension, first to last."""
    return x.cumsum(-1)[..., -1] if x.shape[-1] else x.sum(-1)


# ---- the six operations -------------------------------------------------------------------------


def feed_back_(
    momentum: Sequence[Tensor],
    slots: Sequence[Tensor],
    feedback: Tensor,
    group: Sequence[int],
    axis: Sequence[int],
) -> None:
    """m <- feedback * m in the selected slices (Algorithm 4 line 9): how momentum_ begins."""
    for i, buffer in enumerate(momentum):
        m = _slices(_stack(buffer), axis[i])
        factor = feedback[group[i]].expand(
            1, 1, 1
        )  # float32, and so is the product before its rounding
        if slots[i].numel():
            factor = torch.where(slots[i].view(m.shape[0], -1, 1) < 0, 1.0, factor)
        m.mul_(factor)


def momentum_(
    momentum: Sequence[Tensor],
    grad: Sequence[Tensor],
    slots: Sequence[Tensor],
    feedback: Tensor,
    hyper: Tensor,
    group: Sequence[int],
    axis: Sequence[int],
    score: Sequence[Tensor],
    sumsq: Sequence[Tensor],
) -> None:
    """The last step's feedback, m <- keep * m + gain * g, the sums per slice (Algorithm 4 line 1)."""
    if feedback.numel():
        feed_back_(momentum, slots, feedback, group, axis)
    for i, buffer in enumerate(momentum):
        row = hyper[group[i]]
        g = grad[i].float()
        buffer.copy_(row[KEEP] * buffer.float() + row[GAIN] * g)
        if score[i].numel() == 0 and sumsq[i].numel() == 0:
            continue
        m = _slices(_stack(buffer).float(), axis[i])
        x = _slices(_stack(_seen(row, buffer.float(), g)), axis[i])
        if score[i].numel():
            score[i].copy_(m.double().abs().sum(-1).view_as(score[i]))
        if sumsq[i].numel():
            sumsq[i].copy_(x.double().square().sum(-1).view_as(sumsq[i]))


def select_(
    score: Sequence[Tensor],
    sumsq: Sequence[Tensor],
    indices: Sequence[Tensor],
    slots: Sequence[Tensor],
    norm: Sequence[Tensor],
    k: Sequence[int],
) -> None:
    """The k largest scores; ties to the lower index, NaN largest (Algorithm 4 line 2)."""
    for i in range(len(score)):
        shaped = next((t for t in (score[i], sumsq[i]) if t.numel()), slots[i])
        if shaped.numel() == 0:
            continue
        n = shaped.shape[-1]
        if k[i] == n:
            order = torch.arange(n, device=shaped.device).expand(shaped.numel() // n, n)
        else:
            key = score[i].view(-1, n).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
            nan = score[i].view(-1, n).isnan()
            # Stable sorts, least significant key first: by score, then NaN before everything.
            order = torch.sort(key, dim=-1, descending=True, stable=True)[1]
            first = torch.sort(nan.gather(-1, order).int(), dim=-1, descending=True, stable=True)[1]
            order = order.gather(-1, first)[:, : k[i]].sort(dim=-1)[0]
        if indices[i].numel():
            indices[i].copy_(order.view_as(indices[i]))
        if slots[i].numel():
            place = torch.full((order.shape[0], n), -1, dtype=torch.int64, device=order.device)
            place.scatter_(1, order, torch.arange(k[i], device=order.device).expand_as(order))
            slots[i].copy_(place.view_as(slots[i]))
        if norm[i].numel():
            total = _select_sum(sumsq[i].view(-1, n).gather(-1, order))
            norm[i].copy_(total.sqrt().view_as(norm[i]))


def _norm_scale(norm: Tensor, eps: Tensor) -> Tensor:
    """(float)(1 / max(norm, eps)); 0 for a division by 0, and never Inf."""
    divisor = torch.where(norm < eps.double(), eps.double(), norm)
    scale = (1 / divisor).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(divisor == 0, torch.zeros_like(scale), scale).float()


def gather_(
    momentum: Sequence[Tensor],
    grad: Sequence[Tensor],
    indices: Sequence[Tensor],
    norm: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    axis: Sequence[int],
    out: Sequence[Tensor],
) -> None:
    """out <- selected m / max(norm, eps) (Algorithm 4 line 3)."""
    for i in range(len(momentum)):
        row = hyper[group[i]]
        m = _slices(_stack(momentum[i]), axis[i])
        target = _slices(_stack(out[i]), axis[i])
        g = _slices(_stack(grad[i]), axis[i]).float() if grad[i].numel() else None
        x = _seen(row, m.float(), g)
        if indices[i].numel():
            index = indices[i].view(m.shape[0], -1, 1).long().expand(-1, -1, m.shape[2])
            x = x.gather(1, index)
        if norm[i].numel():
            x = x * _norm_scale(norm[i].view(-1, 1, 1), row[EPS])
        target.copy_(x)


def neuron_(
    update: Sequence[Tensor],
    second_moment: Sequence[Tensor],
    indices: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    factor: Sequence[Tensor],
) -> None:
    """The second moments and the factor of each row of the update (Algorithm 4 lines 4-6)."""
    for i in range(len(update)):
        o = _stack(update[i]).double()
        if o.numel() == 0:
            continue
        row = hyper[group[i]]
        s = (o.square().sum(-1) / o.shape[2]).float()
        moments = second_moment[i].view(o.shape[0], -1)
        if indices[i].numel():
            index = indices[i].view(o.shape[0], -1).long()
        else:
            index = torch.arange(o.shape[1], device=o.device).expand(o.shape[:2])
        v = row[BETA2] * moments.gather(1, index) + (1 - row[BETA2]) * s
        moments.scatter_(1, index, v)
        d = _sqrt(v) + row[NEURON_EPS]
        terms = torch.where(s == 0, torch.zeros_like(o[:, :, 0]), s.double() / d.double().square())
        total, scaled = _select_sum(s.double())[:, None], _select_sum(terms)[:, None]
        ratio = (total / scaled).sqrt().float() / d
        nothing = (total == 0) | (d == 0)
        factor[i].copy_(torch.where(nothing, torch.ones_like(ratio), ratio).view_as(factor[i]))


def update_(
    weight: Sequence[Tensor],
    update: Sequence[Tensor],
    slots: Sequence[Tensor],
    factor: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    axis: Sequence[int],
    scale: Sequence[float],
    step: Sequence[Tensor],
    seed: int,
    param_id: Sequence[int],
    index_base: Sequence[int],
    index_batch_stride: Sequence[int],
    index_row_stride: Sequence[int],
) -> None:
    """w <- round(a * w - g * o) where selected, round(a * w) elsewhere (Algorithm 4 lines 7-8)."""
    for i in range(len(weight)):
        w, o = _stack(weight[i]), _stack(update[i]).float()
        if w.numel() == 0:
            continue
        row = hyper[group[i]]
        shape_scale = torch.tensor(scale[i], dtype=torch.float32, device=w.device)
        gain = (row[STEP] * shape_scale).expand(o.shape[0], o.shape[1])
        if factor[i].numel():
            gain = gain * factor[i].view(o.shape[:2])
        moved = _slices(gain.unsqueeze(-1) * o, axis[i])
        new = _slices(row[DECAY] * w.float(), axis[i])
        if slots[i].numel():
            slot = slots[i].view(w.shape[0], -1, 1).long().expand_as(new)
            if moved.shape[1]:
                moved = moved.gather(1, slot.clamp(min=0))
                new = torch.where(slot >= 0, new - moved, new)
        else:
            new = new - moved
        new = _slices(new, axis[i])
        if step[i].numel():
            b, r, c = (torch.arange(n, device=w.device) for n in w.shape)
            index = index_base[i] + b[:, None, None] * index_batch_stride[i]
            index = index + r[:, None] * index_row_stride[i] + c
            bits = random_bits(index, seed, int(step[i]), param_id[i])
            new = round_stochastic(new, w.dtype, bits)
        w.copy_(new)


def _power(base: float, n: int) -> float:
    """base^n by squaring, in the order of csrc/rows.h."""
    result = 1.0
    while n:
        if n & 1:
            result *= base
        base *= base
        n >>= 1
    return result


def adamw_(
    param: Sequence[Tensor],
    grad: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    step: Sequence[Tensor],
    hyper: Tensor,
    group: Sequence[int],
    stochastic: Sequence[bool],
    seed: int,
    param_id: Sequence[int],
    index_base: Sequence[int],
) -> None:
    """Decoupled AdamW, the weight rounded once; the formula is in csrc/dion3.h."""
    for i, p in enumerate(param):
        row = hyper[group[i]]
        t = max(1, int(step[i]))
        size = float(row[ADAMW_LR]) / (1 - _power(1 - float(row[BETA1_COMPLEMENT]), t))
        root = math.sqrt(1 - _power(1 - float(row[BETA2_COMPLEMENT]), t))
        step_size, root_ = torch.tensor([size, root], dtype=torch.float32, device=p.device)
        g = row[SIGN] * grad[i].float()
        m = row[BETA1] * exp_avg[i].float() + row[BETA1_COMPLEMENT] * g
        v = row[ADAMW_BETA2] * exp_avg_sq[i].float() + row[BETA2_COMPLEMENT] * (g * g)
        exp_avg[i].copy_(m)
        exp_avg_sq[i].copy_(v)
        new = row[ADAMW_DECAY] * p.float() - step_size * (m / (_sqrt(v) / root_ + row[ADAMW_EPS]))
        if stochastic[i]:
            index = index_base[i] + torch.arange(p.numel(), device=p.device).view(p.shape)
            bits = random_bits(index, seed, int(step[i]), param_id[i])
            new = round_stochastic(new, p.dtype, bits)
        p.copy_(new)
