"""`python -m dora`: the command line."""

from dora.cli.app import main

if __name__ == "__main__":
    main()
