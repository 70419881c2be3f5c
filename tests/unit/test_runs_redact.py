"""Secrets never reach the disk; names that only look like secrets do."""

from __future__ import annotations

import pytest

from dstui.runs import redact


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "hub_token", "--hub-token",
     "DB_PASS", "OPENAI_API_KEY", "HUGGING_FACE_HUB_TOKEN", "SSH_KEY", "TOKEN"],
)  # fmt: skip
def test_secrets(name: str) -> None:
    assert redact.is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "--tokenizer_name", "--max_tokens", "PATH", "BYPASS_CHECKS", "--num_passes"],
)
def test_harmless(name: str) -> None:
    assert not redact.is_secret(name)


def test_environment_and_urls() -> None:
    shown = redact.environment({"A_TOKEN": "s3cret", "PROXY": "http://me:s3cret@host:1/", "X": "1"})
    assert "s3cret" not in str(shown) and shown["X"] == "1" and shown["PROXY"].endswith("@host:1/")


def test_arguments() -> None:
    argv = ["train.py", "--hub_token", "s3cret", "--api-key=s3cret", "WANDB_API_KEY=s3cret", "--lr", "1e-4",
            "--push_token", "--next", "v"]  # fmt: skip
    shown = redact.arguments(argv)
    assert "s3cret" not in " ".join(shown)
    assert shown[-5:] == ["--lr", "1e-4", "--push_token", "--next", "v"]
