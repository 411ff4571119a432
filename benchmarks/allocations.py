"""Counts the bytes of tensors that a function allocates, and the most that live at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """Bytes above what was allocated before: the peak, and what is left at the end."""

    peak: int
    kept: int
    largest: int  # of a single allocation; not told on CUDA (0)


def allocated(
    function: Callable[[], object],
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Allocated:
    """Runs `function` once and reads PyTorch's own allocator.

    On the CPU these are the profiler's records, which name every allocation of a tensor and of a
    kernel's buffers, but not what the matrix library allocates for itself. What `function` returns
    is alive at the end; drop it inside to see what autograd keeps.
    """
    if device.type == "cuda":
        return _allocated_cuda(function, device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = function()
    now = peak = largest = 0
    events = record.profiler.kineto_results.events()
    # Those of other threads, such as a collective's, come one thread after the other.
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
            largest = max(largest, event.nbytes())
    del result
    return Allocated(peak=peak, kept=now, largest=largest)


def _allocated_cuda(function: Callable[[], object], device: torch.device) -> Allocated:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = function()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    kept = torch.cuda.memory_allocated(device) - before
    del result
    return Allocated(peak=peak, kept=kept, largest=0)
