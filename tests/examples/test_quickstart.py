import jax.numpy as jnp
import numpy as np

from examples import quickstart


def test_induction_scores():
    period = quickstart.PERIOD
    perfect = jnp.eye(2 * period, k=1 - period)  # each query attends to the key `period - 1` before
    previous = jnp.eye(2 * period, k=-1)
    pattern = jnp.stack([perfect, previous, 0.5 * (perfect + previous)])[None, None]
    np.testing.assert_allclose(quickstart.induction_scores(pattern), [[1, 0, 0.5]])
