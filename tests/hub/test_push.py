"""finetune push against the loopback Hub: what arrives, who sees it, what stays here, and every fault at every call."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli.main import main
from finetune.compare import plan_comparison, settings_of_rows
from finetune.errors import EnvironmentMismatch, FinetuneError, HubUnreachable, RecipeError
from finetune.files import append_lines, write_json
from finetune.hub.around_training import check_before_training, push_after_training
from finetune.hub.push import Destination, chosen_destination, prepare_upload, push
from finetune.model.known_configs import full_config
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import resolved_yaml
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import refuse_secrets
from finetune.redaction import find_secret
from finetune.rehearse.changes import changes, overrides
from finetune.rehearse.shrink import Shrunk
from finetune.run_folder.save_restore import export_adapter
from tests.support.hub import Hub, running_hub
from tests.support.hub.server import TOKEN, WRITER
from tests.support.models.tiny import tiny_model, tiny_tokenizer, write_chats

ME = Destination("me/devils", base="acme/tiny-llama")
PLAIN = Destination("me/devils")  # with no base to ask the Hub about
SAID = "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\n"
# The calls of a push in their order; large files go the LFS way here.
CALLS = [
    "whoami",
    "info",
    "create",
    "tree",
    "validate",
    "preupload",
    "lfs_batch",
    "lfs_upload",
    "lfs_verify",
    "commit",
]
# These the client itself tries again, a second later.
PATIENT = {"tree", "preupload", "lfs_batch", "lfs_upload", "lfs_verify"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A finished run's folder as the trainer leaves it, with an adapter that changes the logits."""
    run = tmp_path_factory.mktemp("finished") / "run"
    run.mkdir()
    (run.parent / "recipe.yaml").write_text(
        f"model: {{name_or_path: {tiny_llama}, dtype: float32}}\n"
        f"data: {{train: [{{path: json, data_files: {run.parent}/chats.jsonl}}], eval: {{fraction: 0.1}}}}\n"
        f"output_dir: {run}\n"
    )
    (run / "recipe.yaml").write_text(resolved_yaml(load_recipe(run.parent / "recipe.yaml")))
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(), config)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    export_adapter(model, weights, tiny_tokenizer(), run, base=str(tiny_llama))
    (run / "adapter" / "training_args.bin").write_bytes(b"a pickle")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "state.json").write_text("{}")
    (run / "loss.png").write_bytes(b"\x89PNG\r\n\0")
    data = {"documents": 9, "tokens": 90, "supervised_tokens": 50, "eval_documents": 2}
    write_json(run / "receipt.json", {"world_size": 1, "device": "cpu", "strategy": "single", "data": data})
    write_json(run / "environment.json", {"python": "3.11", "versions": {"torch": torch.__version__}})
    evals = [{"kind": "eval", "step": step, "loss": 6.0 - step, "perplexity": 9.0} for step in (0, 1, 2)]
    append_lines(run / "metrics.jsonl", [*evals, {"kind": "train", "step": 2, "loss": 4.0}])
    samples = [{"when": when, "prompt": SAID, "answer": f"``` {when}"} for when in ("before", "after")]
    append_lines(run / "samples.jsonl", samples)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def send(run: Path, hub: Hub, to: Destination = ME, **options: Any) -> tuple[dict[str, Any], list[float], list[str]]:
    """Result, waits and words of a push that does not really wait."""
    waits: list[float] = []
    lines: list[str] = []
    record = push(run, to, endpoint=hub.url, pause=waits.append, say=lines.append, **options)
    return record, waits, lines


