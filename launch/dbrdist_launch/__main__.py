"""`python -m dbrdist_launch` is `dbrdist-launch`."""

from .main import main

if __name__ == "__main__":
    main()
