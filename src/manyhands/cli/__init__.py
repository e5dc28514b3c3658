"""The `manyhands` command: one file per sub-command, each with `main(argv) -> exit code`."""
