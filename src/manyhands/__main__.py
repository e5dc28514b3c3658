"""`python -m manyhands` is `manyhands`; so is `torchrun -m manyhands`."""

from manyhands.cli.main import start

if __name__ == "__main__":
    start()
