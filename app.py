"""`python app.py` opens the chat. Everything it does is in app/cli.py."""

import sys

from app.cli import main

if __name__ == "__main__":
    sys.exit(main())
