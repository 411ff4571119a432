import numpy as np
import pytest

from agentic.explore import noise

SHAPE = (64, 1000, 2)


@pytest.mark.parametrize("make", [noise.uniform, noise.pink, noise.sinusoids])
def test_sequences_are_bounded_float32_and_follow_the_generator(make):
    first, again, other = (make(np.random.default_rng(seed), SHAPE) for seed in (0, 0, 1))
    assert first.shape == SHAPE
    assert first.dtype == np.float32
    assert np.abs(first).max() <= 1
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_coloured_noise_has_unit_variance(exponent, steps):
    sequence = noise.coloured(np.random.default_rng(0), (4000, steps, 1), exponent)
    assert sequence.shape == (4000, steps, 1)
    assert (sequence**2).mean() == pytest.approx(1, abs=0.1)
    assert sequence.mean() == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_coloured_noise_has_the_spectrum_it_names(exponent):
    sequence = noise.coloured(np.random.default_rng(0), (500, 1024, 1), exponent)
    power = (np.abs(np.fft.rfft(sequence[..., 0], axis=1)) ** 2).mean(axis=0)
    # From frequency 4/1024 to 256/1024, a factor of 64, power falls by 64**exponent.
    assert power[4] / power[256] == pytest.approx(64**exponent, rel=0.3)


def test_coloured_noise_is_independent_between_environments_and_dimensions():
    sequence = noise.coloured(np.random.default_rng(0), (2, 20_000, 2), exponent=0.0)
    correlation = np.corrcoef(sequence.transpose(0, 2, 1).reshape(4, -1))
    assert np.abs(correlation - np.eye(4)).max() < 0.05


def test_sinusoids_of_one_environment_share_a_base_frequency():
    wave = noise.sinusoids(np.random.default_rng(0), (50, 4096, 3)).astype(np.float64)
    power = np.abs(np.fft.rfft(wave - wave.mean(axis=1, keepdims=True), axis=1))
    peak = power.argmax(axis=1).astype(float)  # (E, A)
    peak = peak[peak.min(axis=1) >= 40]  # slower ones are not resolved
    multiple = peak / peak.min(axis=1, keepdims=True)
    assert len(peak) > 10
    assert np.abs(multiple - np.round(multiple)).max() < 0.1
    assert set(np.round(multiple).ravel()) == {1, 2, 4}
