import pytest

from benchmarks.memory_plan import chain_settings, compare, layers_step, model_plan, model_step
from parallel import LAYERS, BlockSettings, LayerSize, Scope, TransformerLayer
from parallel.memory import LAYER_BYTES, Batch, Stack, longest, plan

STRIDED = Scope(start=1, stride=4)
PRECISIONS = ["fp32", "bf16"]


def _stack(kind, recompute=False, precision="fp32", width=64, heads=1, layers=2, **more):
    size = LayerSize(width=width, heads=heads, feed_forward=4 * width, **more)
    half = precision == "bf16"
    return Stack(size=size, layers=layers, kind=kind, recompute=recompute, half=half)


def _is_near(step_and_plan):
    found = compare(*step_and_plan)
    assert 0.85 < found["ratio"] < 1.15, found


def _training_is_near(kind, recompute, precision, trajectories, episode_steps, **more):
    size = {"trajectories": trajectories, "episode_steps": episode_steps}
    settings = chain_settings(kind, recompute, precision, **size) | more
    _is_near((model_step(**size, **settings), model_plan(**size, **settings)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("scope", [Scope(), Scope(start=1025, stride=4)])
def test_plan_of_bare_layers_is_near_the_peak(kind, recompute, precision, scope):
    stack = _stack(kind, recompute, precision)
    _is_near(layers_step(stack, Batch(sequences=1, tokens=2048, scope=scope)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_plan_of_several_sequences_and_heads(kind, precision):
    stack = _stack(kind, precision=precision, width=128, heads=4, layers=1)
    _is_near(layers_step(stack, Batch(sequences=3, tokens=700, scope=STRIDED)))


@pytest.mark.parametrize("kind", LAYERS)
def test_plan_with_dropout(kind):
    _is_near(layers_step(_stack(kind, dropout=0.1), Batch(sequences=1, tokens=2048)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("layout", ["step", "interleaved"])
def test_plan_of_a_training_step_is_near_the_peak(kind, recompute, precision, layout):
    steps = 512 if layout == "interleaved" else 2048
    more = {"tokens.layout": layout, "chain.loss_on": "last", "model.layers": 2}
    _training_is_near(kind, recompute, precision, 2, steps // 2, **more)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("vanilla", 16384)] + [(k, n) for k in LAYERS if k != "vanilla" for n in (16384, 65536)],
)
def test_plan_of_long_contexts(kind, tokens, recompute, precision):
    _training_is_near(kind, recompute, precision, 4, tokens // 16)


def test_every_kind_has_a_plan():
    assert LAYER_BYTES.keys() == LAYERS.keys()


def test_parameters_of_a_layer():
    stack = _stack("vanilla", width=24, heads=2)
    layer = TransformerLayer(stack.size, kind="vanilla", recompute=False)
    assert stack.layer_parameters == sum(p.numel() for p in layer.parameters())


def test_state_by_hand():
    small = plan(_stack("vanilla"), Batch(sequences=1, tokens=1), parameters=10**6, averaged=True)
    assert (small.parameters, small.averaged, small.optimizer) == (4e6, 4e6, 8e6)
    assert (small.gradients, small.activations) == (4e6, 0)  # the peak is in the optimiser's step
    assert small.total == 20e6


def test_accumulation_keeps_all_gradients():
    stack, batch = _stack("blockwise", layers=3), Batch(sequences=1, tokens=4096)
    once, more = (
        plan(stack, batch, parameters=10**6, accumulate=accumulate) for accumulate in (False, True)
    )
    assert more.gradients >= 4e6 > once.gradients
    assert more.activations == once.activations


def test_smaller_blocks_need_less():
    stack, batch = _stack("blockwise"), Batch(sequences=1, tokens=8192)
    small = Stack(**vars(stack) | {"blocks": BlockSettings(query=128, key=128, rows=64)})
    assert plan(small, batch, parameters=0).total < plan(stack, batch, parameters=0).total


@pytest.mark.parametrize("most", [0, 1, 2, 3, 100, 1023, 1024])
def test_longest(most):
    assert longest(lambda n: n <= most) == most


def test_longest_has_an_end():
    assert longest(lambda n: True, limit=9) == 9
