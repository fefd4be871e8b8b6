"""Hi types as JAX's documentation makes them, and what computes with them.

- `QArray`: an array of `int8` with a scale for each row. Its tangents are ordinary arrays.
- `RankOne`: an outer product, as its factors. Its tangents are of a type of their own, `Factors`,
  which is a vector space.
- `Tup`: a tuple of values of any types. Its tangents are tuples.
"""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.hijax import (
    GradAccum,
    HiPrim,
    HiPspec,
    HiType,
    MappingSpec,
    ShapedArray,
    instantiate_zeros,
    linearize_from_jvp,
    register_hitype,
    vjp_from_lin,
)
from jax.sharding import PartitionSpec


class Op(HiPrim):
    """What the primitives share: all derivatives follow from `jvp` and `transpose`."""

    def __init__(self, in_avals, out_aval):
        self.in_avals, self.out_aval, self.params = tuple(in_avals), out_aval, {}
        super().__init__()

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_lin


# ------------------------------------------------------------------------------ quantized


@dataclasses.dataclass(frozen=True, eq=False)
class QArray:
    values: Any  # int8[..., n]
    scale: Any  # f32[..., 1]


@dataclasses.dataclass(frozen=True)
class QSpec(MappingSpec):
    axis: int


@dataclasses.dataclass(frozen=True)
class QPspec(HiPspec):
    spec: PartitionSpec  # of the values

    def to_lo(self):
        return (self.spec, PartitionSpec(*self.spec[:-1]))

    def to_tangent_spec(self):
        return self.spec

    to_ct_spec = to_tangent_spec


@dataclasses.dataclass(frozen=True)
class QType(HiType):
    array: ShapedArray  # what it stands for: its tangent type

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def __str__(self):
        return f"q8{list(self.shape)}"

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return str(self)

    def lo_ty(self):
        return [
            self.array.update(dtype=jnp.dtype("int8")),
            self.array.update(shape=(*self.shape[:-1], 1)),
        ]

    def lower_val(self, hi_val):
        return [hi_val.values, hi_val.scale]

    def raise_val(self, *lo_vals):
        return QArray(*lo_vals)

    def to_tangent_aval(self):
        return self.array

    def dec_rank(self, size, spec):
        return self if spec is None else QType(self.array.dec_rank(size, spec.axis))

    def inc_rank(self, size, spec):
        return self if spec is None else QType(self.array.inc_rank(size, spec.axis))

    def leading_axis_spec(self):
        return QSpec(0)

    def shard(self, mesh, manual_axes, check_vma, spec):
        return QType(self.array.shard(mesh, manual_axes, check_vma, spec.spec))

    def unshard(self, mesh, check_vma, spec):
        return QType(self.array.unshard(mesh, check_vma, spec.spec))

    def nospec(self, mesh, check_vma, all_names):
        return QPspec(PartitionSpec(all_names))


register_hitype(QArray, lambda q: QType(jax.typeof(q.values).update(dtype=jnp.dtype("float32"))))


class Quantize(Op):
    """To the nearest value; its derivative is that of the identity."""

    def __init__(self, aval):
        super().__init__([aval], QType(aval))

    def expand(self, x):
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        return QArray(jnp.round(x / scale).astype(jnp.int8), scale)

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0]

    def batch(self, axis_data, args, dims):
        (x,), (dim,) = args, dims
        if dim is None:
            return quantize(x), None
        if dim == x.ndim - 1:
            x, dim = jnp.moveaxis(x, dim, 0), 0
        return quantize(x), QSpec(dim)


class Dequantize(Op):
    def __init__(self, aval):
        super().__init__([aval], aval.array)

    def expand(self, q):
        return q.values.astype(jnp.float32) * q.scale

    def jvp(self, primals, tangents):
        return self(*primals), tangents[0]

    def batch(self, axis_data, args, dims):
        return dequantize(*args), dims[0] and dims[0].axis


def quantize(x):
    return Quantize(jax.typeof(x))(x)


def dequantize(q):
    return Dequantize(jax.typeof(q))(q)


# ------------------------------------------------------------------------------- products


class Product:
    """A value with parts."""

    def __init__(self, *parts):
        self.parts = parts


@dataclasses.dataclass(frozen=True)
class ProductSpec(MappingSpec):
    axes: tuple[Any, ...]  # for each part its axis or spec, or None


@dataclasses.dataclass(frozen=True)
class ProductPspec(HiPspec):
    specs: tuple[Any, ...]

    def to_lo(self):
        lo = [s.to_lo() if isinstance(s, HiPspec) else (s,) for s in self.specs]
        return tuple(itertools.chain.from_iterable(lo))

    def to_tangent_spec(self):
        return ProductPspec(
            tuple(s.to_tangent_spec() if isinstance(s, HiPspec) else s for s in self.specs)
        )

    to_ct_spec = to_tangent_spec


