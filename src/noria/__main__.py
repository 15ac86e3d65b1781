"""`python -m noria` is the command `noria`."""

import sys

from noria.cli.main import main

sys.exit(main())
