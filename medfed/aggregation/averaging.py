"""Weighted averages of state dicts, one pass over the parameters a client.

Policy of buffers (DESIGN law 8): floating tensors are averaged with the given weights, BatchNorm statistics
included; integer and boolean tensors come from the first client in order and keep their type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from medfed.federation.messages import State

# Half-precision tensors are summed in float32; everything else in its own precision.
_ACCUMULATE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_ROOM = 24  # binary digits by which a weight may exceed the power of two before the sum is scaled anew
_VANISHED = 100  # binary digits after which nothing of a smaller weight is left beside a larger one


class RunningMean:
    """A weighted mean of state dicts that arrive one after another.

    Holds one accumulator, whatever the number of clients. The result depends on the order of ``add``, so callers
    add in sorted client order. Weights may have any size, powers of losses say: they are divided by a power of two near
    the largest so far, which rounds nothing.

    Example:
        >>> mean = RunningMean()
        >>> mean.add({"w": torch.tensor([1.0])}, weight=1.0)
        >>> mean.add({"w": torch.tensor([4.0])}, weight=3.0)
        >>> mean.result()["w"]
        tensor([3.2500])
    """

    def __init__(self) -> None:
        self._sum: State = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._exponent: int | None = None
        self.total = 0.0  # of the weights as divided

    @torch.no_grad()
    def add(self, state: Mapping[str, torch.Tensor], weight: float) -> None:
        """Adds one state dict with a weight that is finite and not negative; ``state`` may change afterwards."""
        weight = self._scaled(float(weight)) if weight else 0.0
        if not self._sum:
            for name, tensor in state.items():
                if tensor.is_floating_point():
                    wide = _ACCUMULATE.get(tensor.dtype, tensor.dtype)
                    self._dtypes[name] = tensor.dtype
                    self._sum[name] = tensor.detach().to(wide) * weight
                else:
                    self._sum[name] = tensor.detach().clone()
        elif self._dtypes:
            sums, terms = [self._sum[n] for n in self._dtypes], [state[n] for n in self._dtypes]
            torch._foreach_add_(sums, terms, alpha=weight)
        self.total += weight

    def _scaled(self, weight: float) -> float:
        """A weight divided by the power of two; another power, and the sum with it, where the weight is far larger."""
        size = math.frexp(weight)[1]
        if self._exponent is None:
            self._exponent = size
        elif size > self._exponent + _ROOM:
            shrink = math.ldexp(1.0, max(self._exponent - size, -_VANISHED))
            torch._foreach_mul_([self._sum[name] for name in self._dtypes], shrink)
            self.total *= shrink
            self._exponent = size
        return math.ldexp(weight, -self._exponent)

    @torch.no_grad()
    def result(self) -> State:
        """The mean; the accumulator itself is handed out, and the next ``add`` begins a new mean.

        Raises:
            ValueError: nothing was added, or all weights are zero.
        """
        if not self.total > 0:
            raise ValueError("the weights of an average sum to zero")
        mean, dtypes = self._sum, self._dtypes
        if dtypes:
            torch._foreach_mul_([mean[n] for n in dtypes], 1.0 / self.total)
        self._sum, self._dtypes, self._exponent, self.total = {}, {}, None, 0.0
        return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in mean.items()}


def weighted_mean(states: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> State:
    """Averages state dicts that are all at hand.

    Works through one tensor at a time in blocks that stay in the processor's cache, so that the inputs are read
    once and nothing is written but the result.

    Args:
        states: state dicts with the same keys and shapes, in sorted client order.
        weights: one weight a state dict, not negative; they need not sum to one.

    Returns:
        A new state dict: sum of w_k x_k over sum of w_k for floating tensors, the first client's for the others.

    Raises:
        ValueError: no state, lengths that differ, or weights that sum to zero.
    """
    if not states or len(states) != len(weights):
        raise ValueError(f"{len(states)} states with {len(weights)} weights")
    total = float(sum(weights))
    if not total > 0:
        raise ValueError("the weights of an average sum to zero")
    shares = [float(w) / total for w in weights]
    mean: State = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            mean[name] = first.detach().clone()
            continue
        mean[name] = _mean_of([s[name] for s in states], shares)
    return mean


# Large blocks cost few calls; the sum of one still lies in the processor's last cache when the next term is added.
_BLOCK = 1 << 19


def _mean_of(tensors: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    wide = _ACCUMULATE.get(tensors[0].dtype, tensors[0].dtype)
    result = torch.empty(tensors[0].shape, dtype=wide, device=tensors[0].device)
    step = _BLOCK if result.device.type == "cpu" else max(result.numel(), 1)
    rows = [t.detach().reshape(-1).split(step) for t in tensors]
    for part, *terms in zip(result.view(-1).split(step), *rows):
        torch.mul(terms[0].to(wide), shares[0], out=part)
        for term, share in zip(terms[1:], shares[1:]):
            part.add_(term, alpha=share)
    return result.to(tensors[0].dtype)


@torch.no_grad()
def toward(start: Mapping[str, torch.Tensor], end: Mapping[str, torch.Tensor], share: float) -> State:
    """A share of the way from one state dict to another: ``start + share (end - start)``.

    Args:
        start: where to begin.
        end: a state dict of the same form.
        share: 0 is the start and 1 the end, bit by bit. Between them BatchNorm's variances stay positive.

    Returns:
        A new state dict, on the device of the end; integer and boolean tensors are those of the end.
    """
    moved: State = {}
    for name, tensor in end.items():
        if not tensor.is_floating_point() or share == 1:
            moved[name] = tensor.detach().clone()
            continue
        wide = _ACCUMULATE.get(tensor.dtype, tensor.dtype)
        begin = start[name].to(tensor.device, wide)
        moved[name] = torch.lerp(begin, tensor.to(wide), share).to(tensor.dtype)
    return moved
