"""Talks to `jax_peer.py`, which runs under a Python of its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any


class JaxPeer:
    """The authors' layer in a process that lives until the end of the `with` block.

    It inherits this process's CPU affinity. With one thread XLA is told so as well, for it would
    start a pool all the same.

    Args:
        python: of an environment with `jax-requirements.txt`.
        threads: as many as PyTorch has.
    """

    def __init__(self, python: str, threads: int) -> None:
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        if threads == 1:
            flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
            environment["XLA_FLAGS"] = flags
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("jax_peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def __enter__(self) -> "JaxPeer":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the end of its input is the end of it
        self._process.wait()

    def __call__(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            RuntimeError: the peer could not do it, or is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line or '{"error": "the JAX process has ended; see stderr"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
