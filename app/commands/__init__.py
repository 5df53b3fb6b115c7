"""What the subcommands of `moonvit-serve` do; `app/cli.py` only parses and dispatches."""
