"""The paper's Table 2 (longest contexts) and part of Table 3 (memory), predicted and as printed.

    python -m benchmarks.paper_table2

Liu & Abbeel 2023 (arXiv:2305.19370), Tables 1 to 3, as quoted in a summary of the paper. Nothing
is fitted: the plan of this package, which is measured on CPUs (`benchmarks.memory_plan`), is asked
for the longest sequence that fits.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from parallel import BlockSettings, LayerSize
from parallel.memory import Batch, Stack, longest, plan

ASSUMPTIONS = """\
One sequence, fp32, AdamW: 4 bytes for a parameter, 4 for its gradient, 8 for the optimiser's state.
All kinds recompute their layers, as in the paper. Heads are those of GPT-3 and OPT-30B (the summary
names none); feed-forward of four widths; blocks of 1,024 queries, 2,048 keys and 1,024 rows, the
defaults of the authors' code. Embedding, logits and loss are taken to be computed in blocks, and
left out. GB are 10^9 bytes, all of them usable; a TPUv4 has 32. Powers of two: the largest that
fits; the exact number of tokens in brackets."""

SHARDINGS = {
    "fully sharded data parallelism": """\
Parameters, gradients and optimiser are sharded over the devices;
each gathers one layer's weights at a time and holds the activations of the whole sequence.""",
    "perfect model parallelism": """\
Everything is divided evenly, activations too: one device
with the memory of all. The paper speaks of model parallelism; how its activations were divided is
not known. Its 64K tokens of the 30B model on 8 devices are out of reach with whole activations: the
inputs of 48 layers alone are 90 GB.""",
}

KINDS = ("vanilla", "memory_efficient", "blockwise")


@dataclass(frozen=True)
class Model:
    """A row of the paper's Table 1."""

    parameters: float
    layers: int
    width: int
    heads: int


MODELS = {
    "1B": Model(1.3e9, 24, 2048, 24),
    "3B": Model(2.7e9, 32, 2560, 32),
    "7B": Model(6.7e9, 32, 4096, 32),
    "13B": Model(13.0e9, 40, 5140, 40),
    "30B": Model(30.0e9, 48, 7168, 56),
    "70B": Model(70.0e9, 80, 8192, 64),
}

# Devices, their GB, model, and the paper's longest contexts in units of 1,024 tokens by kind.
TABLE_2 = [
    ("1 x A100, 80 GB", 1, 80, "1B", (16, 64, 128)),
    ("1 x A100, 80 GB", 1, 80, "3B", (8, 16, 64)),
    ("8 x A100, 80 GB", 8, 80, "3B", (16, 64, 128)),
    ("8 x A100, 80 GB", 8, 80, "7B", (16, 64, 128)),
    ("8 x A100, 80 GB", 8, 80, "13B", (8, 32, 64)),
    ("8 x A100, 80 GB", 8, 80, "30B", (8, 16, 64)),
    ("64 x TPUv4, 32 GB", 64, 32, "13B", (4, 16, 32)),
    ("64 x TPUv4, 32 GB", 64, 32, "30B", (2, 4, 16)),
    ("64 x TPUv4, 32 GB", 64, 32, "70B", (1, 2, 8)),
    ("64 x 80 GB", 64, 80, "70B", None),
]

# The paper's GB of the 3B model on one A100, by tokens and kind; None: out of memory.
TABLE_3 = {8192: (64, 44, 43), 65536: (None, 75, 70), 131072: (None, None, 79)}


def needed(model: Model, kind: str, tokens: int, shards: int) -> int:
    """Bytes on a device at the peak of a training step."""
    stack = Stack(
        size=LayerSize(width=model.width, heads=model.heads, feed_forward=4 * model.width),
        layers=model.layers,
        kind=kind,
        recompute=True,
        half=False,
        blocks=BlockSettings(query=1024, key=2048, rows=1024),
        device=torch.device("cuda"),
    )
    batch = Batch(sequences=1, tokens=tokens)
    return plan(stack, batch, parameters=int(model.parameters), shards=shards).total


def longest_context(model: Model, kind: str, memory: float, shards: int) -> int:
    """Tokens of the longest sequence whose training step fits in `memory` bytes."""
    return longest(lambda tokens: needed(model, kind, tokens, shards) <= memory)


def power_of_two(tokens: int) -> str:
    """The largest up to `tokens`, in units of 1,024 tokens."""
    power = 1 << tokens.bit_length() - 1 if tokens else 0
    return f"{power // 1024}K" if power >= 1024 else str(power)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args(argv)
    print(ASSUMPTIONS)
    for sharding, explained in SHARDINGS.items():
        _print(sharding, explained)
    print("\nTable 3: GB of the 3B model on one A100.\n")
    table = Table("tokens", *KINDS, box=box.MARKDOWN)
    for tokens, paper in TABLE_3.items():
        predicted = [needed(MODELS["3B"], kind, tokens, 1) / 1e9 for kind in KINDS]
        told = [f"{p:,.0f}, paper {q or 'none'}" for p, q in zip(predicted, paper, strict=True)]
        table.add_row(f"{tokens:,}", *told)
    Console(width=140).print(table)


def _print(sharding: str, explained: str) -> None:
    table = Table(box=box.MARKDOWN)
    for column in ("devices", "model", *KINDS):
        table.add_column(column, justify="left" if column in ("devices", "model") else "right")
    agreed = compared = 0
    for devices, count, gigabytes, name, paper in TABLE_2:
        memory, shards = gigabytes * 1e9, count
        if sharding == "perfect model parallelism":
            memory, shards = count * memory, 1
        row = []
        for i, kind in enumerate(KINDS):
            tokens = longest_context(MODELS[name], kind, memory, shards)
            told = f"{power_of_two(tokens)} ({tokens:,})"
            if paper is not None:
                compared += 1
                agreed += power_of_two(tokens) == f"{paper[i]}K"
                told += f", paper {paper[i]}K"
            row.append(told)
        table.add_row(devices, name, *row)
    print(f"\n{sharding.capitalize()}. {explained}\n")
    Console(width=140).print(table)
    print(f"{agreed} of {compared} predictions are the paper's figures.")


if __name__ == "__main__":
    main()
