"""`python -m kp_core.cli`: the same as `kp`."""

from kp_core.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
