"""Each rule for what looks like a secret: what it finds, whole, and what is one character too few."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.redaction import HIDDEN, MIN_LENGTH, PATTERNS, find_secret, hide_secrets, known_secrets, secret_key

HEAD = "-----BEGIN "
# By kind: secrets, and texts that nearly are. Letters are repeated: no real secret looks like that.
SAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "a Hugging Face token": (
        [f"{maker}_{'x' * 16}" for maker in ("hf", "api_org")],
        ["hf_" + "x" * 15, "behf_" + "x" * 20, "hf-" + "x" * 20, "api_org_" + "x" * 15, "hf_hub_transfer_speed"],
    ),
    "an API key": (
        ["sk-" + "x" * 20, "sk-proj-" + "x" * 10 + "_9-" + "x" * 10],
        ["sk-" + "x" * 19, "task-" + "x" * 20, "sk_" + "x" * 20],
    ),
    "a GitLab token": (
        [f"gl{kind}-{'x' * 20}" for kind in ("pat", "dt", "rt", "ptt", "soat", "cbt", "agent")],
        ["glpat-" + "x" * 19, "aglpat-" + "x" * 20, "glpat_" + "x" * 20, "glxyz-" + "x" * 20],
    ),
    "a Stripe key": (
        [f"{who}_{kind}_{'x' * 10}" for who in ("sk", "rk") for kind in ("live", "test", "prod")],
        ["sk_live_" + "x" * 9, "pk_live_" + "x" * 10, "task_live_" + "x" * 10],
    ),
    "a JSON web token": (
        ["eyJ" + "x" * 9 + ".eyJ" + "y" * 9 + "." + "z" * 10],
        ["eyJ" + "x" * 9 + ".eyJ" + "y" * 9, "eyes.eyes.eyes", "eyJ" + "x" * 9 + ".abJ" + "y" * 9 + "." + "z" * 10],
    ),
    "an AWS secret key": (
        ["aws_secret_access_key = " + "x/" * 20, "AWS_SECRET_KEY:" + "x" * 40],
        ["aws_secret_access_key = " + "x" * 39, "secret = " + "x" * 40, "aws_secret_access_key = " + "x" * 41],
    ),
    "a package registry's token": (
        ["npm_" + "x" * 36, "pypi-AgE" + "x" * 50, "rubygems_" + "0a" * 24],
        ["npm_" + "x" * 35, "npm_config_registry", "pypi-AgE" + "x" * 49, "rubygems_" + "x" * 48],
    ),
    "a cloud's token": (
        ["dop_v1_" + "0a" * 32, "ya29." + "x" * 20, "hvs." + "x" * 24, "dckr_pat_" + "x" * 20],
        ["dop_v1_" + "0" * 63, "ya29." + "x" * 19, "hvs." + "x" * 23, "dckr_pat_" + "x" * 19],
    ),
    "a service's token": (
        [
            *("SG." + "x" * 16 + "." + "y" * 16, "shpat_" + "0a" * 16, "glsa_" + "x" * 32, "xapp-" + "x" * 20),
            *(f"{name}-{'x' * 20}" for name in ("pplx", "xai", "nvapi", "tvly")),
            *("gsk_" + "x" * 20, "r8_" + "x" * 20),
        ],
        [
            "SG." + "x" * 15 + "." + "y" * 16,
            "shpat_" + "x" * 32,
            "glsa_" + "x" * 31,
            "xai-" + "x" * 19,
            "r8_" + "x" * 19,
        ],
    ),
    "a GitHub token": (
        [*(f"gh{letter}_{'x' * 36}" for letter in "pousr"), "github_pat_" + "x_" * 25],
        ["ghp_" + "x" * 35, "gha_" + "x" * 36, "aghp_" + "x" * 36, "github_pat_" + "x" * 49],
    ),
    "an AWS key": (
        [kind + "X9" * 8 for kind in ("AKIA", "ASIA", "ABIA", "ACCA")],
        ["AKIA" + "X" * 15, "AKIA" + "X" * 17, "AKIA" + "x" * 16, "AAKIA" + "X" * 16],
    ),
    "a Slack token": (
        [f"xox{letter}-{'1-' * 5}" for letter in "abprs"],
        ["xoxb-" + "1" * 9, "xoxc-" + "1" * 10, "axoxb-" + "1" * 10],
    ),
    "a Google key": (["AIza" + "x_-9A" * 7], ["AIza" + "x" * 34, "AIZA" + "x" * 35, "AAIza" + "x" * 35]),
    "a private key": (
        [f"{HEAD}{kind}PRIVATE KEY-----" for kind in ("", "RSA ", "EC ", "OPENSSH ")],
        [f"{HEAD}PUBLIC KEY-----", f"{HEAD}RSA PRIVATE KEY", f"{HEAD}rsa PRIVATE KEY-----"],
    ),
    "a password in an address": (
        ["https://me:word@", "a://m:w@", "a" * 21 + "://m:w@", "s3://" + "m" * 100 + ":" + "w" * 100 + "@"],
        [
            *("https://host:8080/a@b", "https://me@host", "https://:word@host", "//me:word@host", "https://me:@host"),
            *("a" * 22 + "://m:w@", "s3://" + "m" * 101 + ":w@", "s3://m:" + "w" * 101 + "@"),
        ],
    ),
}


def test_each_rule_has_samples() -> None:
    assert list(SAMPLES) == [kind for kind, _ in PATTERNS]
    assert len(SAMPLES) == len(PATTERNS) == 15
    assert all(matching and missed for matching, missed in SAMPLES.values())


@pytest.mark.parametrize("around", ["{}", "key: {}\n", '{{"key": "{}"}}', "({})"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_what_is_one_is_found_and_hidden(kind: str, around: str) -> None:
    for secret in SAMPLES[kind][0]:
        text = "one\ntwo " + around.format(secret)
        assert find_secret(text, []) == (2, kind), secret
        assert hide_secrets(text, []) == "one\ntwo " + around.format(HIDDEN), secret
        assert secret_key({"data": [{"path": "json"}, {"note": text}]}, []) == ("data.1.note", kind), secret


@pytest.mark.parametrize("kind", SAMPLES)
def test_what_is_none_is_left(kind: str) -> None:
    for words in SAMPLES[kind][1]:
        text = f"one {words} two"
        assert find_secret(text, []) is None, words
        assert hide_secrets(text, []) == text


@pytest.mark.parametrize("hidden", ["\u200b", "\u00ad", "\ufeff", "\u2060", "\u200d"])
def test_a_secret_with_invisible_characters_in_it(hidden: str) -> None:
    secret = "hf_" + hidden.join("x" * 20)
    assert find_secret(f"one\n{secret} two", []) == (2, "a Hugging Face token")
    assert hide_secrets(f"one\n{secret} two {hidden} three", []) == f"one\n{HIDDEN} two {hidden} three"
    assert (
        hide_secrets(f"of this {hidden} machine: 9{hidden}8765432", ["98765432"])
        == f"of this {hidden} machine: {HIDDEN}"
    )
    assert hide_secrets(f"a word{hidden}joined", []) == f"a word{hidden}joined"


def test_the_first_of_several_is_reported() -> None:
    aws, slack = (SAMPLES[kind][0][0] for kind in ("an AWS key", "a Slack token"))
    assert find_secret(f"\n{slack}\n{aws}", [aws]) == (2, "a Slack token")
    assert find_secret(f"\n{aws}\n{slack}", [slack]) == (2, "an AWS key")
    assert find_secret(f"the word\n{aws}", ["word"]) == (1, "a secret of this machine")


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "MY_SECRET", "DB_PASSWORD", "PASSWD", "OPENAI_API_KEY", "some_apikey", "AWS_CREDENTIAL"]
)
def test_values_of_secret_variables_are_known(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = "9" * MIN_LENGTH
    assert value not in known_secrets()
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("TOKEN_FILE", str(tmp_path))
    assert value in known_secrets()
    assert not {"false", str(tmp_path)} & known_secrets()
    monkeypatch.setenv(name, value[1:])
    assert value[1:] not in known_secrets()


def test_tokens_that_the_hub_stores_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {"HF_TOKEN_PATH": "token-in-use\n", "HF_STORED_TOKENS_PATH": "[work]\nhf_token = token-of-work\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(tmp_path / name))
    assert known_secrets() >= {"token-in-use", "token-of-work"}
