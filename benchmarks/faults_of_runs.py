"""Faults in evaluations, in which weights are exported, and in what goes on from a finished run.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

BEST, INTERVALS, LONGER = "training/test_best.py", "training/test_intervals.py", "training/test_longer_run.py"
ADAPTER, EXPORT = "training/test_start_adapter.py", "finished_run/test_export_step.py"

OF_EVALUATIONS = (
    Fault(
        "a share of the run is rounded down",
        "recipe/cross_checks.py",
        "math.ceil(interval * total_steps)",
        "max(1, int(interval * total_steps))",
        f"{INTERVALS} -k transformers",
    ),
    Fault(
        "a resumed run takes shares of the steps that are left",
        "training/loop.py",
        "steps_of(recipe, plan.total_steps)",
        "steps_of(recipe, plan.total_steps - state.step)",
        f"{INTERVALS} -k resumed",
    ),
    Fault(
        "the held-out loss is the mean of the sets' means",
        "training/loop.py",
        "sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)",
        "sum(loss / tokens for loss, tokens in sums) / len(sums)",
        f"{BEST} -k several",
    ),
    Fault(
        "the set that is to decide is ignored",
        "training/loop.py",
        'losses[run.recipe.training.metric_for_best_model.removeprefix("eval_")]',
        'losses["loss"]',
        f"{BEST} -k several",
    ),
    Fault(
        "the newest evaluation is the best",
        "run_folder/train_state.py",
        "better = loss < self.best_eval_loss",
        "better = math.isfinite(loss)",
        f"{BEST} -k the_best_evaluations",
    ),
    Fault(
        "the first evaluation after training began does not count",
        "training/loop.py",
        "    state.compare(losses[",
        "    if state.last_eval_loss is None:\n        state.last_eval_loss = losses['loss']\n        return\n"
        "    state.compare(losses[",
        f"{BEST} -k before_training",
    ),
    Fault(
        "the best checkpoint is pruned",
        "run_folder/save_restore.py",
        "best = state.best_step if recipe.training.exports_best else None",
        "best = None",
        f"{BEST} -k the_best_evaluations",
    ),
    Fault(
        "a resumed run forgets which step was the best",
        "run_folder/train_state.py",
        'best_step=saved.get("best_step")',
        "best_step=None",
        f"{BEST} -k remembers",
    ),
    Fault(
        "the last weights are exported as the best",
        "run_folder/best.py",
        "_load(parts, step_folder(Path(recipe.run_dir), step))",
        "pass",
        f"{BEST} -k the_best_evaluations",
    ),
    Fault(
        "a damaged best checkpoint is exported",
        "run_folder/best.py",
        "examine(folder, hashes=all_ranks().rank == 0)",
        "examine(folder, hashes=False)",
        f"{BEST} -k damaged",
    ),
)

OF_FINISHED_RUNS = (
    Fault(
        "an evaluation without a checkpoint may be the best",
        "train.py",
        "    check_best(recipe, plan.total_steps)\n",
        "",
        f"{INTERVALS} -k refused",
    ),
    Fault(
        "answers after training are the last weights'",
        "training/session.py",
        "        exported = weights_to_export(start.recipe, parts, state)\n",
        '        write_samples(start, run, parts, output, when="after", step=state.step)\n'
        "        exported = weights_to_export(start.recipe, parts, state)\n",
        f"{BEST} -k answers",
    ),
    Fault(
        "what a longer run sets aside is named by its last step",
        "run_folder/longer.py",
        'step = _exported_step(folder / "receipt.json") or done',
        "step = done",
        f"{BEST} -k answers",
    ),
    Fault(
        "a longer run keeps the checkpoint of a short step",
        "run_folder/longer.py",
        "if step > start:",
        "if False:",
        f"{LONGER} -k planned_so",
    ),
    Fault(
        "a checkpoint in which nothing has changed is exported",
        "finished_run/export_step.py",
        '    refuse_unchanged(sums, read_state_of(checkpoint).get("start_checksums", {}))\n',
        "",
        f"{EXPORT} -k one_line",
    ),
    Fault(
        "a longer run goes on after a short last step as if it were whole",
        "run_folder/longer.py",
        "if planned.last_step_is_short and newest.step == done:",
        "if False:",
        f"{LONGER} -k planned_so",
    ),
    Fault(
        "a longer run keeps the rates of its old length",
        "training/session.py",
        "learning_rate_schedule(recipe.training, start.plan.total_steps)",
        "learning_rate_schedule(recipe.training, max(first_step, 1) if first_step else start.plan.total_steps)",
        f"{LONGER} -k another_schedule",
    ),
    Fault(
        "a run that early stopping ended is trained further",
        "run_folder/longer.py",
        "if done < planned.steps or (",
        "if False and (",
        f"{LONGER} -k stopped_early",
    ),
    Fault(
        "another step's weights are exported",
        "finished_run/export_step.py",
        "    found = examine(folder)",
        "    found = examine(step_folder(run_dir, checkpoint_steps(run_dir)[-1]))",
        f"{EXPORT} -k every_verb",
    ),
    Fault(
        "an older export of another checkpoint is taken",
        "finished_run/export_step.py",
        'recorded["checkpoint"] == _manifest_hash(checkpoint)',
        "True",
        f"{EXPORT} -k made_once",
    ),
    Fault(
        "the adapter to start from is not loaded",
        "training/session.py",
        "start_from(parts, start.adapter)",
        "pass",
        f"{ADAPTER} -k fresh",
    ),
    Fault(
        "the revision of the adapter to start from is ignored",
        "hub/start_adapter.py",
        "hf_hub_download(name, file, revision=revision)",
        "hf_hub_download(name, file)",
        f"{ADAPTER} -k from_the_hub",
    ),
    Fault(
        "an adapter of another alpha is taken",
        "recipe/adapter_config.py",
        '"r", "lora_alpha", ',
        '"r", ',
        f"{ADAPTER} -k check_says",
    ),
)

OF_SAMPLES = (
    Fault(
        "prompts share a batch whose padding is seen",
        "training/samples.py",
        "most if shared else 0",
        "most",
        "training/test_samples.py -k share_a_batch_and",
    ),
    Fault(
        "the padding of a prompt is not masked",
        "model/generate.py",
        "[0] * (longest - len(prompt)) + [1]",
        "[1] * (longest - len(prompt)) + [1]",
        "model/test_generate.py",
    ),
    Fault(
        "a padded row may be far from the same row alone",
        "probe/padding.py",
        "SAME = 1e-4",
        "SAME = 10.0",
        "probe/test_padding.py",
    ),
)

FAULTS_OF_RUNS = OF_EVALUATIONS + OF_FINISHED_RUNS + OF_SAMPLES
