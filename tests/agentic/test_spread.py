"""What settings mean for a number of processes, known before any of them waits."""

import dataclasses

import pytest
from conftest import make_model
from training import make_config

from agentic.model import layer_size
from agentic.scale import ParallelConfig
from agentic.spread import sides_of
from agentic.tokens import TOKENS_PER_STEP
from parallel.cost import layer_terms

CHAIN = 2 * 1000  # environment steps of two episodes


def _config(layout="step", precision="fp32", batch_steps=20, **parallel):
    model = make_model(layout=layout, width=48, heads=4, kind="blockwise")
    config = make_config(model, precision=precision, batch_steps=batch_steps)
    return dataclasses.replace(config, parallel=ParallelConfig(kind="cube", **parallel))


@pytest.mark.parametrize("keys", ["gather", "ring"])
@pytest.mark.parametrize("layout", ["step", "interleaved"])
@pytest.mark.parametrize(("precision", "element_bytes"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize(("batch_steps", "batch"), [(20, 1), (3 * CHAIN, 3)])
def test_the_planner_counts_the_layer_that_is_trained(
    keys, layout, precision, element_bytes, batch_steps, batch
):
    config = _config(layout, precision, batch_steps, keys=keys, dp=2)
    sides, unit = sides_of(config, 8), TOKENS_PER_STEP[layout]
    assert sides.dp == 2
    assert sides.shape == sides.candidates[0].shape
    for candidate in sides.candidates:
        terms = layer_terms(
            candidate.shape,
            layer_size(config.model),
            batch=batch,
            tokens=CHAIN * unit,
            unit=unit,
            ring=keys == "ring",
        )
        assert candidate.total == pytest.approx(sum(t.bytes(element_bytes) for t in terms))


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"^model.width: got 48, expected a multiple of x\*y\*z=5"):
        sides_of(_config(shape=(5, 1, 1)), 5)
    with pytest.raises(ValueError, match=r"accumulate: got 2 .*expected a multiple of 4"):
        sides_of(_config(shape=(1, 1, 1), dp=4), 4)
