"""What the Hub says of the token that is here; never the token, nor whose it is."""

from __future__ import annotations

from finetune.errors import EnvironmentMismatch
from finetune.hub_calls import check_permission, understand


def scope(repo_id: str | None, endpoint: str | None = None) -> str:
    """`read`, `write` or `fine-grained`, and whether it may write to `repo_id`, the recipe's hub.repo_id.

    Raises EnvironmentMismatch where the Hub refuses it or does not answer.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    try:
        token = api.whoami().get("auth", {}).get("accessToken", {})
        if repo_id:
            check_permission(api, repo_id)
    except EnvironmentMismatch:  # which names the user, and whom else it may write for
        text = "it may not write to the recipe's hub.repo_id; make one with write access there, then: hf auth login"
        raise EnvironmentMismatch(text) from None
    except Exception as error:
        trouble = understand(error)
        if trouble is None:
            raise
        later = "try again later" if trouble.transient else "make another one, then: hf auth login"
        raise EnvironmentMismatch(f"{trouble.reason}; {later}") from error
    role = {"fineGrained": "fine-grained"}.get(token.get("role"), token.get("role") or "of a kind it does not name")
    return f"{role}, may write to hub.repo_id" if repo_id else str(role)