@dataclasses.dataclass(frozen=True)
class ProductType(HiType):
    parts: tuple[Any, ...]  # types

    value: ClassVar[type]  # of what this is the type
    tangents: ClassVar["type[ProductType] | None"] = None  # if not this one

    def __str__(self):
        return f"{self.value.__name__}({', '.join(map(str, self.parts))})"

    def str_short(self, short_dtypes=False, mesh_axis_types=False):
        return str(self)

    def mapped(self, fn, *others):
        return type(self)(tuple(map(fn, self.parts, *others)))

    def lo_ty(self):
        return [lo for part in self.parts for lo in part.lo_ty()]

    def lower_val(self, hi_val):
        pairs = zip(self.parts, hi_val.parts, strict=True)
        return [lo for type, part in pairs for lo in type.lower_val(part)]

    def raise_val(self, *lo_vals):
        rest = iter(lo_vals)
        rows = [(t, list(itertools.islice(rest, len(t.lo_ty())))) for t in self.parts]
        return self.value(*(t.raise_val(*lo) for t, lo in rows))

    def to_tangent_aval(self):
        kind = self.tangents or type(self)
        return kind(tuple(part.to_tangent_aval() for part in self.parts))

    def vspace_zero(self):
        return pack(self, *(_zero(part) for part in self.parts))

    def vspace_add(self, x, y):
        rows = zip(self.parts, unpack(x), unpack(y), strict=True)
        return pack(self, *(part.vspace_add(a, b) for part, a, b in rows))

    def dec_rank(self, size, spec):
        dec = lambda part, axis: part if axis is None else part.dec_rank(size, axis)
        return self if spec is None else self.mapped(dec, spec.axes)

    def inc_rank(self, size, spec):
        inc = lambda part, axis: part if axis is None else part.inc_rank(size, axis)
        return self if spec is None else self.mapped(inc, spec.axes)

    def leading_axis_spec(self):
        return ProductSpec(tuple(part.leading_axis_spec() for part in self.parts))

    def shard(self, mesh, manual_axes, check_vma, spec):
        shard = lambda part, s: part.shard(mesh, manual_axes, check_vma, s)
        return self.mapped(shard, spec.specs)

    def unshard(self, mesh, check_vma, spec):
        return self.mapped(lambda part, s: part.unshard(mesh, check_vma, s), spec.specs)

    def nospec(self, mesh, check_vma, all_names):
        hi = lambda part: part.nospec(mesh, check_vma, all_names)
        lo = lambda part: PartitionSpec(all_names)
        specs = [hi(part) if isinstance(part, HiType) else lo(part) for part in self.parts]
        return ProductPspec(tuple(specs))


def _zero(aval):
    return aval.vspace_zero() if isinstance(aval, HiType) else jnp.zeros(aval.shape, aval.dtype)


class Pack(Op):
    """The value with these parts. Linear."""

    def __init__(self, type):
        super().__init__(type.parts, type)

    def expand(self, *parts):
        return self.out_aval.value(*parts)

    def jvp(self, primals, tangents):
        tangent = pack(self.out_aval.to_tangent_aval(), *map(instantiate_zeros, tangents))
        return self(*primals), tangent

    def transpose(self, out_ct, *accums):
        for accum, ct in zip(accums, unpack(instantiate_zeros(out_ct)), strict=True):
            if isinstance(accum, GradAccum):
                accum.accum(ct)

    def batch(self, axis_data, args, dims):
        value = pack(type(self.out_aval)(tuple(map(jax.typeof, args))), *args)
        return value, ProductSpec(dims) if any(d is not None for d in dims) else None


class Unpack(Op):
    """The parts of a value. Linear."""

    def __init__(self, type):
        super().__init__([type], type.parts)

    def expand(self, value):
        return tuple(value.parts)

    def jvp(self, primals, tangents):
        return self(*primals), unpack(instantiate_zeros(tangents[0]))

    def transpose(self, out_ct, accum):
        accum.accum(pack(self.in_avals[0].to_ct_aval(), *map(instantiate_zeros, out_ct)))

    def batch(self, axis_data, args, dims):
        parts = unpack(*args)
        return parts, dims[0].axes if dims[0] else (None,) * len(parts)


def pack(type, *parts):
    return Pack(type)(*parts)


def unpack(value):
    return Unpack(jax.typeof(value))(value)


class RankOne(Product):
    """The matrix `jnp.outer(*parts)`."""


class Factors(Product):
    """A tangent of a `RankOne`: how its factors change."""


class Tup(Product):
    pass


class FactorsType(ProductType):
    value = Factors


class RankOneType(ProductType):
    value, tangents = RankOne, FactorsType

    # A matrix is no vector: sums of these are not of rank one.
    vspace_zero, vspace_add = HiType.vspace_zero, HiType.vspace_add


class TupType(ProductType):
    value = Tup


for _type in (RankOneType, FactorsType, TupType):
    register_hitype(_type.value, lambda v, _type=_type: _type(tuple(map(jax.typeof, v.parts))))


def rank_one(u, v):
    return pack(RankOneType((jax.typeof(u), jax.typeof(v))), u, v)


def dense(matrix):
    u, v = unpack(matrix)
    return u[..., :, None] * v[..., None, :]


def tup(*parts):
    return pack(TupType(tuple(map(jax.typeof, parts))), *parts)
