"""The verbs that take a finished run's folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune import new_recipe, planner
from finetune.cli.app import AsJson, AtStep, RunFolder, name_next, one_of, run_verb, say, say_begun, user_path
from finetune.errors import FinetuneError
from finetune.files import check_output, write_text
from finetune.hand_over import ENGINES
from finetune.recipe.loader import recipe_from_resolved
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import require_run_folder
from finetune.run_folder.status import read_status

OnServer = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="URL", help="Ask this server (vLLM, llama.cpp, Ollama); none.", show_default=False
    ),
]
OnServerTuned = Annotated[
    str | None, typer.Option("--model", help="The tuned model's name there; the only one.", show_default=False)
]
AskedColumns = Annotated[str | None, typer.Option(help="Columns of --data, as for init.", show_default=False)]
ScorerSeconds = Annotated[float, typer.Option(help="Time of your own scorer for one answer.")]
OnServerBase = Annotated[
    str | None, typer.Option("--base-model", help="The base's name there; none.", show_default=False)
]


def _line_printer(as_json: bool) -> Callable[[str], None]:
    """Print lines, or drop them if standard output is one JSON object."""
    if as_json:
        return lambda _: None
    return say


def _server(url: str | None, model: str | None, base_model: str | None, trained_from: str) -> Any:
    """The server of --endpoint, which must have more than the run's base, `trained_from`. Raises FinetuneError."""
    from finetune.answers.endpoint import open_endpoint

    if url is not None:
        return open_endpoint(url, model, base_model, partial(say, err=True), trained_from)
    if model or base_model:
        raise FinetuneError("--model, --base-model: are names on a server; name it with --endpoint URL")
    return None


def launch_of_ranks(processes: int, alone: str | None, recipe: Recipe) -> Any:
    """This rank's Launch; None for one process. Without a launcher and with `processes`, starts them and exits.

    Args:
        alone: An option that one process obeys.
        recipe: What a rank of it sets up in its environment: determinism and memory of GPUs.
    """
    from finetune.launch.launcher import take_out_left_over
    from finetune.launch.local_ranks import check_rank_count, count_gpus, is_rank_already, run_ranks

    if left_over := take_out_left_over():
        say(left_over, err=True)
    if is_rank_already():
        from finetune.train import set_up_process

        launch = set_up_process(recipe)
        if alone is not None and launch.world_size > 1:
            raise FinetuneError(f"{alone}: is asked by one process; {launch.world_size} were started")
        return launch
    if processes > 1:
        if alone is not None:
            raise FinetuneError(f"{alone}: is asked by one process; leave --processes out")
        gpus = count_gpus()
        check_rank_count(processes, gpus=gpus)
        command = [sys.executable, "-m", "finetune.cli.main", *sys.argv[1:]]
        # The ranks have printed everything, JSON too.
        raise typer.Exit(run_ranks(command, processes, on_cpu=not gpus))
    return None


def _printers(launch: Any, as_json: bool) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """A function that prints results, and one that shows progress on standard error. Both are silent on other ranks."""
    from finetune.measure.metrics import Terminal

    silent = as_json or not (launch is None or launch.is_main)
    progress = Terminal(0, silent=silent, stream=sys.stderr)
    print_line = _line_printer(silent)

    def say_result(text: str) -> None:
        progress.clear()
        print_line(text)

    return say_result, progress.progress


