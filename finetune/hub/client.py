"""Calls to the Hub: an error's meaning, when to retry, who may write, and whether a repository is public."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from finetune.errors import EnvironmentMismatch, FinetuneError, HubUnreachable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PUSH_ATTEMPTS = 5
FIRST_WAIT_SECONDS = 2.0  # doubled each time
LONGEST_WAIT_SECONDS = 300.0
# 409 and 412: another client changed the repository in between.
TRANSIENT = frozenset((408, 409, 412, 425, 429, 500, 502, 503, 504))
NETWORK = frozenset(("httpx", "httpx2", "httpcore", "hf_xet"))  # packages that raise connection errors
TOKENS_PAGE = "https://huggingface.co/settings/tokens"
WRITING_ROLES = ("admin", "write", "contributor")

Result = TypeVar("Result")


@dataclass(frozen=True)
class HubError:
    """A failed call's meaning."""

    reason: str
    transient: bool
    status: int | None = None
    wait_seconds: float | None = None  # as the Hub asks


def classify_error(error: BaseException) -> HubError | None:
    """Say what a client's failed call means; None for an error from elsewhere."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__

    # An answer anywhere in the chain says more than the exception around it, so answers come first.
    for link in chain:
        response = getattr(link, "response", None)
        if response is not None and hasattr(response, "status_code"):
            # 400 for a large file means that it arrived damaged; the client wraps it in a RuntimeError.
            damaged = response.status_code == 400 and isinstance(error, RuntimeError)
            message = response.headers.get("X-Error-Message")
            if not message:
                try:
                    content = json.loads(response.content)
                    refused = content.get("failed")  # files that a bucket did not take, and may take next time
                    message, damaged = str((refused or [content])[0]["error"]), damaged or bool(refused)
                except Exception:  # the answer was not read, or is not JSON: only the status is known
                    message = "no further message"
            wait, retry_after = None, response.headers.get("Retry-After", "")
            if re.fullmatch(r"\d+", retry_after):
                wait = min(float(retry_after), LONGEST_WAIT_SECONDS)
            reason = f"the Hub answered {response.status_code} ({message})"
            transient = damaged or response.status_code in TRANSIENT
            return HubError(reason, transient, response.status_code, wait)
        # The Xet client is written in Rust: its errors carry the status only in their text.
        if (match := re.search(r"HTTP status \w+ error \((\d{3})[^)]*\)", str(link))) is not None:
            status = int(match[1])
            return HubError(f"the Hub's file store answered {status}", status in TRANSIENT, status)
    for link in chain:
        # A proxy's page where JSON was expected counts as a broken connection too.
        broken = isinstance(link, (ConnectionError, TimeoutError, json.JSONDecodeError))
        if broken or type(link).__module__.partition(".")[0] in NETWORK:
            return HubError(f"the connection broke ({type(link).__name__}: {_first_line(link)})", True)
    if isinstance(error, (RuntimeError, OSError)):  # the Xet client raises Python's own exceptions
        return HubError(_first_line(error), True)
    # The client raises ValueError for input that it refuses; a retry cannot mend it.
    if isinstance(error, ValueError):
        return HubError(" ".join(str(error).split()), False)
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no further message"])[0]


def retry(
    work: Callable[[], Result], *, attempts: int, pause: Callable[[float], None], say: Callable[[str], None]
) -> Result:
    """Call `work` until it succeeds, with doubled waits, while its failures are transient.

    Waits of 2, 4, 8 and 16 seconds lie between five attempts, unless the Hub asks for another wait.

    Raises EnvironmentMismatch for a failure that a retry cannot mend, HubUnreachable after the last attempt.
    """
    for attempt in range(1, attempts + 1):
        try:
            return work()
        except FinetuneError:
            raise
        except Exception as error:
            hub_error = classify_error(error)
            if hub_error is None:
                raise
            if not hub_error.transient:
                remedy, log_in = "push again once that is corrected", f"at {TOKENS_PAGE}, then: hf auth login"
                if hub_error.status == 401:
                    remedy = f"the token is not valid; create one with write access {log_in}"
                elif hub_error.status == 403:
                    remedy = f"the token may not do this; create one that may write there {log_in}"
                raise EnvironmentMismatch(f"{hub_error.reason}; {remedy}") from error
            if attempt == attempts:
                raise HubUnreachable(f"{hub_error.reason}, {attempts} times; try again later") from error
            wait = hub_error.wait_seconds
            if wait is None:
                wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            say(f"{hub_error.reason}; trying again in {wait:g} s ({attempt} of {attempts})")
            pause(wait)
    raise AssertionError("attempts is at least 1")


def check_permission(api: HfApi, repo_id: str) -> None:
    """Raise EnvironmentMismatch when the token here is known to be unable to write to `repo_id`."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    try:
        user = api.whoami()
    except LocalTokenNotFoundError:
        text = f"no token on this machine; create one with write access at {TOKENS_PAGE}, then: hf auth login"
        raise EnvironmentMismatch(text) from None
    owner = repo_id.split("/")[0]
    token = user.get("auth", {}).get("accessToken", {})
    # Organisation -> this user's role there; None if the Hub does not tell the role.
    orgs = {org["name"]: org.get("roleInOrg") for org in user.get("orgs", [])}
    if owner != user["name"] and owner not in orgs:
        known = ", ".join([user["name"], *orgs])
        raise EnvironmentMismatch(f"{repo_id}: this token may write for {known}, not for {owner}; choose one of those")
    if owner in orgs and orgs[owner] not in (None, *WRITING_ROLES):
        raise EnvironmentMismatch(f"{repo_id}: your role in {owner} is {orgs[owner]}; ask there for the right to write")
    may_write = token.get("role") != "read"
    if token.get("role") == "fineGrained":
        # Such a token lists its rights by entity. The repository's own entry or its owner's must allow writing.
        scopes = token.get("fineGrained", {}).get("scoped", [])
        may_write = any(
            scope.get("entity", {}).get("name") in (repo_id, owner) and "repo.write" in scope.get("permissions", [])
            for scope in scopes
        )
    if not may_write:
        remedy = f"create one with write access at {TOKENS_PAGE}, then: hf auth login"
        raise EnvironmentMismatch(f"{repo_id}: this token may not write there; {remedy}")


def check_visibility(api: HfApi, repo_id: str, *, public: bool) -> bool | None:
    """True: the repository is private; False: public, as requested; None: it does not exist.

    Raises FinetuneError for a public repository if a private one was requested.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        private = bool(api.repo_info(repo_id).private)
    except RepositoryNotFoundError:
        return None
    if not private and not public:
        raise FinetuneError(
            f"{repo_id}: is public, which was not requested; push to another name, or add --public "
            "(in a recipe: hub.private: false)"
        )
    return private


def ensure_repository(api: HfApi, repo_id: str, *, public: bool) -> bool:
    """Create the repository if it does not exist. Returns whether it is private.

    Checks before anything is sent, even a repository just created: an organisation's rule may have made it public.
    """
    from huggingface_hub.errors import HfHubHTTPError

    private = check_visibility(api, repo_id, public=public)
    if private is not None:
        return private
    conflict = None
    try:
        api.create_repo(repo_id, private=not public)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        conflict = error  # created in between, or being created
    private = check_visibility(api, repo_id, public=public)
    if private is not None:
        return private
    if conflict is not None:
        raise conflict
    raise EnvironmentMismatch(
        f"{repo_id}: was created, and the Hub does not show it to this token; create one that may read and write at "
        f"{TOKENS_PAGE}, then: hf auth login"
    )
