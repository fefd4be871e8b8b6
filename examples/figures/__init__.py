"""The figures of the examples, all readable in greyscale: a module for each example."""
