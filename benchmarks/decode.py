"""Decoding with a key/value cache, beside the time that reading the cache takes.

    python -m benchmarks.decode --threads 1 2 --json results.json

A call passes the new tokens through all layers, and through the last one as a policy does, which
asks it for one output. It must read the whole cache once: its bytes by the read rate measured in
the same run (the sum of a large tensor) are the floor. A cache that fits
the processor's own caches may be read faster than that. "x recompute" is the time of encoding the
whole context again, once, / that of a call, for one sequence of up to --recompute tokens.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.report import Report, mb, number
from parallel import KVCache, LayerSize, TransformerLayer

DEVICE = torch.device("cpu")


class Decoder:
    """Layers and caches that hold `context` random tokens."""

    def __init__(
        self,
        *,
        layers: int,
        size: LayerSize,
        batch: int,
        context: int,
        new: int,
        dtype: torch.dtype,
    ) -> None:
        torch.manual_seed(0)
        self.context = context
        self.layers = [
            TransformerLayer(size, kind="blockwise", recompute=False) for _ in range(layers)
        ]
        self.caches = [
            KVCache(
                batch=batch,
                heads=size.heads,
                capacity=context + new,
                head_width=size.head_width,
                device=DEVICE,
                dtype=dtype,
            )
            for _ in range(layers)
        ]
        for cache in self.caches:
            cache.key_PNCK.normal_()
            cache.value_PNCK.normal_()
        self.x_BSD = torch.randn(batch, new, size.width)

    @property
    def nbytes(self) -> int:
        """Of all caches."""
        return sum(cache.nbytes for cache in self.caches)

    def call(self) -> Tensor:
        """The new tokens after the context, which stays as long as it is."""
        x_BSD = self.x_BSD
        for layer, cache in zip(self.layers, self.caches, strict=True):
            cache.length = self.context
            x_BSD = layer.decode(x_BSD, cache, last=1 if layer is self.layers[-1] else None)
        return x_BSD

    @torch.no_grad()
    def recompute(self) -> None:
        """The whole context and the new tokens, without a cache."""
        x_BSD = torch.randn(1, self.context + self.x_BSD.shape[1], self.x_BSD.shape[2])
        for layer in self.layers:
            x_BSD = layer(x_BSD)


def decode(
    context: int, settings: argparse.Namespace, threads: int
) -> tuple[str, list[dict[str, str]], dict[str, Any]]:
    """Title, rows and measurements of one length of context."""
    title = f"Decoding after {context:,} tokens, {settings.layers} layers, {threads} thread(s)"
    measure.log(title)
    size = LayerSize(width=settings.width, heads=settings.heads, feed_forward=4 * settings.width)
    rate = measure.read_rate()
    decoders = {
        (batch, new): Decoder(
            layers=settings.layers,
            size=size,
            batch=batch,
            context=context,
            new=new,
            dtype=measure.DTYPES[settings.cache],
        )
        for batch in settings.batch
        for new in settings.new
    }
    names = {
        f"{batch} x {new} tokens": measure.Turns(decoder.call, DEVICE)
        for (batch, new), decoder in decoders.items()
    }
    taken = measure.interleave(names, settings.rounds)
    rows, measured = [], []
    for (batch, new), decoder in decoders.items():
        times = taken[f"{batch} x {new} tokens"]
        middle, floor = statistics.median(times), decoder.nbytes / rate
        recompute = None
        if batch == 1 and context <= settings.recompute:
            measure.log("  the whole context again")
            recompute = measure.seconds(decoder.recompute, DEVICE)
        rows.append(
            {
                "sequences": str(batch),
                "new tokens": str(new),
                "ms": number(1e3 * middle),
                "cache MB": mb(decoder.nbytes),
                "floor ms": number(1e3 * floor),
                "x floor": number(middle / floor),
                "recompute ms": number(recompute and 1e3 * recompute),
                "x recompute": number(recompute and recompute / middle),
            }
        )
        measured.append(
            {
                "batch": batch,
                "new": new,
                "seconds": middle,
                "rounds": times,
                "cache_bytes": decoder.nbytes,
                "floor_seconds": floor,
                "recompute_seconds": recompute,
            }
        )
    about = {"context": context, "threads": threads, "read_bytes_per_second": rate}
    return f"{title}, {rate / 1e9:.1f} GB/s", rows, {**about, "decoders": measured}


def main(argv: Sequence[str] | None = None) -> None:
    """One table for every number of threads and length of context."""
    parser = measure.arguments(__doc__, rounds=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--new", type=int, nargs="+", default=[1, 4], help="tokens in a call")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--cache", choices=measure.DTYPES, default="fp32")
    parser.add_argument("--recompute", type=int, default=16384, metavar="TOKENS")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    settings = parser.parse_args(argv)
    measure.pin(max(settings.threads))
    report = Report(settings.json, **vars(settings))
    for threads in settings.threads:
        measure.pin(threads)
        for context in settings.lengths:
            report.case(*decode(context, settings, threads))


if __name__ == "__main__":
    main()