def chat(
    run: RunFolder,
    step: AtStep = None,
    who: Annotated[str, typer.Option(help="Who answers: base, tuned or both.")] = "both",
    prompt: Annotated[list[str] | None, typer.Option(help="Answer this and end; may be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of every answer; none.", show_default=False)] = None,
    system: Annotated[
        str | None, typer.Option(help="System message, '' for none; the training rows' own.", show_default=False)
    ] = None,
    endpoint: OnServer = None,
    model: OnServerTuned = None,
    base_model: OnServerBase = None,
    as_json: AsJson = False,
) -> None:
    """Talk to the base model, the tuned one, or both."""
    one_of("--who", who, ("base", "tuned", "both"))
    if as_json and not prompt:
        raise typer.BadParameter("--json needs --prompt", param_hint="--json")

    def work() -> dict[str, Any]:
        resolved = require_run_folder(run)  # before torch is imported
        say_begun(f"loading base and tuned model of {run}" if endpoint is None else f"asking {endpoint}")
        from finetune.answers.chat import GenerationSettings, answers_to, converse, open_run
        from finetune.hand_over.export_step import run_at

        folder = run_at(run, step)
        base = recipe_from_resolved(resolved).model.name_or_path
        session = open_run(folder, _server(endpoint, model, base_model, base), system=system)
        chosen: Any = who  # checked above
        settings = GenerationSettings(max_new_tokens, temperature, seed)
        if as_json:
            answers = answers_to(session, prompt or [], chosen, settings)
            return {"ok": True, "answers": answers}
        converse(session, prompt or [], chosen, settings, typer.echo)
        return {"ok": True}

    run_verb(work, as_json=as_json)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(parser=user_path, metavar="RUN...", help="Runs, or a comparison.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", parser=user_path, help="Folder; one run's own, else ./report.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Curves, memory and answers on one page; runs side by side."""

    def work() -> dict[str, Any]:
        from finetune.report.curves import read_runs, summary
        from finetune.report.run_page import PAGE_NAME, write_pictures, write_report

        folder = runs[0]
        if output is not None or len(runs) > 1:
            folder = output or Path("report")
            check_output(folder, "--output", folder=True)

        def plan_of(run: Path) -> Mapping[str, Any] | None:
            plan, why = planner.plan_of_run(run, partial(typer.echo, err=True))
            if why is not None:
                typer.echo(f"{run}: not planned: {why}", err=True)
            return plan

        reported = read_runs(runs, plan_of)
        folder.mkdir(parents=True, exist_ok=True)
        write_report(reported, folder / PAGE_NAME)
        files = [str(folder / name) for name in (PAGE_NAME, *write_pictures(reported, folder))]
        for run in reported:
            if missing := run.facts.missing():
                typer.echo(f"{run.folder}: {missing}; the report shows where", err=True)
        if not as_json:
            typer.echo("\n".join(files))
            if len(runs) == 1:
                name_next(["finetune", "chat", runs[0]])
        return {"ok": True, "files": files, "runs": {run.name: summary(run) for run in reported}}

    run_verb(work, as_json=as_json)


def status(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's folder, or the address of its run.storage.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Is it alive? Step, loss, speed, time left, or why it ended."""

    def work() -> dict[str, Any]:
        if "://" in run:
            from finetune.storage.watch import stored_status

            state = stored_status(run)
        else:
            state = read_status(user_path(run))
        if not as_json:
            say(str(state))
        return {"ok": True, **vars(state)}

    run_verb(work, as_json=as_json)


def evaluate(
    run: RunFolder,
    step: AtStep = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="exact, number, sql, ...; may be repeated; those that fit the rows.", show_default=False),
    ] = None,
    scorer: Annotated[
        str | None, typer.Option(help="Your own metric: FILE.py:FUNCTION(answer, reference, row).", show_default=False)
    ] = None,
    scorer_seconds: ScorerSeconds = 10.0,
    data: Annotated[
        Path | None, typer.Option(parser=user_path, help="Rows to answer; the held-out ones.", show_default=False)
    ] = None,
    columns: AskedColumns = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of an answer in tokens; by the references.", show_default=False)
    ] = None,
    general: Annotated[bool, typer.Option("--general", help="General questions too: what was forgotten?")] = False,
    loss_only: Annotated[bool, typer.Option("--loss-only", help="Generate no answers.")] = False,
    fail_under: Annotated[
        list[str] | None, typer.Option(help="METRIC=VALUE: exit code 5 below it; may be repeated.", show_default=False)
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval's benchmarks too, with commas between.", show_default=False)
    ] = None,
    include: Annotated[
        Path | None, typer.Option(parser=user_path, help="Folder of task files for lm-eval.", show_default=False)
    ] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option("--chat-template/--no-chat-template", help="Of tasks; those that generate.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows, and questions of each task; 200, all.", show_default=False)
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Ranks that share rows, and the weights where training sharded them.")
    ] = 1,
    endpoint: OnServer = None,
    model: OnServerTuned = None,
    base_model: OnServerBase = None,
    as_json: AsJson = False,
) -> None:
    """How good is it? Held-out loss, scored answers, benchmarks."""

    def work() -> dict[str, Any]:
        from finetune.answers.requests import EvalRequest, chosen_metrics, thresholds

        recipe = recipe_from_resolved(require_run_folder(run))  # before torch is imported
        alone = "--tasks" if tasks is not None else "--endpoint" if endpoint is not None else None
        launch = launch_of_ranks(processes, alone, recipe)
        entry, base = None, recipe.model.name_or_path
        if columns is not None and data is None:
            raise FinetuneError("--columns: says how --data is read; name that too")
        if columns is not None:
            entry = new_recipe.propose(str(data), columns=columns, model=base, output=run / "prompts.yaml").entry
        request = EvalRequest(
            metrics=chosen_metrics(metric or [], scorer),
            scorer=scorer,
            scorer_seconds=scorer_seconds,
            file=data,
            entry=entry,
            limit=limit,
            max_new_tokens=max_new_tokens,
            general=general,
            generate=not loss_only,
            fail_under=thresholds(fail_under or []),
            tasks=[] if tasks is None else tasks.split(","),
            include=include,
            chat_template=chat_template,
            endpoint=_server(endpoint, model, base_model, base),
        )
        if launch is None or launch.is_main:
            say_begun(f"loading {run}, its base and its held-out rows" if endpoint is None else f"asking {endpoint}")
        say_result, show = _printers(launch, as_json)
        from finetune.answers.evaluation import evaluate_finished

        figures = evaluate_finished(run, request, say_result, show, step=step, launch=launch)
        if launch is not None and not launch.is_main:
            raise typer.Exit
        if not as_json and figures.get("ok", True):  # a failed gate names no next step
            say(f"serve it: {shlex.join(['finetune', 'export', str(run), '--for', 'ollama'])}")
        return {"ok": True, **figures}

    run_verb(work, as_json=as_json)


