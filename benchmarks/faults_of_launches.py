"""Faults in launches and signals, comparisons, the rows of a step, and what is sent or merged.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

SLURM, SCRIPT, MEETING = "launch/test_slurm.py", "launch/test_script.py", "launch/test_rendezvous.py"
RANKS, SIGNALS, ROWS = "launch/test_local_ranks.py", "launch/test_signals.py", "preflight/test_compare_rows.py"
BATCHES, PUSH = "tokens/test_batches.py", "hub/test_push.py"

OF_LAUNCHES = (
    Fault(
        "steps of a Slurm job share a port",
        "launch/slurm.py",
        "(7 * job + step) % _PORTS",
        "(7 * job) % _PORTS",
        SLURM,
    ),
    Fault(
        "numbers of hosts lose their zeros",
        "launch/slurm.py",
        "{number:0{len(first)}d}",
        "{number}",
        SLURM,
    ),
    Fault(
        "tasks of a node are an even share",
        "launch/slurm.py",
        "return counts[node] if node < len(counts) else",
        "return",
        SLURM,
    ),
    Fault(
        "torchrun may kill ranks after the job's time",
        "launch/script.py",
        "={_SAVE_SECONDS - 30}  # torchrun",
        "={_SAVE_SECONDS}  # torchrun",
        SCRIPT,
    ),
    Fault(
        "Accelerate starts the other machines by pdsh",
        "launch/script.py",
        '        options += " --deepspeed_multinode_launcher standard" * (plan.strategy.uses_engine and not on_cpu)\n',
        "",
        SCRIPT,
    ),
    Fault(
        "a queued job starts over",
        "launch/script.py",
        '" ${SLURM_RESTART_COUNT:+training.resume=auto}" * (',
        '"" * (',
        SCRIPT,
    ),
    Fault(
        "ranks without a row are launched",
        "launch/script.py",
        "    if rows < world:\n",
        "    if False:\n",
        SCRIPT,
    ),
    Fault(
        "ranks give up as soon as an evaluation may last",
        "launch/rendezvous.py",
        "max(_TIMEOUT_SECONDS, recipe.timeout_seconds)",
        "recipe.timeout_seconds",
        MEETING,
    ),
    Fault(
        "an interface that the user chose is replaced",
        "launch/rendezvous.py",
        ' or "GLOO_SOCKET_IFNAME" in os.environ:',
        ":",
        MEETING,
    ),
    Fault(
        "nohup does not protect a run",
        "launch/signals.py",
        "return not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)",
        "return True",
        SIGNALS,
    ),
    Fault(
        "Slurm's warning ends a run without saving",
        "launch/signals.py",
        "signal.SIGHUP, signal.SIGUSR1, ",
        "signal.SIGHUP, ",
        SIGNALS,
    ),
    Fault(
        "a rank that is stopped while it starts is a failure",
        "launch/local_ranks.py",
        "if not self._terminated and any(process.poll() == -signal.SIGTERM",
        "if False and any(process.poll() == -signal.SIGTERM",
        f"{RANKS} -k one_rank",
    ),
)

OF_COMPARISONS_AND_ROWS = (
    Fault(
        "overrides of a comparison's own keys are replaced",
        "preflight/compare_rows.py",
        "if key != PLACE_KEY and origins.get(key) == COMMAND_LINE:",
        "if False:",
        ROWS,
    ),
    Fault(
        "commas within brackets part values",
        "preflight/compare_rows.py",
        "depth += 1 if character in _OPENS else -1",
        "depth += 0",
        ROWS,
    ),
    Fault(
        "a comparison's seconds have the first step's",
        "preflight/compare.py",
        "for line in train[1:] or train)",
        "for line in train)",
        "preflight/test_compare.py -k figures",
    ),
    Fault(
        "differing losses agree",
        "preflight/compare.py",
        "worst = max(abs(loss - final[0])",
        "worst = min(abs(loss - final[0])",
        "preflight/test_compare.py -k agree",
    ),
    Fault(
        "positions run through a whole row",
        "tokens/batches.py",
        "position_ids[index, at:end] = np.arange(len(ids))",
        "position_ids[index, at:end] = np.arange(at, end)",
        BATCHES,
    ),
    Fault(
        "held-out copies of trained documents are kept",
        "tokens/mixture.py",
        "held_groups = [held_out[~copies]]",
        "held_groups = [held_out]",
        BATCHES,
    ),
    Fault(
        "examples of one row are parted",
        "tokens/mixture.py",
        "np.unique(pool.source_rows[:end], return_inverse=True)",
        "np.unique(np.arange(end), return_inverse=True)",
        "tokens/test_each_turn.py",
    ),
    Fault(
        "documents are packed into the emptiest row",
        "tokens/packing.py",
        "position = bisect_left(rooms, size)",
        "position = len(rooms) - 1 if rooms and rooms[-1] >= size else len(rooms)",
        "tokens/test_packing.py",
    ),
    Fault(
        "the share of a weight below 1 is dropped",
        "tokens/mixture.py",
        "extra = round((weight - copies) * len(members))",
        "extra = 0",
        BATCHES,
    ),
    Fault(
        "another repository is as public as the recipe's",
        "hub/push.py",
        "(not hub.private and name == hub.repo_id)",
        "(not hub.private)",
        PUSH,
    ),
    Fault(
        "ranks of a text part are looked for under the whole model's paths",
        "finished_run/weight_files.py",
        "self.trained_as.get(layer, layer)",
        "layer",
        "finished_run/test_merge.py -k whole_paths",
    ),
    Fault(
        "an embedding's adapter is taken for a part of it",
        "finished_run/weight_files.py",
        "if not self.moves_the_base or self._is_embedding(layer):",
        "if not self.moves_the_base:",
        "finished_run/test_merge.py -k pissa",
    ),
    Fault(
        "a plain adapter keeps the part that was taken from the base",
        "finished_run/weight_files.py",
        "scale * torch.cat([b, -second], 1)",
        "scale * torch.cat([b, second], 1)",
        "finished_run/test_plain_adapter.py -k product",
    ),
    Fault(
        "a merged model ties what its files hold apart",
        "finished_run/merge.py",
        "return self.two_in_files or (self.tied",
        "return (self.tied",
        "finished_run/test_merge.py -k disagree",
    ),
    Fault(
        "merged weights may be infinite",
        "finished_run/weight_files.py",
        "if not merged.isfinite().all():",
        "if False:",
        "corpus/test_corpus.py -k alpha_beyond_in_merge",
    ),
)

FAULTS_OF_LAUNCHES = OF_LAUNCHES + OF_COMPARISONS_AND_ROWS
