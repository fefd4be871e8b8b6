"""The public functions of JAX and its relatives, each inside of every structure."""
