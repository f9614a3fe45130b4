"""`python -m projector_dedup` is the command `idempotency`."""

from projector_dedup.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m projector_dedup")
