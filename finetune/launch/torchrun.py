"""torchrun with its ranks' own exit code: `python -m finetune.launch.torchrun -m finetune.train RECIPE`.

torchrun itself ends with 1 whatever happened. An engine that restarts a job by its exit code would then start a bad
recipe again and again. Options and `PET_*` variables are torchrun's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from finetune.errors import RankLost, Stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun. Returns 0, the first failed rank's exit code, 1 if a signal killed it, or 130 after a signal."""
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:  # ended by this signal
            return RankLost.exit_code
        return int(failure.exitcode)
    except SignalException:  # torchrun has passed it on, and waited until the ranks had saved
        return Stopped.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
