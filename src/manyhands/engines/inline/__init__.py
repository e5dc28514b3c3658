"""All workers in one process, one at a time."""