def fine_grained(*scopes: dict[str, Any]) -> dict[str, Any]:
    return {"auth": {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": list(scopes)}}}}


def content_of(run: Path) -> dict[str, bytes]:
    files = (path for path in run.rglob("*") if path.is_file() and path.name != "hub.json")
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


class TestWhatArrives:
    def test_the_allowed_files_and_no_other(self, run: Path, hub: Hub) -> None:
        record, waits, _ = send(run, hub)
        remote = set(hub.repository("me/devils").files()) - {".gitattributes"}
        assert remote == {file["path"] for file in record["files"]}
        assert remote >= {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "loss.png"}
        assert remote >= {"recipe.yaml", "receipt.json", "metrics.jsonl", "chat_template.jinja"}
        assert not any("samples" in name or "checkpoint" in name or name.endswith(".bin") for name in remote)
        assert record["left_out"] == ["training_args.bin"]
        assert waits == []

    def test_a_reader_gets_the_same_logits(self, run: Path, hub: Hub, tmp_path: Path, tiny_llama: Path) -> None:
        send(run, hub)
        folder = HfApi(endpoint=hub.url).snapshot_download("me/devils", cache_dir=tmp_path)
        tokens = AutoTokenizer.from_pretrained(folder)(SAID, return_tensors="pt")
        logits = []
        for adapter in (folder, run / "adapter"):
            base = AutoModelForCausalLM.from_pretrained(tiny_llama)
            with torch.no_grad():
                logits.append(peft.PeftModel.from_pretrained(base, str(adapter)).eval()(**tokens).logits)
        plain = AutoModelForCausalLM.from_pretrained(tiny_llama)(**tokens).logits
        assert torch.equal(*logits)
        assert not torch.allclose(logits[0], plain)

    def test_no_path_of_this_machine(self, run: Path, hub: Hub, finished: Path, tiny_llama: Path) -> None:
        send(run, hub)
        for path in hub.repository("me/devils").files():
            content = hub.content("me/devils", path)
            for secret in (run, finished, tiny_llama):
                assert str(secret).encode() not in content, path
        recipe = yaml.safe_load(hub.content("me/devils", "recipe.yaml"))
        assert recipe["data"]["train"][0]["data_files"] == "chats.jsonl"
        config = json.loads(hub.content("me/devils", "adapter_config.json"))
        assert config["base_model_name_or_path"] == "acme/tiny-llama"

    def test_private_unless_requested(self, run: Path, hub: Hub) -> None:
        record, _, _ = send(run, hub)
        assert record["private"] is True
        assert hub.repository("me/devils").private
        assert send(run, hub, Destination("me/shown", public=True))[0]["private"] is False
        assert not hub.repository("me/shown").private

    def test_never_to_a_public_repository_unasked(self, run: Path, hub: Hub) -> None:
        hub.add("me/devils", private=False)
        with pytest.raises(FinetuneError, match=r"is public, which was not requested") as caught:
            send(run, hub, PLAIN)
        assert caught.value.exit_code == 2
        assert hub.calls() == ["whoami", "info"]
        assert send(run, hub, Destination("me/devils", public=True))[0]["private"] is False

    def test_an_owner_whose_rule_makes_repositories_public_gets_nothing(self, run: Path, hub: Hub) -> None:
        add = hub.add
        hub.add = lambda name, **_: add(name, private=False)  # type: ignore[method-assign]
        with pytest.raises(FinetuneError, match=r"is public"):
            send(run, hub)
        assert set(hub.repository("me/devils").files()) == {".gitattributes"}

    @pytest.mark.thorough
    def test_a_second_push_sends_what_is_new(self, run: Path, hub: Hub) -> None:
        first, _, _ = send(run, hub)
        hub.log.clear()
        assert send(run, hub)[0]["commit"] == first["commit"]
        assert not {"lfs_upload", "commit"} & set(hub.calls())
        (run / "receipt.json").write_text("{}")
        assert send(run, hub, message="less")[0]["commit"] != first["commit"]
        assert [commit.title for _, commit in hub.repository("me/devils").history(None)] == []
        assert hub.repository("me/devils").commits[send(run, hub)[0]["commit"]].title == "less"

    def test_another_branch_is_made(self, run: Path, hub: Hub) -> None:
        record, _, _ = send(run, hub, Destination("me/devils", revision="step-100"))
        assert record["url"].endswith("me/devils/tree/step-100")
        assert "recipe.yaml" in hub.repository("me/devils").files("step-100")
        assert "recipe.yaml" not in hub.repository("me/devils").files()
        send(run, hub, Destination("me/devils", revision="step-100"))

    def test_all_weights_and_their_shards(self, run: Path, hub: Hub) -> None:
        shutil.rmtree(run / "adapter")
        tiny_model().save_pretrained(run / "model", max_shard_size="300KB")
        tiny_tokenizer().save_pretrained(run / "model")
        before, _, after = (run / "recipe.yaml").read_text().partition("lora:")
        (run / "recipe.yaml").write_text(f"{before}lora: null\ndata:{after.partition(chr(10) + 'data:')[2]}")
        send(run, hub)
        remote = set(hub.repository("me/devils").files())
        assert remote >= {"config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
        card = ModelCard(hub.content("me/devils", "README.md").decode())
        assert card.data.library_name == "transformers"
        assert card.data.base_model_relation == "finetune"


class TestCard:
    def test_its_metadata_are_what_the_hub_wants(self, run: Path, tiny_llama: Path) -> None:
        card = ModelCard(prepare_upload(run, ME).card)
        data = card.data.to_dict()
        assert data["base_model"] == "acme/tiny-llama"
        assert data["library_name"] == "peft"
        assert data["pipeline_tag"] == "text-generation"
        assert {"lora", "sft"} <= set(data["tags"])
        assert {result.metric_type: result.metric_value for result in card.data.eval_results} == {
            "loss": 4.0,
            "perplexity": 9.0,
        }

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("named", [False, True])
    def test_the_hub_accepts_it(self, run: Path, hub: Hub, named: bool) -> None:
        send(run, hub, ME if named else Destination("me/devils"))
        card = hub.content("me/devils", "README.md").decode()
        assert ("base_model: acme/tiny-llama" in card) == named

    def test_the_licence_is_the_bases_own(self, run: Path, hub: Hub, tiny_llama: Path, tmp_path: Path) -> None:
        hub.add("acme/tiny-llama", private=False)
        card = b"---\nlicense: llama3.1\n---\n"
        repository = hub.repository("acme/tiny-llama")
        from tests.support.hub.state import Blob

        repository.commit("main", {"README.md": Blob(card)}, "card", "")
        _, _, lines = send(run, hub)
        text = hub.content("me/devils", "README.md").decode()
        assert ModelCard(text).data.license == "llama3.1"
        assert "Built with Llama" in text
        assert any("begins with Llama" in line for line in lines)

    def test_a_local_bases_licence_and_name(self, run: Path, tmp_path: Path, tiny_llama: Path) -> None:
        base = shutil.copytree(tiny_llama, tmp_path / "my-base")
        (base / "README.md").write_text("---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n")
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"_name_or_path": "acme/original"}))
        recipe = (run / "recipe.yaml").read_text().replace(str(tiny_llama), str(base))
        (run / "recipe.yaml").write_text(recipe)
        data = ModelCard(prepare_upload(run, Destination("me/devils")).card).data
        assert (data.base_model, data.license, data.license_name) == ("acme/original", "other", "mine")

    def test_it_tells_what_a_reader_must_know(self, run: Path) -> None:
        card = prepare_upload(run, ME).card
        assert 'PeftModel.from_pretrained(base, "me/devils")' in card
        assert "![The loss of every step](loss.png)" in card
        assert "| after training | 2 | 4.0000 |" in card
        assert "What was not evaluated" in card
        assert f"| torch | {torch.__version__} |" in card
        assert "chats.jsonl, split `train`" in card
        assert "````text\n``` after\n````" in card  # an answer cannot break out of its fence

    def test_it_tells_which_step_the_weights_are_of(self, run: Path) -> None:
        append_lines(run / "metrics.jsonl", [{"kind": "eval", "step": 3, "loss": 6.0, "perplexity": 403.0}])
        receipt = json.loads((run / "receipt.json").read_text("utf-8")) if (run / "receipt.json").is_file() else {}
        export = {"step": 2, "best": True, "metric": "eval_loss", "loss": 4.0}
        (run / "receipt.json").write_text(json.dumps(receipt | {"export": export}), "utf-8")
        card = prepare_upload(run, ME).card
        assert "| weights of step | 2, the best evaluation by eval_loss |" in card
        assert "| these weights, the best evaluation | 2 | 4.0000 |" in card
        assert "| after training | 3 | 6.0000 |" in card
        results = {result.metric_type: result.metric_value for result in ModelCard(card).data.eval_results}
        assert results == {"loss": 4.0, "perplexity": 9.0}

    def test_what_a_model_answers_is_text_and_never_a_template(self, run: Path) -> None:
        answer = "{{ run.environment }} {% if %} {# gone #}"
        lines = [{"when": when, "prompt": "{{ 6 * 7 }}", "answer": answer} for when in ("before", "after")]
        (run / "samples.jsonl").unlink()
        append_lines(run / "samples.jsonl", lines)
        card = prepare_upload(run, ME).card
        assert card.count(f"```text\n{answer}\n```") == 2
        assert "{{ 6 * 7 }}" in card

    def test_without_held_out_rows_it_says_so(self, run: Path) -> None:
        (run / "metrics.jsonl").unlink()
        card = prepare_upload(run, ME).card
        assert "no rows were held out" in card
        assert "model-index" not in card


