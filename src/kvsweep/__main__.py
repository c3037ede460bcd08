"""`python -m kvsweep`, the program `kvsweep`."""

from kvsweep.cli import main

if __name__ == "__main__":
    main()
