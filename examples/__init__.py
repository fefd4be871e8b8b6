"""Runnable examples: `python -m examples.quickstart`."""

# Those that reproduce a known result; `python -m examples` runs them all.
EXPERIMENTS = (
    "induction_heads",
    "grokking",
    "superposition",
    "induction_survey",
    "ioi",
    "causal_tracing",
    "logit_lens",
    "steering",
)
