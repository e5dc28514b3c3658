"""How processes start, talk, agree and stop. `base.py` is the contract; a module or a package
for each engine."""

ENGINES = ("inline", "local", "mpi", "ray", "torch")
