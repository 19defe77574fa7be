"""Compose, check, record and start the runs that the command line describes."""

from trainwright.app import main

if __name__ == "__main__":
    main()
