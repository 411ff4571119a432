"""The Blockwise Parallel Transformer of its authors, in JAX, for a benchmark to talk to.

Runs in an environment of its own (`jax-requirements.txt`) as a long-lived process, one JSON request
a line on stdin and one JSON answer a line on stdout, so that a benchmark in PyTorch can take turns
with it. The caller chooses threads and memory, by affinity, `XLA_FLAGS` and JAX's other variables.

    {"op": "info"}                     versions, device, CPUs it may use
    {"op": "build", "layers": 3, ...}  compiles one step; see `Peer.build` and the fields of `Layer`
    {"op": "step"}                     one forward and backward pass, in seconds
    {"op": "values", "path": "x.npz"}  saves output and gradients
    {"op": "quit"}                     or the end of stdin

A request that fails is answered by {"error": ...}, and the next one is served.

Attention and the feed-forward's loop are `ringattention.ringattention` (in a ring of one device)
and `ringattention.blockwise_feedforward`. As in the authors' LLaMA, layers are scanned, each layer
and each block of the feed-forward is a checkpoint that saves nothing, and logits are in float32.
Theirs is bfloat16 too: parameters in float32, cast for each product; activations and the residual
stream in bfloat16; norms computed in float32.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, PartitionSpec

# Scanned layers need no `prevent_cse`, say the authors.
REMAT: dict[str, Any] = {"prevent_cse": False, "policy": jax.checkpoint_policies.nothing_saveable}
DEFAULTS = {"deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "precision": None}


def import_ringattention() -> Any:
    """The authors' package, which looks for the backend where old versions of jax had it."""
    if not hasattr(jax.lib, "xla_bridge"):
        setattr(jax.lib, "xla_bridge", jax.extend.backend)  # noqa: B010
    return importlib.import_module("ringattention")


class FeedForward(nn.Module):
    """down(relu(up(x)))."""

    width: int
    feed_forward: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Row by row."""
        hidden = nn.relu(nn.Dense(self.feed_forward, dtype=self.dtype, name="up")(x))
        return nn.Dense(self.width, dtype=self.dtype, name="down")(hidden)


class Layer(nn.Module):
    """x + output(attention(norm(x))), then x + feed_forward(norm(x)); causal, no dropout."""

    width: int
    heads: int
    feed_forward: int
    dtype: Any
    block_query: int = 512  # of attention, and the rows of a feed-forward block
    block_key: int = 512

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """(B, S, D) to (B, S, D), in the form that `nn.scan` takes."""
        B, S, D = x.shape
        norm = partial(nn.LayerNorm, epsilon=1e-5, dtype=self.dtype)
        dense = partial(nn.Dense, dtype=self.dtype)

        qkv = dense(3 * D, name="query_key_value")(norm(name="norm_attention")(x))
        q, k, v = (part.reshape(B, S, self.heads, -1) for part in jnp.split(qkv, 3, axis=2))
        x = x + dense(D, name="output")(self.attention(q, k, v).reshape(B, S, D))

        blockwise = import_ringattention().blockwise_feedforward
        feed_forward = nn.remat(FeedForward, **REMAT)(D, self.feed_forward, self.dtype)
        normed = norm(name="norm_feed_forward")(x)
        return x + blockwise(feed_forward, normed, self.block_query), None

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Causal attention of (B, S, H, K)."""
        chunks = {"query_chunk_size": self.block_query, "key_chunk_size": self.block_key}
        blockwise = {"causal_block_size": 1, "dtype": self.dtype, **chunks, **DEFAULTS, **REMAT}
        ring = import_ringattention().ringattention
        # no bias, segments or cache; the mesh's axis; logits in float32
        settings = None, None, None, "ring", True, blockwise
        mesh, split = Mesh(jax.devices()[:1], ("ring",)), PartitionSpec(None, "ring")
        sharded = partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
        return sharded(lambda *qkv: ring(*qkv, *settings), check_vma=False)(q, k, v)


