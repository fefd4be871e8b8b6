"""Programs that have shown something, each run every time: see `test_generated`."""

from .programs import (
    Body,
    CustomJvp,
    CustomVjp,
    Do,
    Gradient,
    Jit,
    Remat,
    Scan,
    Sow,
    Twice,
    Vmap,
)

# What a loop does not change is moved out of it by differentiation, and is collected without its
# axis; where it is planted, it is in the loop.
HOISTED: Body = (Gradient((Vmap((Scan((Sow("a", "v", True),), 2),), 2, 0), Do("back"))),)
HOISTED_BESIDE: Body = (
    Sow("b", "tree", True),
    Gradient(
        (
            Do("noise"),
            Remat((Sow("b", "tree", True), Scan((Sow("b", "tree", True),), 1))),
        ),
    ),
    Do("noise"),
)
HOISTED_WITH_CALLS: Body = (
    Gradient(
        (
            Jit(
                (
                    Remat((Sow("b", "first", True), Do("cast"))),
                    Twice((Sow("a", "v", True), Sow("b", "h", True), Sow("b", "first", False))),
                )
            ),
            Vmap((Sow("a", "n", True), Scan((Sow("b", "k", False), Sow("a", "v", True)), 2)), 2, 0),
            Do("back"),
        )
    ),
)
# With sows JAX lowers a function of its own once for each call, and removes more of what is unused:
# more lines of text, and fewer operations.
INLINED: Body = (
    Remat((CustomVjp((Do("count"),)), CustomJvp((Sow("b", "n", True), Do("back"))), Do("scale"))),
)
INLINED_IN_VMAP: Body = (
    Remat(
        (
            CustomVjp((Do("count"),)),
            Vmap((CustomJvp((Sow("b", "n", True), Do("back"))), Do("scale")), 4, 1),
            Vmap((Do("scale"),), 4, 1),
        )
    ),
    Sow("a", "first", True),
    Do("sine"),
)
