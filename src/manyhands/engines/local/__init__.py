"""Processes on one machine, over shared memory."""
