"""`python -m kp_cli`: the same as `kp`."""

from kp_cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
