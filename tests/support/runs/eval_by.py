"""`finetune WORDS` by so many ranks, as `--processes` starts them.

    python tests/support/runs/eval_by.py RANKS [PROGRAM.py] eval RUN ...

PROGRAM takes the place of the ranks' `finetune`.
"""

from __future__ import annotations

import sys

from finetune.launch.local_ranks import run_ranks


def main(count: str, *words: str) -> int:
    program = ["-m", "finetune.cli.main"]
    if words[0].endswith(".py"):
        program, words = [words[0]], words[1:]
    return run_ranks([sys.executable, *program, *words], int(count), on_cpu=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
