"""Pure functions: no ranks, no processes, no environments, no files.

numpy where the work happens beside the environments (returns, running statistics); torch where it
happens beside the network (losses, V-trace, natural gradient). Shapes are time first: [T, B].
"""