def sample(
    source: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE|MODEL", help="Who answers, and how rows are read.", show_default=False)
    ],
    data: Annotated[Path, typer.Option(parser=user_path, help="Prompts: rows with their answers.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", parser=user_path, help="Folder; samples/ and a name.", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option("--n", min=1, help="Answers to each prompt.")] = 8,
    keep: Annotated[str, typer.Option(help="Rows of right answers, pairs, judged answers, or all.")] = "right",
    columns: AskedColumns = None,
    metric: Annotated[
        str | None, typer.Option(help="What is right: exact, number, sql, ...; fits the rows.", show_default=False)
    ] = None,
    scorer: Annotated[
        str | None, typer.Option(help="Or your own: FILE.py:FUNCTION(answer, reference, row).", show_default=False)
    ] = None,
    scorer_seconds: ScorerSeconds = 10.0,
    at_least: Annotated[float, typer.Option(help="The score of a right answer.")] = 1.0,
    per_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Most rows of a prompt; 1, of judged and all: every one.", show_default=False),
    ] = None,
    pick: Annotated[str, typer.Option(help="shortest or random answers first.")] = "random",
    leave_out: Annotated[
        list[str] | None,
        typer.Option(help="Prompts that are always or never right; may be repeated.", show_default=False),
    ] = None,
    thoughts: Annotated[bool, typer.Option("--thoughts/--no-thoughts", help="Rows with thinking blocks.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest tokens.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of every draw.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of an answer in tokens; by the references.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts; all.", show_default=False)] = None,
    processes: Annotated[int, typer.Option(min=1, help="Ranks that share prompts, or weights as training did.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="Another RUN or MODEL that answers; its name on a server.", show_default=False)
    ] = None,
    endpoint: OnServer = None,
    as_json: AsJson = False,
) -> None:
    """Draw answers, and write rows of those that a checker keeps."""
    one_of("--keep", keep, ("right", "pairs", "judged", "all"))
    one_of("--pick", pick, ("shortest", "random"))
    for outcome in leave_out or ():
        one_of("--leave-out", outcome, ("always", "never"))

    def work() -> dict[str, Any]:
        from finetune.answers.kept_rows import KeepOptions, summary_in_words
        from finetune.answers.requests import SampleRequest, chosen_metrics, source_of

        reads = source_of(source, data)
        writer = reads if model is None or endpoint is not None else source_of(model, data)
        alone = None if endpoint is None else "--endpoint"
        launch = launch_of_ranks(processes, alone, writer.loaded.recipe)
        kept: Any = keep  # checked above, as is `pick`
        chosen: Any = pick
        folder = output or Path("samples", reads.name)
        entry, base = None, reads.loaded.recipe.model.name_or_path
        trained_from = base if reads.kind == "run" else ""
        if reads.kind == "model" or columns is not None:  # as the recipe that `init` writes would read them
            entry = new_recipe.propose(str(data), columns=columns, model=base, output=folder / "prompts.yaml").entry
        request = SampleRequest(
            data=data,
            entry=entry,
            folder=folder,
            options=KeepOptions(kept, at_least, per_prompt, chosen, tuple(leave_out or ()), thoughts),
            count=count,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_new_tokens=max_new_tokens,
            limit=limit,
            metrics=chosen_metrics([] if metric is None else [metric]),
            scorer=scorer,
            scorer_seconds=scorer_seconds,
            endpoint=None if endpoint is None else _server(endpoint, model, None, trained_from),
        )
        request.check()
        if launch is None or launch.is_main:
            say_begun(f"loading {model or source} and the prompts" if endpoint is None else f"asking {endpoint}")
        say_result, show = _printers(launch, as_json)
        from finetune.answers.sample import sample_rows

        figures = sample_rows(reads, writer, request, say_result, show, launch)
        if launch is not None and not launch.is_main:
            raise typer.Exit
        files = figures["files"]
        if "recipe" in files and reads.kind == "model" and not (recipe := Path(files["recipe"])).exists():
            write_text(recipe, new_recipe.propose(files["rows"], model=source, output=recipe).text)
        if not as_json:
            say("\n".join(summary_in_words(figures, kept)))
            say("\n".join(f"{name}: {file}" for name, file in files.items()))
            if "recipe" in files:
                say(f"next: {shlex.join(['finetune', 'train', files['recipe']])}")
        return {"ok": True, **figures}

    run_verb(work, as_json=as_json)


