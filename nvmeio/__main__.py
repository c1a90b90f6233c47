"""`python -m nvmeio`: the command line, where the console script is not on the path."""

from nvmeio.cli import main

if __name__ == "__main__":
    main()
