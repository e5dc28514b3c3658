"""Workers that mpiexec started."""
