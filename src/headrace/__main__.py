"""The command line, as `headrace` and `python -m headrace`: Ctrl-C is one line also while its modules load."""

import sys

try:
    from headrace.cli import main
except KeyboardInterrupt:
    sys.stderr.write("headrace: interrupted\n")
    sys.exit(130)

if __name__ == "__main__":
    main()
