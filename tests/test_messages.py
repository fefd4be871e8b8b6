"""What users get wrong, and what they are told: the whole message, to be read.

Wherever a message has a file and a line, `<line>` stands for it.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import harvest
from harvest import add, at, capture, folds, plant, reap, scope, sow, stacked, zero

MESSAGES = json.loads((Path(__file__).parent / "data" / "messages.json").read_text())


def layer(x, w):
    h = sow(jnp.tanh(x @ w), name="h")
    return x + h, None


ws = jnp.stack([jnp.eye(4)] * 3)
x = jnp.ones(4)
model = lambda x, ws=ws: lax.scan(layer, x, ws)[0]


def unrolled(x):
    for i in range(3):
        with scope(f"layers/{i}"):
            x = x + sow(jnp.tanh(x), name="resid")
    return x


def twice(x):
    x = sow(x + 1, name="h")
    return sow(x * 2, name="h")


def loop(n):
    return lax.while_loop(lambda c: c < n, lambda c: sow(c + 1, name="c"), 0)


def branch(x):
    return lax.cond(
        x.sum() > 0, lambda x: sow(x * 2, name="up"), lambda x: sow(x - 1, name="down"), x
    )


loss = lambda x: model(x).sum()


CASES = {
    "typo": lambda: reap(unrolled, "layers/0/resd")(x),
    "missing scope": lambda: reap(unrolled, "resid")(x),
    "layer out of range": lambda: reap(unrolled, "layers/3/resid")(x),
    "glob matches nothing": lambda: reap(unrolled, "layers/*/attn")(x),
    "plant typo": lambda: plant(model, {"hh": x})(x),
    "plant wrong layer count": lambda: plant(model, {"h": jnp.ones((4, 4))})(x),
    "plant one layer's value": lambda: plant(model, {"h": x})(x),
    "plant dtype": lambda: plant(model, {"h": jnp.ones((3, 4), jnp.float16)})(x),
    "plant list": lambda: plant(model, {"h": [x, x, x]})(x),
    "plant string": lambda: plant(model, {"h": "zero"})(x),
    "plant uncalled edit": lambda: plant(model, {"h": harvest.zero})(x),
    "plant capture's tuple": lambda: plant(model, capture(model)(x)[1])(x),
    "plant glob with a value": lambda: plant(unrolled, {"layers/*/resid": x})(x),
    "plant twice reached": lambda: plant(
        unrolled, {"layers/*/resid": zero(), "layers/0/resid": zero()}
    )(x),
    "edit changes shape": lambda: plant(model, {"h": lambda h: h[:2]})(x),
    "edit returns None": lambda: plant(model, {"h": lambda h: None})(x),
    "edit wants index": lambda: plant(model, {"h": lambda h, i: h})(x),
    "at out of range": lambda: plant(model, {"h": at(3, zero())})(x),
    "at where there is no loop": lambda: plant(unrolled, {"layers/0/resid": at(0, zero())})(x),
    "add of wrong shape": lambda: plant(model, {"h": add(jnp.ones(3))})(x),
    "duplicate": lambda: reap(twice)(x),
    "duplicate plant": lambda: plant(twice, {"h": x})(x),
    "append count": lambda: plant(twice, {"h": (x,)}, mode="append")(x),
    "while without fold": lambda: reap(loop)(3),
    "fold uncalled": lambda: reap(model, {"h": folds.mean})(x),
    "fold in plants": lambda: plant(model, {"h": folds.mean()})(x),
    "reducer index out of range": lambda: reap(model, {"h": folds.at(5)})(x),
    "select is a function of a value": lambda: reap(model, 3)(x),
    "name with slash": lambda: sow(x, name="a/b"),
    "name empty": lambda: sow(x, name=""),
    "unhashable static": lambda: reap(lambda x, cfg: sow(x, name="h"))(x, {1, 2}),
    "grad of vector": lambda: harvest.grad(model)(x),
    "grad in while": lambda: harvest.grad(
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: sow(c * 2, name="c"), x).sum()
    )(x),
    "grad select missing": lambda: harvest.grad(loss, "resid")(x),
    "jvp of other name": lambda: harvest.jvp(loss, {"resid": x})(x),
    "jvp wrong shape": lambda: harvest.jvp(loss, {"h": x})(x),
    "sweep without source": lambda: harvest.sweep(loss, "h", lambda h, s, i: s, jnp.arange(2))(x),
    "sweep grid unequal": lambda: harvest.sweep(
        loss, "h", lambda h, r: h, {"a": jnp.arange(2), "b": jnp.arange(3)}
    )(x),
    "sweep unknown": lambda: harvest.sweep(loss, "resid", zero())(x),
    "stacked of nothing": lambda: stacked(reap(unrolled)(x), "layers/*/attn"),
    "other branch": lambda: plant(branch, {"up": x, "down": "x"})(x),
    "closed tracer": lambda: jax.jit(lambda v: plant(model, {"h": v})(x))(x),
    "nonfinite in jit": lambda: jax.jit(lambda x: harvest.debug.nonfinite(loss)(x))(x),
    "spec unknown axis": lambda: jax.shard_map(
        lambda x: sow(x, name="h", spec=P("batch")),
        mesh=jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=P("data"),
        out_specs=P("data"),
    )(x),
    "linear solve": lambda: reap(
        lambda b: lax.custom_linear_solve(
            lambda x: 2 * x, b, lambda mv, b: sow(b / 2, name="h"), symmetric=True
        )
    )(x),
}


@pytest.mark.parametrize("mistake", CASES)
def test_the_message(mistake):
    with pytest.raises((harvest.HarvestError, TypeError), match=r"\w") as error:
        CASES[mistake]()
    assert told(error.value) == MESSAGES[mistake]


def told(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".split("\n----")[0]
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("harvest:")]
    return re.sub(r"[^ (]*test_messages\.py:\d+", "<line>", "\n".join([text, *notes]))


def test_every_message_is_of_a_mistake():
    assert set(CASES) == set(MESSAGES)
