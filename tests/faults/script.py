"""A worker script that goes wrong on request. Prints the moment at which it does."""

import os
import signal
import sys
import time

from manyhands import Parallel

how = sys.argv[1]
par = Parallel()
if how == "dies_slowly" and par.rank == 1:  # memory behind open files is given back file by file
    for _ in range(60):
        os.write(os.memfd_create("slow"), bytes(5_000_000))
par.barrier()
print("READY", flush=True)
if par.rank == 1:
    print(f"FAULT {time.time()}", flush=True)
    if how == "raise":
        raise ValueError("the original trouble")
    if how in ("kill", "dies_slowly"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "silent":
        time.sleep(1000)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "segfault":
        import ctypes

        ctypes.string_at(0)
    if how == "after":  # all is said and done, and then
        import atexit

        atexit.register(os._exit, 7)
    if how == "exit":
        sys.exit(7)
    if how == "threads":  # raises, but leaves a thread behind that would keep the process alive
        import threading

        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise ValueError("the original trouble")
    if how == "children":
        import subprocess

        subprocess.Popen(["sleep", "1000"])
        raise ValueError("the original trouble")
if how == "wait":
    time.sleep(1000)
if how == "busy":
    while True:
        sum(range(1000))
par.barrier()
