"""Faults in pipelines: which rank is which stage, whose gradients are added up, what is computed when, what is refused.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

RANKS, REQUIRED = "strategies/pipeline/test_ranks.py", "strategies/pipeline/test_requirements.py"
STAGES, TIMELINE = "strategies/pipeline/test_stages.py", "strategies/pipeline/test_timeline.py"
FROM_FEW = "planner/test_planned_stages.py -k stage_of_many_micro_batches"

FAULTS_OF_PIPELINES = (
    Fault(
        "neighbouring ranks are stages of different pipelines",
        "strategies/pipeline/ranks.py",
        "copy, stage = divmod(rank, ranks // copies)",
        "stage, copy = divmod(rank, copies)",
        RANKS,
    ),
    Fault(
        "gradients of two number formats are sent as one",
        "strategies/pipeline/ranks.py",
        "(together > BUCKET_BYTES or gradient.dtype != bucket[0].dtype)",
        "together > BUCKET_BYTES",
        RANKS,
    ),
    Fault(
        "a weight that no row of this rank used is left out of the sum",
        "strategies/pipeline/ranks.py",
        "weight.grad = torch.zeros_like(weight)",
        "pass",
        RANKS,
    ),
    Fault(
        "tied embeddings count twice in the norm",
        "strategies/pipeline/ranks.py",
        "if stages_of[name][0] < place.stage}",
        "if stages_of[name][0] > place.stage}",
        RANKS,
    ),
    Fault(
        "1f1b starts with fewer micro-batches than stages",
        "recipe/strategy_fit.py",
        'if pipelines.schedule in ("1f1b", "interleaved_1f1b") and',
        'if pipelines.schedule in ("interleaved_1f1b",) and',
        REQUIRED,
    ),
    Fault(
        "rounds of unequal size are left to torch's own error",
        "recipe/strategy_fit.py",
        "if pipelines.runs > 1 and not",
        "if pipelines.runs > 2 and not",
        REQUIRED,
    ),
    Fault(
        "ranks that are no whole pipelines start",
        "recipe/sections/pipelines.py",
        "if ranks % self.copies == 0 and ranks",
        "if ranks",
        REQUIRED,
    ),
    Fault(
        "int8 weights are split",
        "recipe/strategy_fit.py",
        "if recipe.quantization is not None and not recipe.quantization.load_in_4bit:",
        "if False:",
        REQUIRED,
    ),
    Fault(
        "a file's name may ask for one pipeline beside none",
        "recipe/sections/pipelines.py",
        '"[2-9]|[1-9][0-9]{1,4}"',
        '"[0-9]{1,5}"',
        REQUIRED,
    ),
    Fault(
        "backwards take the runs of layers in the order of forwards",
        "strategies/pipeline/timeline.py",
        "for run in reversed(range(runs)) for number",
        "for run in range(runs) for number",
        TIMELINE,
    ),
    Fault(
        "interleaved stages begin backward too early",
        "strategies/pipeline/timeline.py",
        "2 * (stages - 1 - stage)",
        "(stages - 1 - stage)",
        TIMELINE,
    ),
    Fault(
        "two runs of layers have the bubble of one",
        "strategies/pipeline/timeline.py",
        "micro_batches * RUNS.get(schedule, 1)\n    return",
        "micro_batches\n    return",
        TIMELINE,
    ),
    Fault(
        "a run sends what the layer after the next received",
        "strategies/pipeline/stage.py",
        "if index == crossing.layers.stop:",
        "if index == crossing.layers.stop + 1:",
        STAGES,
    ),
    Fault(
        "a layer that is computed again does nothing",
        "strategies/pipeline/stage.py",
        "if crossing.layers is None or computes(crossing.layers):",
        "if crossing.layers is not None and computes(crossing.layers):",
        STAGES,
    ),
    Fault(
        "two runs of a stage have the same dropout",
        "strategies/pipeline/schedule.py",
        "partial(_numbered_from, later * len(step), before_each)",
        "partial(_numbered_from, 0, before_each)",
        STAGES,
    ),
    Fault(
        "a stage's weights change while they are written",
        "strategies/pipeline/holding.py",
        "tuple(value.shape), 0, live=True)",
        "tuple(value.shape), 0)",
        "strategies/pipeline/test_stages.py -k save",
    ),
    Fault(
        "a second run of layers is on no stage",
        "strategies/pipeline/holding.py",
        "run_with(parts.place(name), layers) % place.stages)",
        "run_with(parts.place(name), layers))",
        STAGES,
    ),
    Fault(
        "1f1b is planned from as many micro-batches as stages",
        "strategies/pipeline/timeline.py",
        "(stages + 2, stages + 3)",
        "(stages, stages + 1)",
        TIMELINE,
    ),
    Fault(
        "runs in turn are planned from one round of micro-batches",
        "strategies/pipeline/timeline.py",
        "few, more = 2 * at_once, 3 * at_once",
        "few, more = at_once, 2 * at_once",
        TIMELINE,
    ),
    Fault(
        "one of the micro-batches that are not traced is not added",
        "planner/depth/trace_to_depth.py",
        "(len(request.batches) - few) / (more - few)",
        "(len(request.batches) - more) / (more - few)",
        FROM_FEW,
    ),
    Fault(
        "messages of micro-batches that are not traced do not count",
        "planner/depth/trace_to_depth.py",
        "work=with_more_micro_steps(deep.work, first.work, second.work, (few, more, len(request.batches)))",
        "work=deep.work",
        FROM_FEW,
    ),
    Fault(
        "what a step does once is done for each of few micro-batches",
        "planner/trace/step_work.py",
        "(1 / wanted - 1 / few) / (1 / more - 1 / few)",
        "0.0",
        FROM_FEW,
    ),
)
