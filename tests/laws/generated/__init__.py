"""Programs that nobody thought of, and a run of each of them without harvest or JAX's tracing."""
