"""Channel, WeightStore and Service between processes, for the local, mpi and torch engines.

memory.py    all workers on one machine: shared memory, and unix sockets for calls
network.py   workers on several machines: TCP, for those that know the run's token
sockets.py   calls over either kind of socket
"""
