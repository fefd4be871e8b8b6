"""Functions that need arguments of their own, and those that are left out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .arguments import BITS, CUBE, KEY, ONE, A, B, Call, M, N, X, Y, bound

IMAGE = jnp.linspace(-1, 1, 75).reshape(1, 3, 5, 5)
KERNEL = jnp.linspace(-0.5, 0.5, 54).reshape(2, 3, 3, 3)
DOT = (((1,), (0,)), ((), ()))
ROW = lax.GatherDimensionNumbers((1,), (0,), (0,))
INTO = lax.ScatterDimensionNumbers((1,), (0,), (0,))
AT = jnp.array([[0], [2]])
ROWS = B[:2]
NEW = jnp.array([0.5, 1.5])
LOCAL = jnp.linspace(-1, 1, 2 * 12 * 4 * 4).reshape(2, 12, 4, 4)
RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
CLASSES = jnp.array([0, 2, 1])
LABELLED = (CUBE, jnp.zeros((2, 3)), jnp.array([[1], [2]]), jnp.zeros((2, 1)))

# By name of the function: its positional arguments, and those by keyword.
ARGUMENTS = {
    "jax.numpy.apply_along_axis": ((jnp.sum, 0, A), {}),
    "jax.numpy.apply_over_axes": ((jnp.sum, CUBE, (0, 1)), {}),
    "jax.numpy.argwhere": ((X,), {"size": 3}),
    "jax.numpy.bincount": ((N,), {"length": 4}),
    "jax.numpy.choose": ((jnp.array([0, 1, 0]), [X, Y]), {"mode": "clip"}),
    "jax.numpy.compress": ((BITS, X), {"size": 2}),
    "jax.numpy.dsplit": ((CUBE, 2), {}),
    "jax.numpy.einsum": (("ij,jk->ik", A, B), {}),
    "jax.numpy.extract": ((BITS, X), {"size": 2}),
    "jax.numpy.fill_diagonal": ((A, 0.5), {"inplace": False}),
    "jax.numpy.flatnonzero": ((X,), {"size": 3}),
    "jax.numpy.full": (((2, 3), ONE), {}),
    "jax.numpy.intersect1d": ((N, N), {"size": 3}),
    "jax.numpy.nonzero": ((X,), {"size": 3}),
    "jax.numpy.permute_dims": ((A, (1, 0)), {}),
    "jax.numpy.place": ((X, BITS, Y), {"inplace": False}),
    "jax.numpy.put": ((X, jnp.array([0, 2]), NEW), {"inplace": False}),
    "jax.numpy.put_along_axis": ((X, jnp.array([0, 2]), NEW, 0), {"inplace": False}),
    "jax.numpy.ravel_multi_index": (((N, N), (4, 4)), {"mode": "clip"}),
    "jax.numpy.roots": ((X,), {"strip_zeros": False}),
    "jax.numpy.setdiff1d": ((N, jnp.array([1])), {"size": 2}),
    "jax.numpy.setxor1d": ((N, jnp.array([1, 5])), {"size": 4}),
    "jax.numpy.union1d": ((N, N), {"size": 3}),
    "jax.numpy.unique": ((N,), {"size": 3}),
    "jax.numpy.unique_all": ((N,), {"size": 3}),
    "jax.numpy.unique_counts": ((N,), {"size": 3}),
    "jax.numpy.unique_inverse": ((N,), {"size": 3}),
    "jax.numpy.unique_values": ((N,), {"size": 3}),
    "jax.numpy.unpackbits": ((N.astype(jnp.uint8),), {}),
    "jax.numpy.linalg.matrix_power": ((A, 3), {}),
    "jax.scipy.special.bessel_jn": ((X,), {"v": 3, "n_iter": 10}),
    "jax.scipy.special.sph_harm_y": ((M, jnp.array([0, 1, 1]), X, Y), {"n_max": 2}),
    "jax.scipy.linalg.funm": ((A, jnp.sin), {}),
    "jax.scipy.linalg.leslie": ((X, Y[:2]), {}),
    "jax.scipy.linalg.cho_solve": (((A, True), X), {}),
    "jax.scipy.linalg.eigh_tridiagonal": ((X, Y[:2]), {"eigvals_only": True}),
    "jax.scipy.linalg.lu_solve": (((A, jnp.arange(3)), X), {}),
    "jax.scipy.optimize.minimize": ((lambda x: jnp.sum((x - 1) ** 2), X), {"method": "BFGS"}),
    "jax.scipy.stats.truncnorm.logpdf": ((X, -2.0, 2.0), {}),
    "jax.scipy.stats.multinomial.pmf": ((N, jnp.asarray(6), jnp.array([0.2, 0.3, 0.5])), {}),
    "jax.scipy.stats.multinomial.logpmf": ((N, jnp.asarray(6), jnp.array([0.2, 0.3, 0.5])), {}),
    "jax.scipy.stats.dirichlet.logpdf": ((jnp.array([0.2, 0.3, 0.5]), X + 1), {}),
    "jax.lax.argmax": ((X, 0, jnp.int32), {}),
    "jax.lax.argmin": ((X, 0, jnp.int32), {}),
    "jax.lax.associative_scan": ((jnp.add, X), {}),
    "jax.lax.broadcast_in_dim": ((X, (2, 3), (1,)), {}),
    "jax.lax.cond": ((jnp.asarray(True), jnp.sin, jnp.cos, X), {}),
    "jax.lax.conv": ((IMAGE, KERNEL, (1, 1), "SAME"), {}),
    "jax.lax.conv_general_dilated": ((IMAGE, KERNEL, (2, 1), "SAME"), {}),
    "jax.lax.conv_general_dilated_local": ((IMAGE, LOCAL, (1, 1), "VALID", (2, 2)), {}),
    "jax.lax.conv_general_dilated_patches": ((IMAGE, (2, 2), (1, 1), "VALID"), {}),
    "jax.lax.conv_transpose": (
        (IMAGE, KERNEL.transpose(2, 3, 1, 0), (1, 1), "SAME"),
        {"dimension_numbers": ("NCHW", "HWIO", "NCHW")},
    ),
    "jax.lax.conv_with_general_padding": ((IMAGE, KERNEL, (1, 1), "SAME", None, None), {}),
    "jax.lax.dot_general": ((A, B, DOT), {}),
    "jax.lax.dynamic_slice": ((X, (jnp.asarray(1),), (2,)), {}),
    "jax.lax.dynamic_update_index_in_dim": ((X, ONE, jnp.asarray(1), 0), {}),
    "jax.lax.dynamic_update_slice": ((X, NEW, (jnp.asarray(1),)), {}),
    "jax.lax.dynamic_update_slice_in_dim": ((X, NEW, jnp.asarray(1), 0), {}),
    "jax.lax.fft": ((X, "RFFT", (3,)), {}),
    "jax.lax.fori_loop": ((0, 3, lambda i, x: jnp.sin(x), X), {}),
    "jax.lax.full": (((2, 3), ONE), {}),
    "jax.lax.gather": ((B, AT, ROW, (1, 3)), {}),
    "jax.lax.index_take": ((B, (jnp.array([0, 2]),), (0,)), {}),
    "jax.lax.map": ((jnp.sin, X), {}),
    "jax.lax.pad": ((X, ONE, [(1, 1, 0)]), {}),
    "jax.lax.platform_dependent": ((X,), {"default": jnp.sin, "cpu": jnp.cos}),
    "jax.lax.polygamma": ((ONE + X * 0 + 1, X), {}),
    "jax.lax.ragged_dot": ((A, CUBE[:, :, :3], jnp.array([1, 2])), {}),
    "jax.lax.ragged_dot_general": ((A, CUBE[:, :, :3], jnp.array([1, 2]), RAGGED), {}),
    "jax.lax.reduce": ((X, np.float32(0), lax.add, (0,)), {}),
    "jax.lax.reduce_and": ((BITS, (0,)), {}),
    "jax.lax.reduce_max": ((X, (0,)), {}),
    "jax.lax.reduce_min": ((X, (0,)), {}),
    "jax.lax.reduce_or": ((BITS, (0,)), {}),
    "jax.lax.reduce_precision": ((X, 5, 8), {}),
    "jax.lax.reduce_prod": ((X, (0,)), {}),
    "jax.lax.reduce_sum": ((X, (0,)), {}),
    "jax.lax.reduce_window": ((X, -np.inf, lax.max, (2,), (1,), "VALID"), {}),
    "jax.lax.reduce_xor": ((BITS, (0,)), {}),
    "jax.lax.rev": ((X, (0,)), {}),
    "jax.lax.rng_bit_generator": ((jnp.arange(4, dtype=jnp.uint32), (3,)), {}),
    "jax.lax.scan": ((lambda c, x: (c + x, c * x), ONE, X), {}),
    "jax.lax.scatter": ((B, AT, ROWS, INTO), {}),
    "jax.lax.scatter_add": ((B, AT, ROWS, INTO), {}),
    "jax.lax.scatter_max": ((B, AT, ROWS, INTO), {}),
    "jax.lax.scatter_min": ((B, AT, ROWS, INTO), {}),
    "jax.lax.scatter_mul": ((B, AT, ROWS, INTO), {"unique_indices": True}),
    "jax.lax.scatter_sub": ((B, AT, ROWS, INTO), {}),
    "jax.lax.slice": ((X, (1,), (3,)), {}),
    "jax.lax.squeeze": ((A[None], (0,)), {}),
    "jax.lax.switch": ((jnp.asarray(1), [jnp.sin, jnp.cos, jnp.tanh], X), {}),
    "jax.lax.tile": ((X, (2,)), {}),
    "jax.lax.transpose": ((A, (1, 0)), {}),
    "jax.lax.while_loop": ((lambda x: x[0] < 1, lambda x: 2 * x, X), {}),
    "jax.lax.zeta": ((X + 2, Y + 1), {}),
    "jax.lax.linalg.ormqr": ((A, X, B), {}),
    "jax.lax.linalg.tridiagonal_solve": ((X.at[0].set(0), X + 2, Y.at[2].set(0), A), {}),
    "jax.random.wrap_key_data": ((jnp.array([3, 4], jnp.uint32),), {}),
    "jax.random.multinomial": ((KEY, jnp.asarray(5.0), jnp.array([0.2, 0.3, 0.5])), {}),
    "jax.random.multivariate_normal": ((KEY, X, A), {}),
    "jax.scipy.signal.stft": ((X,), {"nperseg": 2}),
    "jax.random.randint": ((KEY, (3,), 0, 9), {}),
    "jax.random.triangular": ((KEY, 0.0, 0.5, 1.0), {"shape": (3,)}),
    "optax.losses.ctc_loss": (LABELLED, {}),
    "optax.losses.ctc_loss_with_forward_probs": (LABELLED, {}),
    "optax.losses.multiclass_sparsemax_loss": ((A, CLASSES), {}),
    "optax.losses.ntxent": ((A, jnp.array([0, 0, 1])), {}),
}

# What cannot be in a `vmap`, or is something else there.
NOT_BATCHED = {
    "jax.lax.linalg.cholesky_update": "JAX has no batching rule for it",
    "jax.lax.rng_bit_generator": "the examples of a batch draw other bits than one alone",
}

EXCLUDED = {
    "it takes or returns no arrays": (
        "get_scaled_dot_general_config array_repr array_str broadcast_shapes get_printoptions "
        "printoptions set_printoptions promote_types result_type einsum_path frompyfunc key_dtype "
        "key_impl conv_dimension_numbers conv_general_permutations conv_general_shape_tuple "
        "conv_shape_tuple conv_transpose_shape_tuple padtype_to_pads reduce_window_shape_tuple "
        "dtype vectorize make_fenchel_young_loss can_cast iscomplexobj isdtype isscalar issubdtype "
        "iterable shape_as_value"
    ),
    "it makes an array of nothing but static arguments": (
        "arange bartlett blackman hamming hanning kaiser diag_indices empty eye fromfunction "
        "fromiter fromstring identity indices mask_indices ones tri tril_indices triu_indices "
        "zeros fftfreq rfftfreq bernoulli dft hadamard helmert hilbert invhilbert invpascal "
        "pascal iota "
        "broadcasted_iota PRNGKey key"
    ),
    "its result does not depend on the values of its arguments": (
        "diag_indices_from empty_like full_like isrealobj ndim ones_like shape size "
        "tril_indices_from triu_indices_from zeros_like"
    ),
    "it returns a `bool` of Python, which is static where it is sown": "cho_factor",
    "it draws other numbers at each call": "rng_uniform",
    "it reads or writes memory or files of the host": (
        "from_dlpack frombuffer fromfile load save savez"
    ),
    "the shape of its result depends on values": "trim_zeros",
    "it is about the axes of a mesh or a `vmap`": (
        "all_gather all_to_all axis_index axis_size pbroadcast pcast pmean ppermute pshuffle "
        "psum_scatter psum_scatter_start pswapaxes ragged_all_to_all with_sharding_constraint"
    ),
    "it holds functions of its own, and is tested with the rules": (
        "composite custom_linear_solve custom_root scatter_apply"
    ),
    "it is there for what it does to the program, not for a value": (
        "after_all create_token dce_sink"
    ),
    "it needs an accelerator": "scaled_dot_general scaled_matmul",
}


def of_libraries() -> dict[str, Call]:
    """Layers of Equinox and optimizers of optax, as functions of their arrays."""
    calls = {f"equinox.nn.{name}": _of_module(*call) for name, call in _layers().items()}
    for name, optimizer in _optimizers().items():
        calls[f"optax.{name}"] = _of_optimizer(optimizer)
    return calls


def _of_module(layer, *args) -> Call:
    return bound(lambda layer, *args: layer(*args), (layer, *args))


def _layers() -> dict:
    nn, key = eqx.nn, KEY
    image, volume, line = IMAGE[0], CUBE[:, :, :, None], CUBE[0]
    layers = {
        "AdaptiveAvgPool1d": (nn.AdaptiveAvgPool1d(2), line),
        "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(2), image),
        "AdaptiveAvgPool3d": (nn.AdaptiveAvgPool3d(1), volume),
        "AdaptiveMaxPool1d": (nn.AdaptiveMaxPool1d(2), line),
        "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(2), image),
        "AdaptiveMaxPool3d": (nn.AdaptiveMaxPool3d(1), volume),
        "AvgPool1d": (nn.AvgPool1d(2), line),
        "AvgPool2d": (nn.AvgPool2d(2), image),
        "AvgPool3d": (nn.AvgPool3d((2, 2, 1)), volume),
        "MaxPool1d": (nn.MaxPool1d(2), line),
        "MaxPool2d": (nn.MaxPool2d(2), image),
        "MaxPool3d": (nn.MaxPool3d((2, 2, 1)), volume),
        "Conv1d": (nn.Conv1d(3, 2, 2, key=key), line),
        "Conv2d": (nn.Conv2d(3, 2, 3, key=key), image),
        "Conv3d": (nn.Conv3d(2, 2, 1, key=key), volume),
        "ConvTranspose1d": (nn.ConvTranspose1d(3, 2, 2, key=key), line),
        "ConvTranspose2d": (nn.ConvTranspose2d(3, 2, 3, key=key), image),
        "ConvTranspose3d": (nn.ConvTranspose3d(2, 2, 1, key=key), volume),
        "Embedding": (nn.Embedding(5, 3, key=key), jnp.asarray(2)),
        "GRUCell": (nn.GRUCell(3, 4, key=key), X, CUBE[0, 0]),
        "LSTMCell": (nn.LSTMCell(3, 4, key=key), X, (CUBE[0, 0], CUBE[0, 1])),
        "GroupNorm": (nn.GroupNorm(1, 3), image),
        "Identity": (nn.Identity(), X),
        "Lambda": (nn.Lambda(jnp.tanh), X),
        "LayerNorm": (nn.LayerNorm(3), X),
        "Linear": (nn.Linear(3, 4, key=key), X),
        "MLP": (nn.MLP(3, 2, 4, 2, key=key), X),
        "MultiheadAttention": (nn.MultiheadAttention(3, 9, 9, 9, 9, key=key), *[_sequence()] * 3),
        "PReLU": (nn.PReLU(), X - 0.5),
        "RMSNorm": (nn.RMSNorm(3), X),
        "RotaryPositionalEmbedding": (nn.RotaryPositionalEmbedding(4), CUBE[0]),
        "Sequential": (
            nn.Sequential([nn.Linear(3, 3, key=key), nn.Lambda(jnp.tanh), nn.LayerNorm(3)]),
            X,
        ),
        "WeightNorm": (nn.WeightNorm(nn.Linear(3, 4, key=key)), X),
    }
    return layers | {"Dropout": (_Dropped(nn.Dropout(0.5)), X, key)}


class _Dropped(eqx.Module):
    dropout: eqx.nn.Dropout

    def __call__(self, x, key):
        return self.dropout(x, key=key)


def _sequence() -> jax.Array:
    return jnp.linspace(-1, 1, 36).reshape(4, 9)


def _optimizers() -> dict:
    names = (
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb "
        "lars lion nadam nadamw novograd optimistic_gradient_descent radam rmsprop rprop "
        "sgd sign_sgd sm3 yogi"
    )
    optimizers = {name: getattr(optax, name)(0.1) for name in names.split()}
    transforms = {
        "clip": optax.clip(0.1),
        "clip_by_global_norm": optax.clip_by_global_norm(0.1),
        "clip_by_block_rms": optax.clip_by_block_rms(0.1),
        "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
        "add_decayed_weights": optax.add_decayed_weights(0.1),
        "centralize": optax.centralize(),
        "ema": optax.ema(0.9),
        "trace": optax.trace(0.9),
        "zero_nans": optax.zero_nans(),
        "scale_by_schedule": optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
        "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 2),
    }
    return optimizers | transforms


def _of_optimizer(optimizer) -> Call:
    params = {"w": B, "b": X}
    return bound(optimizer.update, ({"w": A, "b": Y}, optimizer.init(params), params))
