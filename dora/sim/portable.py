"""Functions of arrays that give the same on every processor: those of the C library, element by element.

NumPy's own exp and power differ in the last digit between processors with and without AVX-512. A simulation is a
function of its seed, so its latencies must not.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_exp: Final = np.frompyfunc(math.exp, 1, 1)
_power: Final = np.frompyfunc(math.pow, 2, 1)
_phi: Final = np.frompyfunc(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)), 1, 1)


def exp(x: Floats) -> Floats:
    """Return e to the power of each element."""
    return np.asarray(_exp(x), dtype=np.float64)


def power(x: Floats, exponent: float) -> Floats:
    """Return each element to a power."""
    return np.asarray(_power(x, exponent), dtype=np.float64)


def normal_cdf(z: Floats) -> Floats:
    """Return the standard normal distribution function of each element."""
    return np.asarray(_phi(z), dtype=np.float64)
