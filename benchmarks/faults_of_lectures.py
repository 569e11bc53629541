"""Faults in lectures, in pipelines and their plans, and in DeepSpeed's own keys.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

COMMAND, PIPELINE = "lectures/test_command.py", "lectures/pipeline/test_lecture.py"
FORMATS, ZERO_TIMES = "lectures/test_formats.py", "lectures/zero/test_times.py"
STAGES, TIMELINE = "strategies/pipeline/test_stages.py", "strategies/pipeline/test_timeline.py"
REQUIRED, PLANNED = "strategies/pipeline/test_requirements.py", "planner/test_planned_stages.py"
KEYS, TO_DEPTH = "recipe/test_engine_keys.py", "planner/test_trace_to_depth.py"

OF_LECTURES = (
    Fault(
        "the folder of a lecture that was stopped is refused",
        "lectures/command.py",
        "    if is_new:  # one that is stopped",
        "    if False:  # one that is stopped",
        COMMAND,
    ),
    Fault(
        "a lecture's number may be too small",
        "lectures/output.py",
        "not text.isdecimal() or int(text) < least:",
        "not text.isdecimal():",
        "lectures/data_parallel/test_lecture.py -k wrong_setting",
    ),
    Fault(
        "int8 has 128 steps", "lectures/formats/bits.py", "scale = largest / ABSMAX", "scale = largest / 128", FORMATS
    ),
    Fault(
        "zeros count as lost by rounding",
        "lectures/formats/rounding.py",
        "((back == 0) & (tensor != 0))",
        "(back == 0)",
        FORMATS,
    ),
    Fault(
        "numbers are counted a power of two too high",
        "lectures/formats/rounding.py",
        ".exponent.long() - 1",
        ".exponent.long()",
        FORMATS,
    ),
    Fault(
        "copies that block overlap all the same",
        "lectures/overlap.py",
        "begun if non_blocking else computed",
        "begun",
        "lectures/test_overlap.py",
    ),
    Fault(
        "an update that was made is told as skipped",
        "lectures/mixed_precision.py",
        "return self.scaler.get_scale() < before",
        "return self.scaler.get_scale() <= before",
        "lectures/test_mixed_precision.py",
    ),
    Fault(
        "the played link takes no time",
        "lectures/collectives/ranks.py",
        "    time.sleep(tensor.nbytes / LINK)\n",
        "",
        "lectures/test_collectives.py",
    ),
    Fault(
        "every rank gathers the first piece",
        "lectures/collectives/ranks.py",
        "row.chunk(RANKS)[dist.get_rank()]",
        "row.chunk(RANKS)[0]",
        "lectures/test_collectives.py",
    ),
    Fault(
        "the first micro-step fetches a sum too",
        "lectures/zero/times.py",
        "(2 * LOGGED_STEPS - 1)",
        "(2 * LOGGED_STEPS)",
        ZERO_TIMES,
    ),
    Fault(
        "kept plans are taken for any recipe",
        "lectures/zero/planned.py",
        'if kept.get("identity") != identity:',
        "if False:",
        "lectures/zero/test_lecture.py",
    ),
    Fault(
        "memory is of the rank with the least",
        "lectures/zero/measured.py",
        "            phase: max(\n",
        "            phase: min(\n",
        "lectures/zero/test_lecture.py",
    ),
    Fault(
        "masters of 16-bit weights take no memory",
        "lectures/memory.py",
        "(HALF, SINGLE, 0, SINGLE, 2 * SINGLE)",
        "(HALF, 0, 0, SINGLE, 2 * SINGLE)",
        "lectures/test_memory.py",
    ),
    Fault(
        "fewer micro-batches than stages are played",
        "lectures/pipeline/lecture.py",
        "    if micro_batches < stages:\n",
        "    if False:\n",
        PIPELINE,
    ),
    Fault(
        "a played backward is as short as a forward",
        "lectures/pipeline/played.py",
        "time.sleep(BACKWARD_TIMES * each)",
        "time.sleep(each)",
        PIPELINE,
    ),
    Fault(
        "layers of other stages sleep too",
        "lectures/pipeline/played.py",
        "and not any(isinstance(weight, Elsewhere) for weight in layer.parameters())",
        "and True",
        PIPELINE,
    ),
    Fault(
        "the picture of a pipeline has forwards alone",
        "lectures/pipeline/picture.py",
        "    for span in spans:\n        length",
        "    for span in [span for span in spans if span.kind == FORWARD]:\n        length",
        PIPELINE,
    ),
)

OF_PIPELINES = (
    Fault(
        "1f1b begins a forward too few",
        "strategies/pipeline/timeline.py",
        "first = stages - stage\n",
        "first = max(1, stages - stage - 1)\n",
        TIMELINE,
    ),
    Fault(
        "sending takes no time",
        "strategies/pipeline/timeline.py",
        "ends[kind, number, source] + sending if",
        "ends[kind, number, source] if",
        TIMELINE,
    ),
    Fault(
        "the head costs the last stage nothing",
        "strategies/pipeline/split.py",
        " + last * (stage == stages - 1)",
        "",
        STAGES,
    ),
    Fault(
        "stages are as uneven as the largest allows",
        "strategies/pipeline/split.py",
        "return before + cost(*held) ** 2 if",
        "return before + cost(*held) if",
        STAGES,
    ),
    Fault(
        "a tied weight is written by two stages",
        "strategies/pipeline/holding.py",
        "if self._stages_of(key, ())[0] == self.stage}",
        "if self.stage in self._stages_of(key, ())}",
        STAGES,
    ),
    Fault(
        "a tied weight's gradients are not added up",
        "strategies/pipeline/ranks.py",
        "if len(ranks) == 1:",
        "if len(ranks) < 3:",
        "strategies/pipeline/test_ranks.py",
    ),
    Fault(
        "layers that are no line are split",
        "strategies/pipeline/layout.py",
        "if index != seen.layers or (index and not (args and args[0] is seen.gave)):",
        "if index != seen.layers:",
        STAGES,
    ),
    Fault(
        "fp16 is let through to stages",
        "recipe/strategy_fit.py",
        'if recipe.training.mixed_precision == "fp16":',
        "if False:",
        REQUIRED,
    ),
    Fault(
        "a short micro-batch is none for 1f1b",
        "recipe/strategy_fit.py",
        "micro_batches = -(-training.global_batch_size // rows)",
        "micro_batches = training.global_batch_size // rows",
        REQUIRED,
    ),
    Fault(
        "a plan of stages is the smallest stage's",
        "planner/plan_recipe.py",
        "worst = max(stages, key=lambda",
        "worst = min(stages, key=lambda",
        f"{PLANNED} -k deep_model",
    ),
    Fault(
        "a stage is planned by a shallow model",
        "planner/depth/trace_to_depth.py",
        "if request.strategy.schedule or (",
        "if (",
        f"{PLANNED} -k deep_model",
    ),
    Fault(
        "adapters of single layers are planned by a shallow model",
        "planner/depth/trace_to_depth.py",
        "(request.recipe.lora and request.recipe.lora.names_single_layers)",
        "False",
        TO_DEPTH,
    ),
    Fault(
        "layers that ZeRO-3 keeps gathered are not traced",
        "planner/depth/trace_to_depth.py",
        "    elif not request.strategy.layers_repeat:\n        shallow",
        "    elif False:\n        shallow",
        TO_DEPTH,
    ),
    Fault(
        "a weight in 4 bits is as wide as its container",
        "planner/depth/trace_to_depth.py",
        "return 2 * int(getattr(",
        "return 1 * int(getattr(",
        TO_DEPTH,
    ),
    Fault(
        "a run of its own batches is planned by shallow models",
        "planner/depth/trace_to_depth.py",
        "(layers,) if full_depth or layers <= more else",
        "(layers,) if layers <= more else",
        TO_DEPTH,
    ),
)

OF_ENGINE_KEYS = (
    Fault(
        "a key of another ZeRO stage is taken",
        "recipe/sections/engine_keys.py",
        "if stage not in ENGINE_KEYS[name].stages:",
        "if False:",
        KEYS,
    ),
    Fault(
        "an odd bucket is gathered",
        "recipe/sections/engine_keys.py",
        "and not (self.even and number % 2) else None",
        "else None",
        KEYS,
    ),
    Fault(
        "dynamic keys beside a static scale are taken",
        "recipe/sections/engine_keys.py",
        '    if values.get("loss_scale"):\n',
        "    if False:\n",
        KEYS,
    ),
    Fault(
        "keys of fp16 are told to be idle under fp16",
        "recipe/sections/engine_keys.py",
        'if idle and mixed_precision != "fp16":',
        "if idle:",
        KEYS,
    ),
    Fault(
        "DeepSpeed's own name of a key is not used",
        "recipe/sections/engine_keys.py",
        "[key.deepspeed_name or name] = key.read(",
        "[name] = key.read(",
        KEYS,
    ),
)

FAULTS_OF_LECTURES = OF_LECTURES + OF_PIPELINES + OF_ENGINE_KEYS