class TestFaults:
    @pytest.mark.sample(2, thorough=6)
    @pytest.mark.parametrize(
        "call", [pytest.param(name, marks=[pytest.mark.slow] * (name in PATIENT)) for name in CALLS]
    )
    @pytest.mark.parametrize(
        "fault",
        [
            {"status": 429, "retry_after": 0},
            {"status": 500},
            {"status": 409},
            {"cut_request_at": 10},
            {"cut_answer_at": 5},
        ],
        ids=lambda fault: next(iter(fault)) + str(fault.get("status", "")),
    )
    def test_what_may_pass_is_waited_for(self, run: Path, hub: Hub, call: str, fault: dict[str, Any]) -> None:
        before = content_of(run)
        hub.fail(call, **fault)
        record, waits, _ = send(run, hub, PLAIN)
        assert not any(fault.times for fault in hub.faults), "the fault was never met"
        assert hub.content("me/devils", "adapter_model.safetensors") == before["adapter/adapter_model.safetensors"]
        assert len(waits) <= 1
        assert record["state"] == "pushed"
        assert content_of(run) == before

    @pytest.mark.sample(2, thorough=5)
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("status", [401, 403])
    def test_a_refusal_names_the_remedy_and_the_command(self, run: Path, hub: Hub, call: str, status: int) -> None:
        before = content_of(run)
        hub.fail(call, status=status, times=9)
        with pytest.raises(EnvironmentMismatch, match=r"hf auth login") as caught:
            send(run, hub, PLAIN)
        assert caught.value.exit_code == 4
        assert f"finetune push {run} me/devils" in str(caught.value)
        assert TOKEN not in str(caught.value)
        assert content_of(run) == before
        assert json.loads((run / "hub.json").read_text())["state"] == "failed"
        hub.faults.clear()
        assert send(run, hub)[0]["state"] == "pushed"

    def test_a_damaged_upload_is_found_by_the_hub_and_sent_again(self, run: Path, hub: Hub) -> None:
        hub.fail("lfs_upload", wrong_hash=True)
        _, waits, lines = send(run, hub, PLAIN)
        assert waits == [2.0]
        assert "trying again in 2 s" in lines[-1]
        weights = (run / "adapter" / "adapter_model.safetensors").read_bytes()
        assert hub.content("me/devils", "adapter_model.safetensors") == weights

    def test_the_hubs_own_wait_is_kept_and_ours_doubles(self, run: Path, hub: Hub) -> None:
        hub.fail("whoami", status=503)
        hub.fail("validate", status=429, retry_after=7)
        hub.fail("commit", status=500)
        assert send(run, hub)[1] == [2.0, 7.0, 8.0]

    def test_after_the_last_attempt_the_run_is_whole_and_a_repeat_sends_the_rest(self, run: Path, hub: Hub) -> None:
        before = content_of(run)
        hub.fail("commit", status=502, times=99)
        with pytest.raises(HubUnreachable, match=r"502 .*3 times; try again later") as caught:
            send(run, hub, attempts=3)
        assert "to push again:\n  finetune push" in str(caught.value)
        assert content_of(run) == before
        hub.faults.clear()
        hub.log.clear()
        send(run, hub)
        assert "lfs_upload" not in hub.calls(), "the large file is there already"

    def test_ctrl_c_leaves_the_command(self, run: Path, hub: Hub) -> None:
        def stop(_: float) -> None:
            raise KeyboardInterrupt

        lines: list[str] = []
        hub.fail("commit", status=500)
        with pytest.raises(KeyboardInterrupt):
            push(run, PLAIN, endpoint=hub.url, pause=stop, say=lines.append)
        assert lines[-1] == f"stopped; to push again:\n  finetune push {run} me/devils"

    def test_no_hub_at_all(self, run: Path, hub: Hub) -> None:
        hub.url = "http://127.0.0.1:9"
        with pytest.raises(HubUnreachable, match=r"the connection broke"):
            send(run, hub, attempts=2)


