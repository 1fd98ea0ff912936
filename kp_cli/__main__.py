"""`python -m kp_cli`: the same as `kp`."""

from kp_cli import main

if __name__ == "__main__":
    main()