def from_torch(shapes: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """From `layers.{i}.{module}.{weight|bias}` to flax's parameters, which stack the layers."""
    params = {}
    for path, stacked in flatten_dict(shapes).items():
        layers = np.stack([arrays[torch_name(path, i)] for i in range(stacked.shape[0])])
        params[path] = layers.swapaxes(1, 2) if path[-1] == "kernel" else layers
    return unflatten_dict(params)


def to_torch(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `from_torch`, in float32."""
    arrays = {}
    for path, stacked in flatten_dict(params).items():
        for i, layer in enumerate(np.asarray(stacked, np.float32)):
            arrays[torch_name(path, i)] = layer.T if path[-1] == "kernel" else layer
    return arrays


def torch_name(path: tuple[str, ...], layer: int) -> str:
    """PyTorch's name of a parameter of flax."""
    return f"layers.{layer}.{path[-2]}.{'bias' if path[-1] == 'bias' else 'weight'}"


class Peer:
    """The operations: each takes a request's arguments and returns its answer."""

    def info(self) -> dict[str, Any]:
        """What the figures depend on."""
        packages = ("jax", "jaxlib", "flax", "ringattention", "numpy")
        return {
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "device": jax.devices()[0].device_kind,
            "cpus": len(os.sched_getaffinity(0)),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }

    def build(
        self, layers: int, sequence: int, batch: int, dtype: str, weights: str | None, **layer: Any
    ) -> dict[str, float]:
        """Compiles one step; parameters, input x and output gradient g are random or a file's."""
        axes: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        stack = nn.scan(nn.remat(Layer, **REMAT), length=layers, **axes)(**layer, dtype=dtype)
        keys = jax.random.split(jax.random.key(0), 3)
        x, g = (jax.random.normal(key, (batch, sequence, layer["width"])) for key in keys[:2])
        initialise = jax.jit(partial(stack.init, keys[2]))
        if weights is None:
            params = initialise(x, None)["params"]
        else:
            arrays = np.load(weights, allow_pickle=False)
            shapes = jax.eval_shape(initialise, x, None)["params"]
            params = jax.device_put(from_torch(shapes, arrays))
            x, g = arrays["x"], arrays["g"]
        self.arguments = params, jnp.asarray(x, dtype), jnp.asarray(g, dtype)

        def step(params: Any, x: jax.Array, g: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
            """Output, and the gradients of sum(output * g) for parameters and input."""
            y, pullback = jax.vjp(lambda p, x: stack.apply({"params": p}, x, None)[0], params, x)
            return y, *pullback(g)

        start = time.perf_counter()
        self.compiled = jax.jit(step).lower(*self.arguments).compile()
        seconds = time.perf_counter() - start
        memory, kinds = self.compiled.memory_analysis(), ("temp", "argument", "output")
        sizes = {f"{kind}_bytes": getattr(memory, f"{kind}_size_in_bytes") for kind in kinds}
        return {"compile_s": seconds, **sizes}

    def step(self) -> dict[str, float]:
        """Times one step until its results are there."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return {"seconds": time.perf_counter() - start}

    def values(self, *, path: str) -> dict[str, str]:
        """Saves y, dx, and the parameters' gradients under the parameters' names, in float32."""
        y, d_params, dx = self.compiled(*self.arguments)
        arrays = {"y": y.astype(np.float32), "dx": dx.astype(np.float32), **to_torch(d_params)}
        np.savez(path, **arrays)
        return {"path": path}


def main() -> None:
    """Answers requests until told to quit; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peer = Peer()
    methods: tuple[Callable[..., Any], ...] = peer.info, peer.build, peer.step, peer.values
    operations = {method.__name__: method for method in methods} | {"quit": sys.exit}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = operations[request.pop("op")](**request)
        except Exception as error:  # out of memory, say: the caller decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