class TestPermission:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        ("repo", "user", "message"),
        [
            ("me/x", {"auth": {"accessToken": {"role": "read"}}}, "may not write"),
            ("you/x", {}, "may write for me, acme, not for you"),
            ("acme/x", {"orgs": [{"name": "acme", "roleInOrg": "read"}]}, "your role in acme is read"),
            ("acme/x", {}, None),
            (
                "me/x",
                {"auth": {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": []}}}},
                "may not write",
            ),
            (
                "me/x",
                {
                    "auth": {
                        "accessToken": {
                            "role": "fineGrained",
                            "fineGrained": {"scoped": [{"entity": {"name": "me"}, "permissions": ["repo.write"]}]},
                        }
                    }
                },
                None,
            ),
        ],
    )
    def test_who_may_write(self, run: Path, hub: Hub, repo: str, user: dict[str, Any], message: str | None) -> None:
        hub.users[TOKEN] = WRITER | {"orgs": [{"name": "acme", "roleInOrg": "write"}]} | user
        if message is None:
            assert send(run, hub, Destination(repo))[0]["state"] == "pushed"
            return
        with pytest.raises(EnvironmentMismatch, match=message):
            send(run, hub, Destination(repo))
        assert hub.calls() == ["whoami"]

    def test_no_token(self, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(EnvironmentMismatch, match=r"no token on this machine"):
            send(run, hub)


class TestSecrets:
    @pytest.mark.sample(5)
    @pytest.mark.parametrize("file", ["recipe.yaml", "metrics.jsonl", "adapter/chat_template.jinja"])
    @pytest.mark.parametrize(
        "secret", [TOKEN, "wandb-key-of-mine-1234", "hf_" + "x" * 34, "https://me:word@host/data", "/home/anna/data"]
    )
    def test_a_planted_one_stops_the_push_and_is_not_repeated(
        self, run: Path, hub: Hub, file: str, secret: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "wandb-key-of-mine-1234")
        with (run / file).open("a") as stream:
            stream.write(f"# {secret}\n")
        with pytest.raises(FinetuneError, match=rf"{Path(file).name}:\d+: holds a") as caught:
            send(run, hub)
        assert hub.log == [] or {request.call for request in hub.log} == {"info"}
        if "/home" not in secret:
            assert secret not in str(caught.value)
            assert secret not in (run / "hub.json").read_text()

    def test_in_the_header_of_the_weights(self, run: Path, hub: Hub) -> None:
        from safetensors.torch import load_file, save_file

        weights = run / "adapter" / "adapter_model.safetensors"
        save_file(load_file(weights), weights, metadata={"note": TOKEN})
        with pytest.raises(FinetuneError, match=r"adapter_model.safetensors:1: holds a"):
            prepare_upload(run, ME)

    def test_a_servers_message_is_shown_without_them(self, run: Path, hub: Hub) -> None:
        hub.fail("whoami", status=403, message=f"bad {TOKEN}")
        with pytest.raises(EnvironmentMismatch) as caught:
            send(run, hub)
        assert TOKEN not in str(caught.value)
        assert "[hidden]" in str(caught.value)

    def test_no_upload_and_no_body_carries_the_token(self, run: Path, hub: Hub) -> None:
        send(run, hub)
        assert TOKEN.encode() not in b"".join(request.body for request in hub.log)
        assert not any(TOKEN in request.path for request in hub.log)

    def test_in_a_recipe_before_training(self, run: Path) -> None:
        token = "hf_" + "x" * 34
        recipe = load_recipe(run / "recipe.yaml", [f"data.date_string={token}"]).recipe
        with pytest.raises(RecipeError, match=r"data.date_string: holds a Hugging Face token") as caught:
            refuse_secrets(recipe)
        assert token not in str(caught.value)
        refuse_secrets(load_recipe(run / "recipe.yaml").recipe)


class TestCommand:
    def test_a_dry_run_sends_no_request(self, run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["push", str(run), "me/devils", "--dry-run"]) == 0
        output = capsys.readouterr().out
        assert "nothing was sent" in output
        assert "adapter_model.safetensors" in output
        assert "# devils" in output
        assert hub.log == []
        assert not (run / "hub.json").exists()

    def test_as_json(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["push", str(run), "me/devils", "--dry-run", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["dry_run"]
        assert {"path", "bytes"} == set(result["files"][0])

    @pytest.mark.parametrize("name", ["devils", "me/devils/more", "/home/me", "me/x--y", "me/x.git", "me/"])
    def test_a_name_that_is_none(self, run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["push", str(run), name, "--dry-run"]) == 2
        assert "owner/name" in capsys.readouterr().err

    def test_a_folder_without_a_finished_run(self, run: Path, tmp_path: Path, capsys: Any) -> None:
        assert main(["push", str(tmp_path / "nowhere"), "me/x"]) == 2
        assert "not a run folder" in capsys.readouterr().err
        shutil.rmtree(run / "adapter")
        assert main(["push", str(run), "me/x"]) == 2
        assert "has not finished" in capsys.readouterr().err

    def test_the_recipe_says_where(self, run: Path) -> None:
        recipe = (run / "recipe.yaml").read_text()
        own = recipe.replace("repo_id: null", "repo_id: me/own").replace("private: true", "private: false")
        (run / "recipe.yaml").write_text(own)
        plain = {"public": False, "revision": None, "base": None}
        assert chosen_destination(run, None, **plain) == Destination("me/own", public=True)
        assert chosen_destination(run, "me/other", **plain) == Destination("me/other", public=False)
        (run / "recipe.yaml").write_text(recipe)
        with pytest.raises(FinetuneError, match=r"hub.repo_id"):
            chosen_destination(run, None, **plain)


@pytest.mark.slow
class TestXet:
    """The client's own choice, in a process that knows HF_ENDPOINT alone."""

    @pytest.fixture
    def xet_hub(self, tmp_path: Path) -> Iterator[Hub]:
        (tmp_path / "store").mkdir()
        with running_hub(store=tmp_path / "store") as running:
            yield running

    def typed(self, run: Path, hub: Hub) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(run / "home"), "HOME": str(run)}
        words = [sys.executable, "-m", "finetune.cli.main", "push", str(run), "me/devils"]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)

    def test_it_arrives(self, run: Path, xet_hub: Hub) -> None:
        result = self.typed(run, xet_hub)
        assert result.returncode == 0, result.stderr
        assert "xet_token" in xet_hub.calls()
        assert "lfs_batch" not in xet_hub.calls()
        weights = xet_hub.repository("me/devils").files()["adapter_model.safetensors"]
        assert weights.sha256 == hashlib.sha256((run / "adapter/adapter_model.safetensors").read_bytes()).hexdigest()

    @pytest.mark.parametrize(("status", "code"), [(403, 4), (500, 0)])
    def test_a_fault_of_its_token(self, run: Path, xet_hub: Hub, status: int, code: int) -> None:
        xet_hub.fail("xet_token", status=status)
        result = self.typed(run, xet_hub)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        assert ("the Hub's file store answered 403; the token may not do this" in result.stderr) == (code == 4)
        assert json.loads((run / "hub.json").read_text())["state"] == ("failed" if code else "pushed")


class TestTraining:
    """`hub.push: true`; the endpoint is the process's own here, as a client sees it that was imported before."""

    @pytest.fixture
    def recipe(self, run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", hub.url, raising=False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        return load_recipe(run / "recipe.yaml", ["hub.repo_id=me/devils", "hub.push=true", f"output_dir={run}"]).recipe

    def test_a_refusal_comes_before_the_training(self, recipe: Any, hub: Hub) -> None:
        assert check_before_training(recipe) == ()
        hub.add("me/devils", private=False)
        with pytest.raises(FinetuneError, match=r"hub.push: me/devils: is public"):
            check_before_training(recipe)
        hub.users.clear()
        with pytest.raises(EnvironmentMismatch, match=r"hub.push: .*401"):
            check_before_training(recipe)

    def test_a_hub_that_is_down_is_a_note(self, recipe: Any, hub: Hub) -> None:
        hub.fail("whoami", status=503, times=9)
        (note,) = check_before_training(recipe, pause=lambda _: None)
        assert "training continues" in note

    def test_a_failed_push_is_reported_and_a_second_one_completes_it(
        self, recipe: Any, hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.fail("commit", status=403)
        push_after_training(recipe)
        errors = capsys.readouterr().err
        assert "the training is finished and saved; the push failed" in errors
        assert f"finetune push {run} me/devils" in errors
        push_after_training(recipe)
        assert "pushed: " in capsys.readouterr().out
        hub.log.clear()
        push_after_training(recipe)
        assert hub.log == [], "it is there already"

    def test_without_push_no_request_is_sent(self, run: Path, hub: Hub) -> None:
        recipe = load_recipe(run / "recipe.yaml").recipe
        assert check_before_training(recipe) == ()
        push_after_training(recipe)
        assert hub.log == []

    def test_push_needs_a_name(self, run: Path) -> None:
        with pytest.raises(RecipeError, match=r"hub.push: hub.repo_id is not set"):
            load_recipe(run / "recipe.yaml", ["hub.push=true"])
        with pytest.raises(RecipeError, match=r"hub.repo_id: is not a repository name"):
            load_recipe(run / "recipe.yaml", ["hub.repo_id=devils"])


def test_neither_comparison_nor_rehearsal_pushes(run: Path, tmp_path: Path) -> None:
    settings = ["hub.repo_id=me/devils", "hub.push=true"]
    pushing = tmp_path / "pushing.yaml"
    written = yaml.safe_load((run / "recipe.yaml").read_text())
    pushing.write_text(yaml.safe_dump(written | {"hub": {"repo_id": "me/devils", "push": True}}))
    single = settings_of_rows(["accelerate_config=single"])
    (row,) = plan_comparison(pushing, [], single, steps=1, folder=tmp_path / "compared").rows
    assert [word for word in row.words if word.startswith("hub.push=")] == ["hub.push=false"]
    write_chats(tmp_path / "chats.jsonl", [40, 40])
    data = f"data.train.0.data_files={tmp_path}/chats.jsonl"
    recipe = load_recipe(run / "recipe.yaml", [*settings, data]).recipe
    full, _ = full_config(recipe.model.name_or_path, "main")
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "key_value_heads": 2}
    shrunk = Shrunk(tmp_path, full["architectures"][0], "", sizes, sizes, 0, 0)
    assert "hub.push=false" in overrides(changes(recipe, read_strategy("single"), shrunk, processes=1, folder=tmp_path))


@pytest.mark.slow
def test_a_vocabulary_of_20_mb_is_searched_in_seconds() -> None:
    started = time.process_time()
    for text in ("ab.-" * 100_000, "sk-" * 100_000 + " ", "a://b:" * 50_000, '"quiet": 7, ' * 400_000):
        find_secret(text, ["a secret"])
    assert time.process_time() - started < 10


@pytest.mark.parametrize(("set_by_user", "off"), [(None, True), ("0", False)])
def test_no_library_reports(set_by_user: str | None, off: bool) -> None:
    """hf_xet and transformers read huggingface_hub's switch, which the user may set otherwise."""
    environment = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    if set_by_user is not None:
        environment["HF_HUB_DISABLE_TELEMETRY"] = set_by_user
    asked = "import finetune, huggingface_hub.constants as hub; print(hub.HF_HUB_DISABLE_TELEMETRY)"
    seen = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == str(off)
