"""`pip install ... | counted.py N`: one line that says which of N packages is fetched, in place of hundreds."""

import re
import sys
import time

total, count, said = int(sys.argv[1]), 0, 0.0
wide = sys.stdout.isatty()
for line in sys.stdin:
    found = re.match(r"(?:Collecting|Processing|Obtaining|Requirement already satisfied:) ([^\s;=<>~!@]+)", line)
    count += bool(found)
    words = f"  {min(count, total)} of {total}: {found[1]}" if found else ""
    if line.startswith("Installing collected"):
        words, said = "  writing them to the disk", 0.0
    # Where there is no terminal, a line every few seconds.
    if words and (wide or time.monotonic() - said > 5):
        said = time.monotonic()
        sys.stdout.write(f"\r\x1b[K{words}" if wide else f"{words}\n")
        sys.stdout.flush()
if wide:
    sys.stdout.write("\r\x1b[K")
