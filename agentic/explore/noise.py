"""Open-loop action sequences with structure in time.

White noise moves a physical system little: what it pushes one way it pushes back a step later.
Sequences with much of their power at low frequencies reach far more of the state space at no cost.

Axes: E environments, T steps, A action dimensions. Every sequence is float32 in [-1, 1].
"""

import numpy as np


def coloured(
    rng: np.random.Generator, shape: tuple[int, int, int], exponent: float = 1.0
) -> np.ndarray:
    """Gaussian noise (E, T, A) float32 with power ~ 1/frequency**exponent: 0 white, 1 pink, 2 red.

    It has variance 1 over the ensemble, has no bounds, and is independent between environments and
    dimensions. The constant component gets the power of the lowest frequency 1/T, so that a
    sequence has an offset of its own (Timmer & Koenig 1995; Eberhard et al. 2023).
    """
    environments, steps, size = shape
    frequency = np.fft.rfftfreq(steps)
    frequency[0] = 1 / steps
    amplitude = frequency ** (-exponent / 2)
    # irfft counts the inner frequencies twice, with half of the power in either part.
    power = np.full(len(frequency), 2.0)
    power[0] = 1.0
    if steps % 2 == 0:
        power[-1] = 1.0
    amplitude *= steps / np.sqrt((power * amplitude**2).sum())
    real, imaginary = rng.standard_normal((2, environments, size, len(frequency))) * np.sqrt(0.5)
    real[..., power == 1] *= np.sqrt(2)
    imaginary[..., power == 1] = 0
    sequence = np.fft.irfft((real + 1j * imaginary) * amplitude, n=steps, axis=-1)
    return np.ascontiguousarray(np.swapaxes(sequence, 1, 2), dtype=np.float32)


def uniform(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Independent uniform actions (E, T, A)."""
    return rng.uniform(-1, 1, shape).astype(np.float32)


def pink(rng: np.random.Generator, shape: tuple[int, int, int], scale: float = 0.7) -> np.ndarray:
    """Pink noise (E, T, A) of standard deviation `scale`, clipped."""
    return np.clip(scale * coloured(rng, shape), -1, 1)


def sinusoids(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """One sine per environment and dimension (E, T, A), clipped.

    The dimensions of an environment share a base frequency, 0.02 to 0.6 radians per step, of which
    each takes a simple multiple: joints that move in step make gaits, independent ones do not.
    """
    environments, steps, size = shape
    one = (environments, 1, size)
    base = np.exp(rng.uniform(np.log(0.02), np.log(0.6), (environments, 1, 1)))
    angle = base * rng.choice([0.5, 1.0, 1.0, 2.0], one) * np.arange(steps)[None, :, None]
    wave = np.sin(angle + rng.uniform(0, 2 * np.pi, one))
    wave = rng.uniform(0.2, 1.3, one) * wave + rng.uniform(-0.5, 0.5, one)
    return np.clip(wave, -1, 1).astype(np.float32)
