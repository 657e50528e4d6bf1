"""What each command of the command line does, one module per command; each offers `run(options) -> exit code`."""
