"""Two processes with one program, against one process and numpy: `python -m tests.distributed`."""
