"""`segapp` and `python -m segapp`."""

from segapp.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