def merge(
    run: RunFolder,
    step: AtStep = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; the recipe's model.dtype.", show_default=False)
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Under a quantised base: own or dequantized; dequantized.", show_default=False)
    ] = None,
    verify: Annotated[int, typer.Option(min=0, help="Held-out documents to compare by; 0: none.")] = 64,
    gguf: Annotated[
        str | None,
        typer.Option(help="One file for llama.cpp and Ollama from merged/: f16, q8_0 or q4_k_m.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge the adapter into its base, and measure how both agree.

    With --gguf, an existing merged/ is used if it is newer than the adapter and neither --dtype nor --base is given.
    """
    one_of("--dtype", dtype, ("bfloat16", "float16", "float32"))
    one_of("--base", base, ("own", "dequantized"))
    one_of("--gguf", gguf, ("f16", "q8_0", "q4_k_m"))

    def work() -> dict[str, Any]:
        require_run_folder(run)  # before torch is imported
        say_begun(f"loading {run} and its base")
        from finetune.hand_over.export_step import run_at
        from finetune.hand_over.gguf import describe_gguf, write_gguf
        from finetune.hand_over.merge import describe_merge, merge_run

        folder, printer = run_at(run, step), _line_printer(as_json)
        if gguf is None or dtype or base:
            chosen: dict[str, Any] = {"dtype": dtype, "base": base}  # checked above
            facts = merge_run(folder, **chosen, prompts=verify, say=printer)
            printer(describe_merge(facts))
        if gguf is not None:
            facts = write_gguf(folder, gguf, printer, prompts=verify)  # type: ignore[arg-type]
            printer(describe_gguf(facts))
        elif not as_json:
            name_next(["finetune", "push", run, "--merged", "--dry-run"])
        return {"ok": True, **facts}

    run_verb(work, as_json=as_json)


def push(
    run: RunFolder,
    repo: Annotated[
        str | None, typer.Argument(metavar="[OWNER/NAME]", help="The recipe's hub.repo_id.", show_default=False)
    ] = None,
    step: AtStep = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show files and card; no network.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="The merged model, not the adapter.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Everybody may see it.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, made if missing.", show_default="main")] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.", show_default=False)] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model's name on the Hub, if not known.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Push the adapter or model to the Hub; private unless --public."""

    def work() -> dict[str, Any]:
        from finetune.hub.push import chosen_destination, describe_upload, prepare_upload
        from finetune.hub.push import push as send

        folder = run
        if step is not None:  # exporting a checkpoint needs torch; the rest of this verb does not
            require_run_folder(run)
            from finetune.hand_over.export_step import run_at

            folder = run_at(run, step)
        to = chosen_destination(folder, repo, public=public, revision=revision, base=base, merged=merged)
        say_line = partial(typer.echo, err=as_json)  # standard output is one JSON object
        if dry_run:
            upload = prepare_upload(folder, to)
            if not as_json:
                typer.echo(describe_upload(upload, to))
            return {"ok": True, "dry_run": True, "repo_id": to.repo_id, "card": upload.card, **upload.as_json()}
        result = send(folder, to, message=message, say=say_line)
        if not as_json:
            visibility = "private" if result["private"] else "public"
            typer.echo(f"pushed: {result['url']} ({visibility})")
        return {"ok": True, **result}

    run_verb(work, as_json=as_json)


def export(
    run: RunFolder,
    step: Annotated[int | None, typer.Option("--step", min=0, help="A checkpoint's step.", show_default=False)] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--to", parser=user_path, help="Output folder; exports/ or serving/ of the run.", show_default=False
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--for", help=f"What this engine reads, and its command: {', '.join(ENGINES)}.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint, or hand a run over to a serving engine."""
    one_of("--for", engine, ENGINES)

    def work() -> dict[str, Any]:
        if folder is not None:
            check_output(folder, "--to", folder=True)
        require_run_folder(run)  # before torch is imported
        say_begun(f"exporting from {run}")
        from finetune.hand_over.engines import export_for
        from finetune.hand_over.export_step import export_with_report, run_at

        if engine is not None:
            at = run_at(run, step)
            return {"ok": True, **export_for(at, engine, folder, _line_printer(as_json))}
        if step is None:
            raise FinetuneError(f"{run}: export needs a checkpoint's step: --step N; or --for and an engine")
        facts = export_with_report(run, step, folder, _line_printer(as_json))
        if not as_json:
            typer.echo(f"talk to it: {shlex.join(['finetune', 'chat', facts['folder']])}")
        return {"ok": True, **facts}

    run_verb(work, as_json=as_json)
