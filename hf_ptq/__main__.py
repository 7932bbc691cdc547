"""`python -m hf_ptq`: the same as the `hf-ptq` command."""

from __future__ import annotations

import sys

from hf_ptq.cli import main

if __name__ == "__main__":
    sys.exit(main())
