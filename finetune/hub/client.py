"""Calls to the Hub: an error's meaning, when to retry, who may write, and whether a repository is public."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

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
    """The meaning of a client's failed call; None for an error from elsewhere."""
    chain = list(_chain(error))
    for link in chain:
        response = getattr(link, "response", None)
        if response is not None and hasattr(response, "status_code"):
            # 400 for a large file means that it arrived damaged; the client wraps it in a RuntimeError.
            damaged = response.status_code == 400 and isinstance(error, RuntimeError)
            return _answered(response, transient=damaged or response.status_code in TRANSIENT)
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
    return HubError(" ".join(str(error).split()), False) if isinstance(error, ValueError) else None


def _answered(response: Any, *, transient: bool) -> HubError:
    message = response.headers.get("X-Error-Message") or _message_in(response)
    after = re.fullmatch(r"\d+", response.headers.get("Retry-After", ""))
    wait = min(float(after[0]), LONGEST_WAIT_SECONDS) if after else None
    return HubError(f"the Hub answered {response.status_code} ({message})", transient, response.status_code, wait)


def _message_in(response: Any) -> str:
    try:
        return str(json.loads(response.content)["error"])
    except Exception:  # an answer that was not read or is not JSON: only the status is known
        return "no further message"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no further message"])[0]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def retry(
    work: Callable[[], Result], *, attempts: int, pause: Callable[[float], None], log: Callable[[str], None]
) -> Result:
    """The result of `work`, retried with doubled waits while its failures are transient.

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
                raise EnvironmentMismatch(f"{hub_error.reason}; {_remedy(hub_error)}") from error
            if attempt == attempts:
                raise HubUnreachable(f"{hub_error.reason}, {attempts} times; try again later") from error
            wait = hub_error.wait_seconds
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1) if wait is None else wait
            log(f"{hub_error.reason}; trying again in {wait:g} s ({attempt} of {attempts})")
            pause(wait)
    raise AssertionError("attempts is at least 1")


def _remedy(hub_error: HubError) -> str:
    if hub_error.status == 401:
        return f"the token is not valid; create one with write access at {TOKENS_PAGE}, then: hf auth login"
    if hub_error.status == 403:
        return f"the token may not do this; create one that may write there at {TOKENS_PAGE}, then: hf auth login"
    return "push again once that is corrected"


def check_permission(api: HfApi, repo_id: str) -> None:
    """Raises EnvironmentMismatch when the token here is known to be unable to write to `repo_id`."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    try:
        user = api.whoami()
    except LocalTokenNotFoundError:
        text = f"no token on this machine; create one with write access at {TOKENS_PAGE}, then: hf auth login"
        raise EnvironmentMismatch(text) from None
    owner = repo_id.split("/")[0]
    token = user.get("auth", {}).get("accessToken", {})
    orgs = {org["name"]: org.get("roleInOrg") for org in user.get("orgs", [])}
    if owner != user["name"] and owner not in orgs:
        known = ", ".join([user["name"], *orgs])
        raise EnvironmentMismatch(f"{repo_id}: this token may write for {known}, not for {owner}; choose one of those")
    if owner in orgs and orgs[owner] not in (None, *WRITING_ROLES):
        raise EnvironmentMismatch(f"{repo_id}: your role in {owner} is {orgs[owner]}; ask there for the right to write")
    if token.get("role") == "read" or (token.get("role") == "fineGrained" and not _scoped(token, repo_id)):
        remedy = f"create one with write access at {TOKENS_PAGE}, then: hf auth login"
        raise EnvironmentMismatch(f"{repo_id}: this token may not write there; {remedy}")


def _scoped(token: Mapping[str, Any], repo_id: str) -> bool:
    """Whether a fine-grained token names the repository, or its owner, with the right to write."""
    scopes = token.get("fineGrained", {}).get("scoped", [])
    named = [scope for scope in scopes if scope.get("entity", {}).get("name") in (repo_id, repo_id.split("/")[0])]
    return any("repo.write" in scope.get("permissions", []) for scope in named)


def check_visibility(api: HfApi, repo_id: str, *, public: bool) -> bool | None:
    """True: the repository is private; False: public, as requested; None: it does not exist.

    Raises FinetuneError for a public repository where a private one was requested.
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
    """Create the repository if it does not exist; returns whether it is private.

    Checks before anything is sent, also a repository just created: an organisation's rule may have made it public.
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
    text = f"{repo_id}: was created, and the Hub does not show it to this token"
    raise EnvironmentMismatch(f"{text}; create one that may read and write at {TOKENS_PAGE}, then: hf auth login")
